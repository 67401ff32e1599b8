"""The object tier: who writes what, in which order, and that nothing is visible before all is there."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import zarr

from fastcheck_dask.engine.compression import CompressionPolicy
from fastcheck_dask.engine.object_writer import ChunkWriter, write_raw
from fastcheck_dask.engine.save_objects import save_to_objects
from fastcheck_dask.errors import (
    CommitConflictError,
    NodeUnavailableError,
    TierError,
    TierFullError,
)
from fastcheck_dask.layout.manifest import Manifest
from fastcheck_dask.tiers.object_store import open_store

MARKER = ".fastcheck/commits/00000001-t.json"
NAME = "00000001-t"


class Recorder:
    """An object store that writes down what is done to it, and fails at one of the steps."""

    def __init__(self, store, fail_at=None):
        self._store, self._fail_at = store, fail_at
        self.steps = []

    @property
    def location(self):
        return self._store.location

    def write_all(self, files):
        for path, data in files:
            self.write(path, data)

    def __getattr__(self, name):
        call = getattr(self._store, name)
        if name not in ("write", "create", "sync", "delete", "delete_tree"):
            return call

        def recorded(path, *arguments):
            self.note(name, path)
            return call(path, *arguments)

        return recorded

    def note(self, name, path):
        self.steps.append((name, path))
        if self._fail_at is not None and len(self.steps) == self._fail_at:
            raise TierError(f"injected at {name} {path}")


def written(steps):
    return [path for name, path in steps if name in ("write", "create")]


def marked(run):
    return [marker.generation for marker in run.folder.committed()]


def test_persist_nodes_write_all_chunks_host_none(rig, states):
    run = rig()
    saved = run.save(states.of(1))
    moved = run.persist(saved)
    assert moved.by_host_bytes == 0
    assert moved.by_nodes_bytes > 0
    assert marked(run) == [1]
    assert run.coordinator.latest("run-1").persisted
    group = zarr.open_group(f"{run.folder.store.location}/{NAME}", mode="r")
    assert (group["w1"][:] == states.of(1)["w1"]).all()
    # Of the nodes only those with data write, and nothing stays pinned.
    assert "persist" not in run.nodes["n3"].calls
    assert all(node.store.holds("run-1")["pins"] == [] for node in run.nodes)


def test_persist_after_deltas_writes_whole_chunks(rig, states):
    run = rig()
    for step in range(4):
        saved = run.save(states.of(1, step=step))
    run.persist(saved, from_host=False)
    run.forget_local()
    for node in run.nodes:
        node.down = True
    assert states.same(run.recover().state, states.of(1, step=3))


@pytest.mark.parametrize("node", ["n0", "n1", "n2"])
@pytest.mark.parametrize("op", ["pin", "persist", "unpin", "down"])
def test_persist_node_fails_host_writes_what_is_missing(rig, states, node, op, caplog):
    run = rig()
    saved = run.save(states.of(1))
    if op == "down":
        run.nodes[node].down = True
    else:
        run.nodes[node].fail(op, NodeUnavailableError(node, "injected"))
    moved = run.persist(saved)
    assert (moved.by_host_bytes == 0) is (op == "unpin")
    assert "the training host writes its chunks" in caplog.text
    assert marked(run) == [1]
    run.forget_local()
    for each in run.nodes:
        each.down = True
    assert states.same(run.recover().state, states.of(1))


def test_persist_node_cannot_write_there_host_does(rig, states, tmp_path):
    def refuses(location):
        raise TierError(f"no access to {location}")

    run = rig(opener=refuses)
    saved = run.save(states.of(1))
    moved = run.persist(saved)
    assert moved.by_nodes_bytes == 0
    assert moved.by_host_bytes > 0
    assert marked(run) == [1]


def test_persist_node_lacks_a_chunk_host_writes_that_one(rig, states):
    run = rig()
    saved = run.save(states.of(1))
    key = saved.manifest.layout.keys_of(1)[0]
    run.nodes["n1"].store.quarantine("run-1", 1, saved.record.token, [key])
    before = len(run.encoder.jobs)
    run.persist(saved)
    assert [task.key for job in run.encoder.jobs[before:] for task in job.tasks] == [key]
    assert marked(run) == [1]


@pytest.mark.parametrize("node", ["n0", "n1", "n2"])
@pytest.mark.parametrize("after_deltas", [False, True])
def test_persist_node_lost_and_no_slot_rebuilds_from_parity(rig, states, node, after_deltas):
    run = rig()
    saved = run.save(states.of(1))
    if after_deltas:
        saved = run.save(states.of(1, step=1))
    run.nodes[node].down = True
    moved = run.persist(saved, from_host=False)
    assert moved.by_host_bytes > 0
    run.forget_local()
    for each in run.nodes:
        each.down = True
    assert states.same(run.recover().state, states.of(1, step=int(after_deltas)))


def test_persist_missing_chunk_and_no_slot_or_parity_leaves_no_marker_and_says_why(rig, states):
    run = rig()
    saved = run.save(states.of(1))
    run.nodes["n1"].down = run.nodes["n3"].down = True
    with pytest.raises(TierError, match=r"generation 1.*n1.*is down"):
        run.persist(saved, from_host=False)
    assert marked(run) == []
    assert not run.coordinator.latest("run-1").persisted
    run.nodes["n1"].heal()
    run.persist(saved, from_host=False)
    assert marked(run) == [1]


def test_persist_damaged_parity_writes_no_wrong_chunk(rig, states):
    run = rig()
    saved = run.save(states.of(1))
    run.nodes["n1"].down = True
    parity = run.nodes["n3"].store
    parity.quarantine("run-1", 1, saved.record.token, saved.manifest.layout.keys_of(3))
    with pytest.raises(TierError, match="cannot be persisted"):
        run.persist(saved, from_host=False)
    assert marked(run) == []


def test_persist_slot_changed_meanwhile_is_refused(rig, states):
    run = rig()
    saved = run.save(states.of(1))
    run.nodes["n0"].down = True
    run.slot_of(run.base).data[:] ^= 1
    with pytest.raises(TierError, match="changed in shared memory"):
        run.persist(saved)
    assert marked(run) == []


def test_persist_order_chunks_then_metadata_then_root_then_marker(rig, states):
    run = rig()
    saved = run.save(states.of(1))
    run.nodes["n0"].down = True
    run.folder.store = recorder = Recorder(run.folder.store)
    run.persist(saved)
    order = written(recorder.steps)
    assert order[-2:] == [f"{NAME}/zarr.json", MARKER]
    chunks = [i for i, path in enumerate(order) if path.removeprefix(f"{NAME}/") in saved.manifest.chunks]
    metadata = [i for i, path in enumerate(order) if path.endswith("zarr.json") or "manifest" in path]
    assert chunks
    assert max(chunks) < min(metadata)


def test_persist_fails_at_any_step_no_marker_and_next_attempt_succeeds(rig, states):
    run = rig()
    saved = run.save(states.of(1))
    run.nodes["n0"].down = True
    store = run.folder.store
    failures = []
    while marked(run) == []:
        run.folder.store = Recorder(store, fail_at=len(failures) + 1)
        try:
            run.persist(saved)
        except TierError as error:
            failures.append(str(error))
            run.folder.store = store
            if marked(run) or run.coordinator.latest("run-1").persisted:
                pytest.fail(f"visible after a failure: {error}")
    assert len(failures) > 10
    assert all("injected" in text for text in failures)
    assert "create" in failures[-1]
    run.folder.store = store
    assert marked(run) == [1]
    run.forget_local()
    for node in run.nodes:
        node.down = True
    assert states.same(run.recover().state, states.of(1))


def test_persist_again_writes_nothing_and_is_noted(rig, states):
    run = rig()
    saved = run.save(states.of(1))
    run.persist(saved)
    run.folder.store = recorder = Recorder(run.folder.store)
    moved = run.persist(saved)
    assert (moved.by_nodes_bytes, moved.by_host_bytes) == (0, 0)
    assert recorder.steps == []


def test_persist_coordinator_away_marker_stands_and_next_attempt_notes_it(rig, states, caplog):
    run = rig()
    saved = run.save(states.of(1))
    run.coordinator.unreachable = True
    assert not run.persist(saved).noted
    assert "generation 1 is persisted, and the coordinator does not know yet" in caplog.text
    run.coordinator.unreachable = False
    assert marked(run) == [1]
    # The nodes know, and may give the memory away some day.
    assert run.nodes["n0"].store.report()["runs"]["run-1"]["persisted"] == 1
    assert not run.coordinator.latest("run-1").persisted
    assert run.persist(saved).noted
    assert run.coordinator.latest("run-1").persisted


def test_persist_other_author_was_first_conflicts_and_harms_nothing(rig, states):
    run, foreign = rig(), rig()
    theirs = foreign.save(states.of(2))
    foreign.folder = run.folder
    foreign.persister._folder = run.folder
    foreign.persister._location = run.folder.store.location
    foreign.claim, token = foreign.claim, "theirs"
    manifest = Manifest.from_bytes(theirs.manifest_bytes.replace(b'"token-1"', f'"{token}"'.encode()))
    for key in manifest.chunks:
        run.folder.write_chunk(NAME, key, b"x" * 100)
    run.folder.write_metadata(manifest)
    run.folder.publish(manifest)
    before = {path: run.folder.store.read(path) for path in run.folder.store.list(NAME)}
    saved = run.save(states.of(1))
    with pytest.raises(CommitConflictError):
        run.persist(saved)
    assert {path: run.folder.store.read(path) for path in run.folder.store.list(NAME)} == before
    assert not run.coordinator.latest("run-1").persisted


# Without storage nodes


def save_objects(run, state, *, generation=1, seal=None):
    snapshot = run.snapshot(state)
    slot = run.slot_of(snapshot)
    return asyncio.run(
        save_to_objects(
            "run-1",
            snapshot,
            generation=generation,
            persister=run.persister,
            seal=seal or slot.seal,
            degraded="none alive",
        )
    )


def test_save_to_objects_writes_all_and_loads_exactly(rig, states):
    run = rig(nodes=0)
    saved = save_objects(run, states.of(1))
    assert (saved.record.shards, saved.record.nodes, saved.record.persisted) == (0, (), True)
    assert saved.stats.degraded == "none alive"
    assert saved.stats.chunks == len(saved.manifest.chunks)
    assert saved.stats.sent_bytes > 0
    assert saved.manifest.layout is None
    run.forget_local()
    recovered = run.recover()
    assert recovered.report.source == "object"
    assert states.same(recovered.state, states.of(1))


def test_save_to_objects_seals_before_it_publishes(rig, states):
    run = rig(nodes=0)
    seen = []

    def seal(data):
        seen.append((marked(run), Manifest.from_bytes(data).tag))

    save_objects(run, states.of(1), seal=seal)
    assert seen == [([], "t")]


def test_save_to_objects_fails_at_any_write_former_checkpoint_is_newest(rig, states):
    run = rig(nodes=0)
    save_objects(run, states.of(1))
    store = run.folder.store
    failed = 0
    while True:
        run.folder.store = Recorder(store, fail_at=failed + 1)
        try:
            save_objects(run, states.of(1, step=1), generation=2)
        except TierError:
            failed += 1
            run.folder.store = store
            assert marked(run) == [1]
        else:
            break
    assert failed > 10
    run.folder.store = store
    run.forget_local()
    assert states.same(run.recover().state, states.of(1, step=1))


def test_save_to_objects_is_durable_before_the_root_and_the_marker_are_there(rig, states):
    run = rig(nodes=0)
    run.folder.store = store = Recorder(run.folder.store)
    save_objects(run, states.of(1))
    names = [name for name, _ in store.steps]
    chunks = [n for n, (name, path) in enumerate(store.steps) if name == "write" and "/c/" in path]
    assert chunks[-1] < names.index("sync") < names.index("create")


@pytest.mark.parametrize("kept", [False, True])
def test_save_to_objects_raw_reads_the_slot_as_it_is_now_mapped_before_or_not(
    rig, states, save_alone, monkeypatch, kept
):
    run = rig(nodes=0)
    real = run.snapshot

    def snapshot(*arguments, **options):
        taken = real(*arguments, **options)
        return replace(taken, opened=run.slot_of(taken) if kept else None)

    monkeypatch.setattr(run, "snapshot", snapshot)
    for step in range(3):
        save_alone(run, states.of(1, step=step), CompressionPolicy("never", 1), generation=step + 1)
    run.forget_local()
    assert states.same(run.recover().state, states.of(1, step=2))


@pytest.mark.parametrize("compression", ["always", "never", "auto"])
def test_save_to_objects_compression_as_set_is_told_and_measured(rig, states, save_alone, compression):
    run = rig(nodes=0)
    saved = save_alone(run, states.of(1), CompressionPolicy(compression, 1))
    assert saved.stats.compressed is (compression != "never")
    assert (saved.stats.sent_bytes > saved.stats.raw_bytes) is (compression == "never")
    assert saved.stats.encode_bytes_per_second > 0
    assert saved.stats.link_bytes_per_second > 0
    assert (run.encoder.jobs == []) is (compression == "never")
    run.forget_local()
    assert states.same(run.recover().state, states.of(1))


def test_save_to_objects_raw_finds_no_room_is_compressed_after_all(rig, states, save_alone, monkeypatch):
    run = rig(nodes=0)
    policy = CompressionPolicy("auto", 1)
    monkeypatch.setattr(policy, "compresses", lambda _: False)

    async def full(*arguments, **options):
        await write_raw(*arguments, **options)
        raise TierFullError("x", 2, 1, "free some room")

    monkeypatch.setattr("fastcheck_dask.engine.persist.write_raw", full)
    assert save_alone(run, states.of(1), policy).stats.compressed
    monkeypatch.setattr(policy, "_mode", "never")
    with pytest.raises(TierFullError):
        save_alone(run, states.of(1), policy, generation=2)


@pytest.mark.parametrize(("store_rate", "raw"), [(2.0, True), (0.01, False)])
def test_save_to_objects_auto_goes_by_the_rate_of_the_store(
    rig, states, save_alone, monkeypatch, store_rate, raw
):
    """Rates are bytes for each of a clock that only the store and the encoder move."""
    monkeypatch.setattr("fastcheck_dask.engine.compression.MEASURED_FROM_BYTES", 1)
    run = rig(nodes=0)
    policy = CompressionPolicy("auto", 1)
    observe = policy.observe

    def measured(meter, *, compressed):
        meter.encode_seconds = meter.raw_bytes / (1.0 if compressed else 1e6)
        meter.link_seconds = meter.sent_bytes / store_rate
        observe(meter, compressed=compressed)

    monkeypatch.setattr(policy, "observe", measured)
    for generation in range(1, 6):
        saved = save_alone(run, states.of(1, step=generation), policy, generation=generation)
    assert saved.stats.compressed is not raw


def test_save_to_objects_state_without_arrays(rig):
    run = rig(nodes=0)
    saved = save_objects(run, {"step": 3})
    assert saved.stats.chunks == 0
    run.forget_local()
    assert run.recover().state == {"step": 3}


def test_persist_checkpoint_without_arrays(rig):
    run = rig()
    saved = run.save({"step": 3, "bias": np.arange(4)})
    run.persist(saved, from_host=False)
    assert open_store(run.folder.store.location).exists(MARKER)


class CountingPacer:
    """Lets everything through, and counts it."""

    def __init__(self):
        self.sizes = []

    def turn(self):
        return self

    async def wait(self, nbytes):
        self.sizes.append(nbytes)


@pytest.mark.parametrize("way", ["from the slot", "rebuilt", "always", "never", "by the nodes"])
def test_persist_chunks_that_the_host_writes_are_paced_and_no_others(rig, states, save_alone, way):
    run, pacer = rig(), CountingPacer()
    run.persister._writer = ChunkWriter(run.folder, pacer)
    if way in ("always", "never"):
        saved = save_alone(run, states.of(1), CompressionPolicy(way, 1))
        expected = list(saved.manifest.chunks)
    else:
        saved = run.save(states.of(1))
        if way == "by the nodes":
            expected = []
        else:
            run.nodes["n0"].down = True
            expected = list(saved.manifest.layout.keys_of(0))
        run.persist(saved, from_host=way == "from the slot")
    assert sorted(pacer.sizes) == sorted(run.folder.store.size(f"{NAME}/{key}") for key in expected)
