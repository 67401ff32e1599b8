"""Nodes that answer late: parity overtakes them, and an answer counts once."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from fastcheck_codecs import PrefixIndex

from fastcheck_dask.engine.encode import digest
from fastcheck_dask.errors import NodeUnavailableError


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
    report = saved.load()
    sizes = saved.saved.manifest.sizes
    owed = sum(sizes[key] for key in saved.keys_at(late)[skip:])
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
    key = saved.keys_at(1)[0]
    stripe = saved.saved.manifest.layout.position[key][0]
    size = saved.saved.manifest.nbytes_of(stripe.parity_key)
    wrong = np.arange(size, dtype=np.uint8)
    saved.replace_payload("n3", stripe.parity_key, PrefixIndex().encode(wrong), digest=digest(wrong))

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
    saved.load()
    assert set(asked) == {1}
    assert len(asked) >= len(saved.keys_at(0))


@pytest.mark.parametrize("late", range(3))
def test_load_part_with_a_late_node_fetches_other_members_of_stripes(saved, impatient, late):
    Gate(saved.nodes[f"n{late}"])
    keys = [k for shard in range(3) for k in saved.keys_at(shard)[:2]]
    assert sum(saved.load(keys=keys).raw_bytes.values()) == sum(saved.saved.manifest.sizes[k] for k in keys)
