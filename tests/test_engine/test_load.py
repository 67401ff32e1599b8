"""Chunks from each source alone and mixed, with copies lost and damaged."""

from __future__ import annotations

import asyncio
import logging

import numpy as np
import pytest
from fastcheck_codecs import PrefixIndex

from fastcheck_dask.engine.encode import digest
from fastcheck_dask.engine.load_report import LoadReport
from fastcheck_dask.errors import NodeUnavailableError, UnrecoverableError
from fastcheck_dask.layout.stripes import is_parity_key


def test_load_peers_alone_in_parallel(saved):
    report = saved.load()
    assert report.source == "peers"
    assert report.raw_bytes == {"peers": saved.saved.manifest.raw_bytes}
    assert report.rebuilt == []
    assert "read" not in saved.nodes["n3"].calls


@pytest.mark.parametrize("lost", range(4))
def test_load_one_node_down_rebuilds_its_chunks_from_parity(saved, lost):
    saved.nodes[f"n{lost}"].down = True
    report = saved.load()
    sizes = saved.saved.manifest.sizes
    from_parity = sum(sizes[key] for key in saved.keys_at(lost)) if lost < 3 else 0
    assert report.raw_bytes.get("parity", 0) == from_parity
    assert report.raw_bytes["peers"] == saved.saved.manifest.raw_bytes - from_parity
    assert len([line for line in report.rebuilt if "parity" in line]) == (
        len(saved.keys_at(lost)) if lost < 3 else 0
    )


@pytest.mark.parametrize("lost", [(0, 1), (0, 3), (1, 2, 3), (0, 1, 2, 3)])
def test_load_two_nodes_down_takes_only_missing_chunks_from_objects(saved, lost):
    for number in lost:
        saved.nodes[f"n{number}"].down = True
    report = saved.load(folder=True)
    by_node = sum(saved.saved.manifest.sizes[key] for n in lost if n < 3 for key in saved.keys_at(n))
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
        saved.load(folder=folder)
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
    key = saved.keys_at(1)[0]
    saved.flip("n1", key)
    report = saved.load()
    assert report.source == "peers+parity"
    assert any("damaged" in line and key in line and "n1" in line for line in report.rebuilt)
    assert "repaired" in caplog.text
    again = saved.load()
    assert again.source == "peers"
    assert again.rebuilt == []


def test_load_payload_damaged_on_the_wire_is_caught(saved):
    key = saved.keys_at(0)[0]
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
    report = saved.load()
    assert key in " ".join(report.rebuilt)
    assert report.raw_bytes["parity"] == sum(saved.saved.manifest.sizes[k] for k in saved.keys_at(0))
    assert node.calls.count("quarantine") == 1


def test_load_wrong_bits_with_good_checksum_are_quarantined_and_repaired(saved):
    key = saved.keys_at(2)[0]
    size = saved.saved.manifest.sizes[key]
    other = PrefixIndex(dtype="float32").encode(np.arange(size, dtype=np.uint8))
    saved.replace_payload("n2", key, other, digest=digest(np.arange(size, dtype=np.uint8)))
    report = saved.load()
    assert report.source == "peers+parity"
    assert "quarantine" in saved.nodes["n2"].calls
    assert "repair" in saved.nodes["n2"].calls
    assert saved.load().source == "peers"


@pytest.mark.parametrize("by", [-1, 1])
def test_load_payload_of_other_size_is_no_answer(saved, by):
    key = saved.keys_at(2)[0]
    size = saved.saved.manifest.sizes[key] + by
    other = np.zeros(size, np.uint8)
    saved.replace_payload("n2", key, PrefixIndex().encode(other), digest=digest(other), raw_nbytes=size)
    assert saved.load().source == "peers+parity"


def test_load_quarantine_fails_other_chunks_of_the_node_still_count(saved):
    key, *others = saved.keys_at(0)
    zeros = np.zeros(saved.saved.manifest.sizes[key], np.uint8)
    saved.replace_payload("n0", key, PrefixIndex().encode(zeros), digest=digest(zeros))
    saved.nodes["n0"].fail("quarantine", NodeUnavailableError("n0", "injected"))
    report = saved.load()
    assert others
    assert report.raw_bytes["parity"] == saved.saved.manifest.sizes[key]


def test_load_damaged_and_no_other_source_is_an_error_not_wrong_bytes(saved):
    key = saved.keys_at(0)[0]
    stripe = saved.saved.manifest.layout.position[key][0]
    saved.flip("n0", key)
    saved.flip("n3", stripe.parity_key)
    with pytest.raises(UnrecoverableError) as caught:
        saved.load()
    assert key in str(caught.value)
    assert any("damaged" in cause for cause in caught.value.causes)


def test_load_parity_and_data_damaged_takes_object_and_repairs_both(saved):
    key = saved.keys_at(0)[0]
    stripe = saved.saved.manifest.layout.position[key][0]
    saved.flip("n0", key)
    saved.flip("n3", stripe.parity_key)
    report = saved.load(folder=True)
    assert report.raw_bytes["object"] == saved.saved.manifest.sizes[key]
    assert "repair" in saved.nodes["n3"].calls
    saved.nodes["n0"].down = True
    assert saved.load().source == "peers+parity"


def test_load_parity_gives_other_bits_is_told_and_not_used(saved):
    key = saved.keys_at(0)[0]
    stripe = saved.saved.manifest.layout.position[key][0]
    parity = stripe.parity_key
    size = saved.saved.manifest.nbytes_of(parity)
    wrong = np.arange(size, dtype=np.uint8)
    saved.replace_payload("n3", parity, PrefixIndex().encode(wrong), digest=digest(wrong))
    saved.nodes["n0"].down = True
    with pytest.raises(UnrecoverableError):
        saved.load()
    assert saved.load(folder=True).raw_bytes["object"] == saved.saved.manifest.sizes[key]


@pytest.mark.parametrize("kind", ["flipped", "cut", "empty", "foreign"])
def test_load_object_damaged_and_nodes_gone_is_unrecoverable(saved, kind):
    key = saved.keys_at(0)[0]
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
        saved.load(folder=True)
    assert "1 chunks" in str(caught.value)
    assert any(key in cause for cause in caught.value.causes)


def test_load_node_without_generation_counts_as_lost(saved):
    saved.nodes["n1"].restart()
    report = saved.load()
    assert report.source == "peers+parity"
    assert "repair" not in saved.nodes["n1"].calls


def test_load_repair_fails_load_succeeds(saved, caplog):
    saved.flip("n1", saved.keys_at(1)[0])
    saved.nodes["n1"].fail("repair", NodeUnavailableError("n1", "injected"))
    saved.load()
    assert "was not repaired" in caplog.text


# Parts


def test_load_part_only_reads_what_is_asked(saved):
    keys = [chunk.key for spec in saved.saved.manifest.arrays if spec.path == "w2" for chunk in spec.chunks]
    memory = {}
    report = saved.load(keys=keys, memory=memory)
    assert memory.keys() == set(keys)
    assert report.raw_bytes == {"peers": sum(saved.saved.manifest.sizes[key] for key in keys)}


@pytest.mark.parametrize("lost", range(3))
def test_load_part_with_node_down_fetches_other_members_of_stripes(saved, lost):
    saved.nodes[f"n{lost}"].down = True
    for spec in saved.saved.manifest.arrays:
        keys = [chunk.key for chunk in spec.chunks]
        memory = {}
        report = saved.load(keys=keys, memory=memory)
        assert memory.keys() == set(keys)
        assert sum(report.raw_bytes.values()) == spec.nbytes


def test_load_nothing_asks_nobody(saved):
    calls = [len(node.calls) for node in saved.nodes]
    report = saved.load(keys=[])
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
    key = saved.keys_at(0)[0]
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
    saved.flip("n0", gone)
    saved.flip("n0", other[0])
    saved.flip("n1", other[1])
    loader.take_local([local], slot_region(saved))
    asyncio.run(loader.load(manifest.chunks))
    assert loader._report.source == "local+peers+parity+object"
    assert loader._report.raw_bytes["object"] == sum(manifest.sizes[key] for key in other[:2])
    assert loader._report.raw_bytes["parity"] == manifest.sizes[gone]
    assert all(digest(memory[key]) == manifest.digests[key] for key in manifest.chunks)


# Bytes


@pytest.mark.parametrize("saves", [1, 10, 100])
def test_load_after_many_saves_receives_the_bytes_of_one_checkpoint(saved_rig, states, saves):
    run = saved_rig(nodes=3, chunk_bytes=2**20)
    for step in range(saves):
        run.saved = run.save(states.of(1, step=step, arrays=2))
    report = run.load()
    whole = run.saved.manifest.raw_bytes
    assert 0.3 * whole < report.received_bytes < 1.1 * whole


def test_load_received_bytes_count_payloads_that_came(saved):
    saved.load()
    clients = saved.nodes.clients[:]
    report = saved.load()
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
    lost = sum(saved.saved.manifest.sizes[key] for key in saved.keys_at(0))
    before = saved.nodes["n3"].calls.count("read")
    assert saved.load().raw_bytes["parity"] == lost
    assert saved.nodes["n3"].calls.count("read") - before > 1
    assert not any(is_parity_key(key) for key in saved.saved.manifest.chunks)


def test_load_parity_is_asked_only_where_one_member_is_missing(saved):
    asked = []
    saved.nodes["n3"].before["read"] = lambda request: asked.extend(request["keys"])
    for name in ("n0", "n1"):
        saved.nodes[name].down = True
    saved.load(folder=True)
    wanted = [
        stripe.parity_key
        for stripe in saved.saved.manifest.layout.stripes
        if sum(key is not None for key in stripe.members[:2]) == 1
    ]
    assert sorted(asked) == sorted(wanted)
