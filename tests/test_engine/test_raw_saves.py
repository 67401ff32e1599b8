"""Saves whose chunks go raw: as bits are, and only where that is faster and fits."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import numpy as np
import pytest

from fastcheck_dask.engine import compression
from fastcheck_dask.engine.compression import CompressionPolicy
from fastcheck_dask.errors import (
    NodeUnavailableError,
    TierFullError,
)
from fastcheck_dask.testing.encoder import InlineEncoder

NODES = ("n0", "n1", "n2", "n3")


class Turns(CompressionPolicy):
    """Compresses as it is told, save by save, and keeps what it is shown."""

    def __init__(self, *turns):
        super().__init__("auto", 1)
        self.turns, self.seen, self.refused = list(turns), [], 0

    def compresses(self, raw_bytes):
        self.asked_bytes = raw_bytes
        return self.turns.pop(0)

    def observe(self, meter, *, compressed):
        self.seen.append((meter, compressed))

    def refuse_raw(self):
        self.refused += 1
        return True


def test_save_raw_sends_every_chunk_whole_and_as_long_as_its_bits(rig, states, loads):
    run = rig(policy=CompressionPolicy("never", 1))
    for step in range(3):
        saved = run.save(states.of(1, step=step))
        assert saved.stats.compressed is False
        assert saved.stats.deltas == 0
        raw = sum(saved.manifest.nbytes_of(key) for key in saved.manifest.digests)
        assert raw < saved.stats.sent_bytes < raw + 100 * saved.stats.chunks
        assert saved.stats.encode_bytes_per_second > 0
        assert saved.stats.link_bytes_per_second > 0
    assert loads(run, states.of(1, step=2), states)


@pytest.mark.parametrize("lost", [None, *NODES])
def test_save_raw_and_compressed_in_turns_load_exactly_also_from_parity(rig, states, lost):
    turns = [False, True, True, False, False, True, False]
    policy = Turns(*turns)
    run = rig(policy=policy)
    for step, compressed in enumerate(turns):
        saved = run.save(states.of(1, step=step))
        assert saved.stats.compressed is compressed
        # A raw chunk is as good a base as any.
        assert (saved.stats.deltas > 0) is compressed
    assert [compressed for _, compressed in policy.seen] == turns
    raw = sum(map(saved.manifest.nbytes_of, saved.manifest.digests))
    assert {meter.raw_bytes for meter, _ in policy.seen} == {raw}
    assert policy.asked_bytes == saved.manifest.raw_bytes
    if lost is not None:
        run.nodes[lost].down = True
    run.forget_local()
    recovered = run.recover(folder=False)
    assert states.same(recovered.state, states.of(1, step=step))
    # The last node has the parity.
    assert recovered.report.source == ("peers" if lost in (None, "n3") else "peers+parity")


class SlowCodecs(InlineEncoder):
    """Compresses a thousand times as slowly as it does, by its own account."""

    @contextlib.asynccontextmanager
    async def encoded(self, job, current, base):
        async with super().encoded(job, current, base) as chunks:
            seconds = 1.0 if job.compress else 1e-9
            yield [replace(chunk, encode_seconds=seconds) for chunk in chunks]


def test_save_by_slow_encoders_over_a_fast_link_goes_raw_by_itself(rig, states, loads, monkeypatch):
    monkeypatch.setattr(compression, "MEASURED_FROM_BYTES", 0)
    run = rig(policy=CompressionPolicy("auto", 1), encoder=SlowCodecs())
    saves = [run.save(states.of(1, step=step)) for step in range(6)]
    assert [saved.stats.compressed for saved in saves] == [True, True, True, False, False, False]
    assert saves[0].stats.encode_bytes_per_second < saves[0].stats.link_bytes_per_second
    assert loads(run, states.of(1, step=5), states)


@pytest.mark.parametrize("compressed", [True, False])
def test_save_raw_persisted_by_the_nodes_loads_from_objects(rig, states, compressed):
    run = rig(policy=Turns(False, compressed))
    run.save(states.of(1))
    saved = run.save(states.of(1, step=1))
    assert run.persist(saved, from_host=False).by_nodes_bytes > 0
    run.forget_local()
    for name in NODES:
        run.nodes[name].down = True
    recovered = run.recover()
    assert recovered.report.source == "object"
    assert states.same(recovered.state, states.of(1, step=1))


def test_save_raw_does_not_fit_a_node_is_compressed_after_all(rig, states, loads, caplog):
    policy = Turns(True, False)
    run = rig(policy=policy, limit_bytes=60_000)
    run.save(states.of(1))
    constant = {"w": np.ones(60_000)}
    saved = run.save(constant)
    assert (policy.refused, saved.stats.compressed) == (1, True)
    assert [compressed for _, compressed in policy.seen] == [True, True]
    assert "is compressed after all: storage node" in caplog.text
    assert loads(run, constant, states)


def test_save_ordered_raw_does_not_fit_a_node_fails_and_former_generation_stays(rig, states, loads):
    run = rig(policy=CompressionPolicy("never", 1), limit_bytes=60_000)
    first = run.save(states.of(1, arrays=2))
    with pytest.raises(TierFullError, match="storage node"):
        run.save({"w": np.ones(60_000)})
    assert run.coordinator.latest("run-1") == first.record
    assert loads(run, states.of(1, arrays=2), states)


def test_save_that_failed_is_not_measured(rig, states):
    policy = Turns(False, False)
    run = rig(policy=policy)
    run.save(states.of(1))
    run.nodes["n2"].fail("prepare", NodeUnavailableError("n2", "injected"))
    with pytest.raises(NodeUnavailableError):
        run.save(states.of(1, step=1))
    assert len(policy.seen) == 1
