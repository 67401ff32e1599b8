"""Chunks from each source alone and mixed, with copies lost and damaged."""

from __future__ import annotations

import asyncio
import logging

import numpy as np
import pytest
from fastcheck_codecs import PrefixIndex, checksum

from fastcheck_dask.engine.encode import digest
from fastcheck_dask.engine.load_report import LoadReport
from fastcheck_dask.errors import NodeUnavailableError, UnrecoverableError
from fastcheck_dask.layout.stripes import is_parity_key
from fastcheck_dask.node.entries import accept


@pytest.fixture
def saved(rig, states):
    """A run with one committed checkpoint, persisted."""
    run = rig()
    run.state = states.of(1)
    run.saved = run.save(run.state)
    run.persist(run.saved)
    return run


def load(run, *, keys=None, folder=False, memory=None):
    """Load chunks; check every one that is said to be there against the slot that was saved from."""
    memory = {} if memory is None else memory
    keys = list(run.saved.manifest.chunks) if keys is None else keys
    loader = run.loader(run.saved, memory, folder=folder)
    asyncio.run(loader.load(keys))
    for key in keys:
        assert digest(memory[key]) == run.saved.manifest.digests[key]
    return loader._report


def replace_payload(run, name, key, payload, **fields):
    """Change what a node holds of a chunk, as damage that its checksum does not show."""
    store = run.nodes[name].store
    (held,) = store._runs["run-1"].generations()
    (entry,) = held.chains[key]
    described = entry.descriptor._replace(crc32c=checksum(payload), nbytes=payload.size, **fields)
    chain = (accept(described, payload, name),)
    store._holdings.set_chain(store._runs["run-1"], held, key, chain=chain)


def flip(run, name, key):
    """Flip one bit in the memory of a node."""
    (held,) = run.nodes[name].store._runs["run-1"].generations()
    payload = held.chains[key][0].payload
    payload.flags.writeable = True
    payload[-1] ^= 1
    payload.flags.writeable = False


def keys_at(run, shard):
    return run.saved.manifest.layout.keys_of(shard)


def test_load_peers_alone_in_parallel(saved):
    report = load(saved)
    assert report.source == "peers"
    assert report.raw_bytes == {"peers": saved.saved.manifest.raw_bytes}
    assert report.rebuilt == []
    assert "read" not in saved.nodes["n3"].calls


@pytest.mark.parametrize("lost", range(4))
def test_load_one_node_down_rebuilds_its_chunks_from_parity(saved, lost):
    saved.nodes[f"n{lost}"].down = True
    report = load(saved)
    sizes = saved.saved.manifest.sizes
    from_parity = sum(sizes[key] for key in keys_at(saved, lost)) if lost < 3 else 0
    assert report.raw_bytes.get("parity", 0) == from_parity
    assert report.raw_bytes["peers"] == saved.saved.manifest.raw_bytes - from_parity
    assert len([line for line in report.rebuilt if "parity" in line]) == (
        len(keys_at(saved, lost)) if lost < 3 else 0
    )


@pytest.mark.parametrize("lost", [(0, 1), (0, 3), (1, 2, 3), (0, 1, 2, 3)])
def test_load_two_nodes_down_takes_only_missing_chunks_from_objects(saved, lost):
    for number in lost:
        saved.nodes[f"n{number}"].down = True
    report = load(saved, folder=True)
    by_node = sum(saved.saved.manifest.sizes[key] for n in lost if n < 3 for key in keys_at(saved, n))
    rebuilt = report.raw_bytes.get("parity", 0)
    assert report.raw_bytes["object"] + rebuilt == by_node
    assert report.raw_bytes.get("peers", 0) == saved.saved.manifest.raw_bytes - by_node
    if 3 in lost:
        assert rebuilt == 0


@pytest.mark.parametrize("folder", [False, True])
def test_load_two_nodes_down_and_no_object_tier_says_every_cause(saved, folder):
    for name in ("n0", "n1"):
        saved.nodes[name].down = True
    if folder:
        saved.folder.store.delete_tree("00000001-t")
    with pytest.raises(UnrecoverableError) as caught:
        load(saved, folder=folder)
    assert "generation 1 (t)" in str(caught.value)
    causes = " ".join(caught.value.causes)
    assert "n0" in causes
    assert "n1" in causes
    assert ("00000001-t" in causes) is folder


def test_load_without_record_reads_objects_only(saved):
    memory = {}
    loader = saved.loader(saved.saved, memory, folder=True)
    loader._record = None
    asyncio.run(loader.load(saved.saved.manifest.chunks))
    assert loader._report.source == "object"
    assert "read" not in saved.nodes["n0"].calls


# Damage


def test_load_payload_flipped_in_node_is_named_dropped_and_repaired(saved, caplog):
    key = keys_at(saved, 1)[0]
    flip(saved, "n1", key)
    report = load(saved)
    assert report.source == "peers+parity"
    assert any("damaged" in line and key in line and "n1" in line for line in report.rebuilt)
    assert "repaired" in caplog.text
    again = load(saved)
    assert again.source == "peers"
    assert again.rebuilt == []


def test_load_payload_damaged_on_the_wire_is_caught(saved):
    key = keys_at(saved, 0)[0]
    node = saved.nodes["n0"]
    serve = node.serve

    async def damaged(request):
        reply = await serve(request)
        if request["op"] == "read":
            reply["frames"] = [frame.copy() for frame in reply["frames"]]
            for frame in reply["frames"]:
                frame[-1] ^= 0x10
        return reply

    node.serve = damaged
    report = load(saved)
    assert key in " ".join(report.rebuilt)
    assert report.raw_bytes["parity"] == sum(saved.saved.manifest.sizes[k] for k in keys_at(saved, 0))
    assert node.calls.count("quarantine") == 1


def test_load_wrong_bits_with_good_checksum_are_quarantined_and_repaired(saved):
    key = keys_at(saved, 2)[0]
    size = saved.saved.manifest.sizes[key]
    other = PrefixIndex(dtype="float32").encode(np.arange(size, dtype=np.uint8))
    replace_payload(saved, "n2", key, other, digest=digest(np.arange(size, dtype=np.uint8)))
    report = load(saved)
    assert report.source == "peers+parity"
    assert "quarantine" in saved.nodes["n2"].calls
    assert "repair" in saved.nodes["n2"].calls
    assert load(saved).source == "peers"


@pytest.mark.parametrize("by", [-1, 1])
def test_load_payload_of_other_size_is_no_answer(saved, by):
    key = keys_at(saved, 2)[0]
    size = saved.saved.manifest.sizes[key] + by
    other = np.zeros(size, np.uint8)
    replace_payload(saved, "n2", key, PrefixIndex().encode(other), digest=digest(other), raw_nbytes=size)
    assert load(saved).source == "peers+parity"


def test_load_quarantine_fails_other_chunks_of_the_node_still_count(saved):
    key, *others = keys_at(saved, 0)
    zeros = np.zeros(saved.saved.manifest.sizes[key], np.uint8)
    replace_payload(saved, "n0", key, PrefixIndex().encode(zeros), digest=digest(zeros))
    saved.nodes["n0"].fail("quarantine", NodeUnavailableError("n0", "injected"))
    report = load(saved)
    assert others
    assert report.raw_bytes["parity"] == saved.saved.manifest.sizes[key]


def test_load_damaged_and_no_other_source_is_an_error_not_wrong_bytes(saved):
    key = keys_at(saved, 0)[0]
    stripe = saved.saved.manifest.layout.position[key][0]
    flip(saved, "n0", key)
    flip(saved, "n3", stripe.parity_key)
    with pytest.raises(UnrecoverableError) as caught:
        load(saved)
    assert key in str(caught.value)
    assert any("damaged" in cause for cause in caught.value.causes)


def test_load_parity_and_data_damaged_takes_object_and_repairs_both(saved):
    key = keys_at(saved, 0)[0]
    stripe = saved.saved.manifest.layout.position[key][0]
    flip(saved, "n0", key)
    flip(saved, "n3", stripe.parity_key)
    report = load(saved, folder=True)
    assert report.raw_bytes["object"] == saved.saved.manifest.sizes[key]
    assert "repair" in saved.nodes["n3"].calls
    saved.nodes["n0"].down = True
    assert load(saved).source == "peers+parity"


def test_load_parity_gives_other_bits_is_told_and_not_used(saved):
    key = keys_at(saved, 0)[0]
    stripe = saved.saved.manifest.layout.position[key][0]
    parity = stripe.parity_key
    size = saved.saved.manifest.nbytes_of(parity)
    wrong = np.arange(size, dtype=np.uint8)
    replace_payload(saved, "n3", parity, PrefixIndex().encode(wrong), digest=digest(wrong))
    saved.nodes["n0"].down = True
    with pytest.raises(UnrecoverableError):
        load(saved)
    assert load(saved, folder=True).raw_bytes["object"] == saved.saved.manifest.sizes[key]


@pytest.mark.parametrize("kind", ["flipped", "cut", "empty", "foreign"])
def test_load_object_damaged_and_nodes_gone_is_unrecoverable(saved, kind):
    key = keys_at(saved, 0)[0]
    path = f"00000001-t/{key}"
    data = bytearray(saved.folder.store.read(path))
    data[len(data) // 2] ^= 1
    content = {
        "flipped": bytes(data),
        "cut": bytes(data[:-9]),
        "empty": b"",
        "foreign": PrefixIndex().encode(np.zeros(saved.saved.manifest.sizes[key], np.uint8)).tobytes(),
    }
    saved.folder.store.write(path, content[kind])
    for node in saved.nodes:
        node.down = True
    with pytest.raises(UnrecoverableError) as caught:
        load(saved, folder=True)
    assert "1 chunks" in str(caught.value)
    assert any(key in cause for cause in caught.value.causes)


def test_load_node_without_generation_counts_as_lost(saved):
    saved.nodes["n1"].restart()
    report = load(saved)
    assert report.source == "peers+parity"
    assert "repair" not in saved.nodes["n1"].calls


def test_load_repair_fails_load_succeeds(saved, caplog):
    flip(saved, "n1", keys_at(saved, 1)[0])
    saved.nodes["n1"].fail("repair", NodeUnavailableError("n1", "injected"))
    load(saved)
    assert "was not repaired" in caplog.text


# Late nodes


class Gate:
    """Holds the reads of a node until it is opened."""

    def __init__(self, node, *, skip=0):
        self.opened, self.held = asyncio.Event(), asyncio.Event()
        self._skip = skip
        serve = node.serve

        async def gated(request):
            if request["op"] == "read":
                if self._skip == 0:
                    self.held.set()
                    await self.opened.wait()
                else:
                    self._skip -= 1
            return await serve(request)

        node.serve = gated


@pytest.fixture
def impatient(monkeypatch):
    """Batches of one chunk, and nobody is given time for nothing."""
    monkeypatch.setattr("fastcheck_dask.engine.load._BATCH_BYTES", 1)
    monkeypatch.setattr("fastcheck_dask.engine.pace.JITTER_SECONDS", 0.02)


@pytest.mark.parametrize("late", range(3))
@pytest.mark.parametrize("skip", [0, 1])
def test_load_node_late_is_overtaken_by_parity(saved, impatient, late, skip):
    Gate(saved.nodes[f"n{late}"], skip=skip)
    report = load(saved)
    sizes = saved.saved.manifest.sizes
    owed = sum(sizes[key] for key in keys_at(saved, late)[skip:])
    assert report.source == "peers+parity"
    # Nobody else was in the way, but on a busy machine others may be late, too.
    assert report.raw_bytes["parity"] >= owed
    assert sum(report.raw_bytes.values()) == saved.saved.manifest.raw_bytes
    assert all(client._closed for client in saved.nodes.clients)


def test_load_late_node_answers_before_the_parity_does_and_counts(saved, impatient):
    async def main():
        late, parity = Gate(saved.nodes["n1"]), Gate(saved.nodes["n3"])
        memory = {}
        loader = saved.loader(saved.saved, memory)
        loading = asyncio.create_task(loader.load(list(saved.saved.manifest.chunks)))
        await late.held.wait()
        await parity.held.wait()
        late.opened.set()
        await loading
        assert not parity.opened.is_set()
        return loader._report, memory

    report, memory = asyncio.run(main())
    assert report.source == "peers"
    assert report.raw_bytes == {"peers": saved.saved.manifest.raw_bytes}
    for key, bits in memory.items():
        assert digest(bits) == saved.saved.manifest.digests[key]


def test_load_late_node_answers_after_its_chunk_was_rebuilt_and_does_not_count(saved, impatient):
    async def main():
        late = Gate(saved.nodes["n1"])
        memory = {}
        loader = saved.loader(saved.saved, memory)
        good = loader._is_good

        def overtaken(key, source):
            good(key, source)
            if source == "parity":
                late.opened.set()

        loader._is_good = overtaken
        await loader.load(list(saved.saved.manifest.chunks))
        return loader._report, memory

    report, memory = asyncio.run(main())
    assert sum(report.raw_bytes.values()) == saved.saved.manifest.raw_bytes
    assert report.raw_bytes["parity"] > 0
    for key, bits in memory.items():
        assert digest(bits) == saved.saved.manifest.digests[key]


def test_load_node_late_and_parity_lost_waits_for_the_node(saved, impatient):
    async def main():
        late = Gate(saved.nodes["n1"])
        saved.nodes["n3"].fail("read", NodeUnavailableError("n3", "injected"))
        fault = saved.nodes["n3"].before["read"]

        def fail_and_open(request):
            late.opened.set()
            fault(request)

        saved.nodes["n3"].before["read"] = fail_and_open
        loader = saved.loader(saved.saved, {})
        await loader.load(list(saved.saved.manifest.chunks))
        return loader._report

    assert asyncio.run(main()).source == "peers"


def test_load_late_node_and_damaged_parity_never_gives_wrong_bytes(saved, impatient):
    key = keys_at(saved, 1)[0]
    stripe = saved.saved.manifest.layout.position[key][0]
    size = saved.saved.manifest.nbytes_of(stripe.parity_key)
    wrong = np.arange(size, dtype=np.uint8)
    replace_payload(saved, "n3", stripe.parity_key, PrefixIndex().encode(wrong), digest=digest(wrong))

    async def main():
        late = Gate(saved.nodes["n1"])
        memory = {}
        loader = saved.loader(saved.saved, memory)
        lost = loader._lost
        loader._lost = lambda why: (lost(why), late.opened.set())
        await loader.load(list(saved.saved.manifest.chunks))
        return memory

    memory = asyncio.run(main())
    assert digest(memory[key]) == saved.saved.manifest.digests[key]


def test_load_late_node_is_hedged_a_bounded_number_of_chunks_at_a_time(saved, impatient, monkeypatch):
    monkeypatch.setattr("fastcheck_dask.engine.load.PARITY_BYTES", 1)
    asked = []
    saved.nodes["n3"].before["read"] = lambda request: asked.append(len(request["keys"]))
    Gate(saved.nodes["n0"])
    load(saved)
    assert set(asked) == {1}
    assert len(asked) >= len(keys_at(saved, 0))


@pytest.mark.parametrize("late", range(3))
def test_load_part_with_a_late_node_fetches_other_members_of_stripes(saved, impatient, late):
    Gate(saved.nodes[f"n{late}"])
    keys = [k for shard in range(3) for k in keys_at(saved, shard)[:2]]
    assert sum(load(saved, keys=keys).raw_bytes.values()) == sum(saved.saved.manifest.sizes[k] for k in keys)


# Parts


def test_load_part_only_reads_what_is_asked(saved):
    keys = [chunk.key for spec in saved.saved.manifest.arrays if spec.path == "w2" for chunk in spec.chunks]
    memory = {}
    report = load(saved, keys=keys, memory=memory)
    assert memory.keys() == set(keys)
    assert report.raw_bytes == {"peers": sum(saved.saved.manifest.sizes[key] for key in keys)}


@pytest.mark.parametrize("lost", range(3))
def test_load_part_with_node_down_fetches_other_members_of_stripes(saved, lost):
    saved.nodes[f"n{lost}"].down = True
    for spec in saved.saved.manifest.arrays:
        keys = [chunk.key for chunk in spec.chunks]
        memory = {}
        report = load(saved, keys=keys, memory=memory)
        assert memory.keys() == set(keys)
        assert sum(report.raw_bytes.values()) == spec.nbytes


def test_load_nothing_asks_nobody(saved):
    calls = [len(node.calls) for node in saved.nodes]
    report = load(saved, keys=[])
    assert report.source == "inline"
    assert [len(node.calls) for node in saved.nodes] == calls


# Local


def slot_region(run):
    content = run.base.content
    data = run.slot_of(run.base).data

    def region(key):
        offset, nbytes = content.piece(key)
        return data[offset : offset + nbytes]

    return region


def test_take_local_copies_verified_chunks_and_asks_no_node(saved):
    memory = {}
    loader = saved.loader(saved.saved, memory)
    calls = len(saved.nodes["n0"].calls)
    loader.take_local(saved.saved.manifest.chunks, slot_region(saved))
    asyncio.run(loader.load(saved.saved.manifest.chunks))
    assert loader._report.source == "local"
    assert len(saved.nodes["n0"].calls) == calls
    region = slot_region(saved)
    assert all((memory[key] == region(key)).all() for key in saved.saved.manifest.chunks)


def test_take_local_damaged_chunk_comes_from_peers(saved, caplog):
    key = keys_at(saved, 0)[0]
    slot_region(saved)(key)[5] ^= 4
    memory = {}
    loader = saved.loader(saved.saved, memory)
    loader.take_local(saved.saved.manifest.chunks, slot_region(saved))
    asyncio.run(loader.load(saved.saved.manifest.chunks))
    assert loader._report.raw_bytes["peers"] == saved.saved.manifest.sizes[key]
    assert loader._report.source == "local+peers"
    assert digest(memory[key]) == saved.saved.manifest.digests[key]
    assert f"chunk {key} is damaged in shared memory" in caplog.text


def test_load_all_four_sources_mixed(saved):
    manifest = saved.saved.manifest
    memory = {}
    loader = saved.loader(saved.saved, memory, folder=True)
    stripes = [s for s in manifest.layout.stripes if all(s.members)]
    local, gone, other = stripes[0].members[0], stripes[1].members[0], stripes[2].members
    flip(saved, "n0", gone)
    flip(saved, "n0", other[0])
    flip(saved, "n1", other[1])
    loader.take_local([local], slot_region(saved))
    asyncio.run(loader.load(manifest.chunks))
    assert loader._report.source == "local+peers+parity+object"
    assert loader._report.raw_bytes["object"] == sum(manifest.sizes[key] for key in other[:2])
    assert loader._report.raw_bytes["parity"] == manifest.sizes[gone]
    assert all(digest(memory[key]) == manifest.digests[key] for key in manifest.chunks)


# Bytes


@pytest.mark.parametrize("saves", [1, 10, 100])
def test_load_after_many_saves_receives_the_bytes_of_one_checkpoint(rig, states, saves):
    run = rig(nodes=3, chunk_bytes=2**20)
    for step in range(saves):
        run.saved = run.save(states.of(1, step=step, arrays=2))
    report = load(run)
    whole = run.saved.manifest.raw_bytes
    assert 0.3 * whole < report.received_bytes < 1.1 * whole


def test_load_received_bytes_count_payloads_that_came(saved):
    load(saved)
    clients = saved.nodes.clients[:]
    report = load(saved)
    came = sum(c.received_bytes for c in saved.nodes.clients[len(clients) :])
    assert report.received_bytes == came > 0
    assert all(client._closed for client in saved.nodes.clients)


def test_report_source_names_what_gave_anything_in_order():
    report = LoadReport(1, "t")
    assert report.source == "inline"
    report.count("object", 3)
    report.count("local", 2)
    report.count("object", 4)
    report.count("peers", 0)
    assert report.raw_bytes == {"object": 7, "local": 2, "peers": 0}
    assert report.source == "local+object"


def test_load_many_lost_stripes_are_rebuilt_a_bounded_number_at_a_time(saved, monkeypatch, caplog):
    monkeypatch.setattr("fastcheck_dask.engine.parity_source.PARITY_BYTES", 5000)
    caplog.set_level(logging.DEBUG)
    saved.nodes["n0"].down = True
    lost = sum(saved.saved.manifest.sizes[key] for key in keys_at(saved, 0))
    before = saved.nodes["n3"].calls.count("read")
    assert load(saved).raw_bytes["parity"] == lost
    assert saved.nodes["n3"].calls.count("read") - before > 1
    assert not any(is_parity_key(key) for key in saved.saved.manifest.chunks)


def test_load_parity_is_asked_only_where_one_member_is_missing(saved):
    asked = []
    saved.nodes["n3"].before["read"] = lambda request: asked.extend(request["keys"])
    for name in ("n0", "n1"):
        saved.nodes[name].down = True
    load(saved, folder=True)
    wanted = [
        stripe.parity_key
        for stripe in saved.saved.manifest.layout.stripes
        if sum(key is not None for key in stripe.members[:2]) == 1
    ]
    assert sorted(asked) == sorted(wanted)
