"""The service with real slots, encoders and an embedded coordinator, and no storage nodes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fastcheck_dask.agent import service as service_module
from fastcheck_dask.agent.service import RunConfig, SaveService
from fastcheck_dask.config import settings
from fastcheck_dask.coordination.base import CommitRecord
from fastcheck_dask.coordination.embedded import EmbeddedCoordinator
from fastcheck_dask.engine.persist import Persisted
from fastcheck_dask.engine.snapshot import describe
from fastcheck_dask.errors import CoordinationError, TierError
from fastcheck_dask.layout.state import flatten
from fastcheck_dask.tiers.local import LocalTier, SlotState
from fastcheck_dask.tiers.pacing import Pacer

NBYTES = 8192
FLAT = flatten({"w": np.zeros(NBYTES // 4, np.float32)}, chunk_bytes=NBYTES // 2)


class Bench:
    """A service, what it told, and the trainer's side of the slots."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.folder = folder
        self.told: list[dict[str, Any]] = []
        self.coordinator = EmbeddedCoordinator(folder / "coord.db")
        self.claim = self.coordinator.claim("run", "test")
        self.local = LocalTier("run", folder / "shm")
        config = RunConfig(
            run="run",
            location=str(folder / "objects"),
            coordinator_url="",
            peers=False,
            wanted_shards=None,
            settings=settings(local_dir=str(folder / "shm"), encoders=1, **options),
        )
        self.service = SaveService(config, self.coordinator, self.claim, self.told.append)

    def snapshot(self, number: int, seed: int, token: str | None = None) -> bytes:
        slot = self.local.slots[number]
        slot.reserve(NBYTES)
        token = token or f"token{seed}"
        slot.begin(token, f"s{seed}")
        bits = np.random.default_rng(seed).normal(size=NBYTES // 4).astype(np.float32).view(np.uint8)
        slot.data[:NBYTES] = bits
        document = describe(
            token=token, tag=f"s{seed}", created_unix=time.time(), tree=FLAT.tree, arrays=FLAT.arrays
        )
        slot.complete(document, NBYTES)
        return bits.tobytes()

    async def save(self, number: int, seq: int) -> None:
        self.service.accept(number)
        await self.service.save(number, seq)

    def events(self, *names: str) -> list[tuple[str, Any]]:
        return [(m["event"], m.get("seq", m.get("slot"))) for m in self.told if m["event"] in names]


def run(folder: Path, test: Callable[[Bench], Awaitable[None]], **options: Any) -> None:
    async def main() -> None:
        bench = Bench(folder, **options)
        try:
            await test(bench)
        finally:
            await bench.service.close()
            bench.local.close()
            bench.coordinator.close()

    asyncio.run(main())


def test_start_empty_both_slots_are_free(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        assert await bench.service.start() == [0, 1]
        assert bench.service.safe_elsewhere()
        assert bench.service.records() == []

    run(tmp_path, test)


def test_save_alternating_slots_the_former_base_becomes_free(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        await bench.service.start()
        for seq in range(3):
            bench.snapshot(seq % 2, seq)
            await bench.save(seq % 2, seq)
        assert bench.events("committed", "persisted", "free") == [
            ("committed", 0),
            ("persisted", 0),
            ("free", 0),
            ("committed", 1),
            ("persisted", 1),
            ("free", 1),
            ("committed", 2),
            ("persisted", 2),
        ]
        assert [s.status.state for s in bench.local.slots] == [SlotState.COMMITTED] * 2
        assert bench.service.safe_elsewhere()
        assert len(bench.service.records()) == 3

    run(tmp_path, test)


def test_save_damaged_draft_fails_slot_is_free_and_the_next_works(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        await bench.service.start()
        bench.snapshot(0, 1)
        (bench.local.path / "slot0.draft").write_bytes(b"damaged")
        await bench.save(0, 7)
        assert bench.events("failed", "free") == [("failed", 7), ("free", 0)]
        assert bench.local.slots[0].status.state is SlotState.EMPTY
        bench.snapshot(0, 2)
        await bench.save(0, 8)
        assert bench.events("committed") == [("committed", 8)]

    run(tmp_path, test)


def test_save_slot_was_taken_by_another_snapshot_is_not_sealed_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(bench: Bench) -> None:
        await bench.service.start()
        bench.snapshot(0, 1)
        publish = bench.service._persister.write_snapshot

        async def overwritten(*arguments: Any, **options: Any) -> Any:
            found = await publish(*arguments, **options)
            bench.local.slots[0].clear()
            bench.snapshot(0, 2)
            return found

        monkeypatch.setattr(bench.service._persister, "write_snapshot", overwritten)
        await bench.save(0, 7)
        assert bench.events("committed", "failed") == [("failed", 7)]
        assert bench.service.records() == []

    run(tmp_path, test)


def test_save_slot_cannot_be_emptied_is_still_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(bench: Bench) -> None:
        await bench.service.start()
        bench.snapshot(0, 1)
        (bench.local.path / "slot0.draft").unlink()

        def broken(_: object) -> None:
            raise OSError("no")

        monkeypatch.setattr(type(bench.local.slots[0]), "clear", broken)
        await bench.save(0, 7)
        assert bench.events("failed", "free") == [("failed", 7), ("free", 0)]

    run(tmp_path, test)


def test_commit_not_noted_in_slot_checkpoint_is_in_force_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(bench: Bench) -> None:
        await bench.service.start()

        def broken(*_: object, **__: object) -> None:
            raise TierError("no")

        with monkeypatch.context() as patch:
            patch.setattr(type(bench.local.slots[0]), "commit", broken)
            bench.snapshot(0, 1)
            await bench.save(0, 1)
        assert bench.events("committed", "failed") == [("committed", 1)]
        assert ("free", 0) in bench.events("free")
        bench.snapshot(0, 2)
        await bench.save(0, 2)
        assert next(m["event"] for m in bench.told if m.get("seq") == 2) == "committed"

    run(tmp_path, test)


def test_start_after_a_crash_takes_up_base_and_drops_the_unfinished(tmp_path: Path) -> None:
    async def crashed(bench: Bench) -> None:
        await bench.service.start()
        bench.snapshot(0, 1)
        await bench.save(0, 1)
        bench.snapshot(1, 2)

    async def next_trainer(bench: Bench) -> None:
        assert await bench.service.start() == [1]
        assert bench.local.slots[1].status.state is SlotState.EMPTY
        assert bench.service.orphans() == []

    async def same_trainer(bench: Bench) -> None:
        assert await bench.service.start(keep=1) == [1]
        assert bench.service.orphans() == [1]
        await bench.save(1, 5)
        assert bench.events("committed") == [("committed", 5)]

    run(tmp_path, crashed)
    run(tmp_path, same_trainer)
    (tmp_path / "other").mkdir()
    run(tmp_path / "other", crashed)
    run(tmp_path / "other", next_trainer)


def test_save_trainer_reuses_generation_after_lost_coordinator(tmp_path: Path) -> None:
    async def first(bench: Bench) -> None:
        await bench.service.start()
        for seed in (1, 2):
            bench.snapshot(seed % 2, seed)
            await bench.save(seed % 2, seed)

    async def second(bench: Bench) -> None:
        free = await bench.service.start()
        bench.snapshot(free[0], 3)
        await bench.save(free[0], 3)
        (record,) = bench.service.records()
        assert b'"generation":3' in record

    run(tmp_path, first)
    for file in tmp_path.glob("coord.db*"):
        file.unlink()
    run(tmp_path, second)


@pytest.mark.parametrize("ranks", [False, True])
def test_known_commits_while_suspended_ranks_ask_and_wait_a_single_process_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: bool
) -> None:
    async def test(bench: Bench) -> None:
        health = replace(bench.coordinator.health(), state="suspended", why="no answer")
        monkeypatch.setattr(bench.coordinator, "health", lambda: health)
        monkeypatch.setattr(bench.service, "_ranks", object() if ranks else None)
        if ranks:
            assert bench.service.known_commits("run") == {"joint": [], "alone": None}
        else:
            with pytest.raises(CoordinationError, match="the coordinator is away: no answer"):
                bench.service.known_commits("run")

    run(tmp_path, test)


def test_save_coordinator_away_after_the_commit_is_a_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(bench: Bench) -> None:
        await bench.service.start()
        commit = bench.coordinator.commit

        def last_answer(*arguments: Any) -> CommitRecord:
            record = commit(*arguments)
            monkeypatch.setattr(bench.coordinator, "mark_persisted", away)
            return record

        def away(*_: Any) -> None:
            raise CoordinationError("it is away")

        monkeypatch.setattr(bench.coordinator, "commit", last_answer)
        bench.snapshot(0, 1)
        await bench.save(0, 0)
        assert bench.events("committed", "persisted", "failed") == [("committed", 0), ("persisted", 0)]
        found = bench.coordinator.latest("run")
        assert found is not None
        assert (found.tag, found.persisted) == ("s1", True)

    run(tmp_path, test)


def test_finish_tells_the_coordinator_what_it_could_not_be_told_before(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        await bench.service.start()
        saved: Any = SimpleNamespace(
            record=SimpleNamespace(generation=1), manifest=SimpleNamespace(token="t"), manifest_bytes=b""
        )
        answers = [Persisted(0, 0, noted=False), Persisted(0, 0, noted=True)]

        async def persist(*_: Any, **__: Any) -> Persisted:
            return answers.pop(0)

        bench.service._persister.persist = persist  # type: ignore[method-assign]
        bench.service._unpersisted = saved, 0
        for left in (1, 0, 0):
            await bench.service.finish()
            assert len(answers) == left

    run(tmp_path, test)


def test_finish_without_saves_does_nothing(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        await bench.service.start()
        await bench.service.finish()
        assert bench.told == []
        with contextlib.suppress(StopIteration):
            assert not next((bench.folder / "objects").rglob("zarr.json"))

    run(tmp_path, test)


def test_records_coordinator_away_are_those_known_and_ours_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(bench: Bench) -> None:
        await bench.service.start()

        def fail(_: str) -> None:
            raise CoordinationError("it is away")

        monkeypatch.setattr(bench.coordinator, "commits", fail)
        # Nothing known: nobody may take that for "never saved".
        with pytest.raises(CoordinationError):
            bench.service.records()
        for seq in range(2):
            bench.snapshot(seq, seq)
            await bench.save(seq, seq)
        monkeypatch.setattr(bench.coordinator, "commits", fail)
        known = bench.service.records()
        assert "generation 2 is the newest that is known: it is away" in caplog.text
        monkeypatch.undo()
        assert [(r.generation, r.tag) for r in map(CommitRecord.from_bytes, known)] == [(1, "s0"), (2, "s1")]
        assert len(bench.service.records()) == 2

    run(tmp_path, test)


@pytest.mark.parametrize("remote", [True, False])
def test_object_writes_wait_while_the_network_is_busy_if_they_go_over_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, remote: bool
) -> None:
    monkeypatch.setattr(service_module, "is_remote", lambda _location: remote)
    wait = Pacer.wait_until_free
    asked: list[asyncio.Event] = []

    async def noted(pacer: Pacer, seconds: float) -> float:
        asked[0].set()
        return await wait(pacer, seconds)

    monkeypatch.setattr(Pacer, "wait_until_free", noted)

    async def test(bench: Bench) -> None:
        asked.append(asyncio.Event())
        await bench.service.start()
        bench.snapshot(0, 0)
        bench.service.set_busy(True)
        saving = asyncio.create_task(bench.save(0, 0))
        await asyncio.wait(
            [saving, asyncio.create_task(asked[0].wait())], return_when=asyncio.FIRST_COMPLETED
        )
        assert asked[0].is_set() is remote
        assert saving.done() is not remote
        assert bool(list(bench.folder.glob("objects/*/w/c/*"))) is not remote
        bench.service.set_busy(False)
        asked[0].set()
        await saving
        assert bench.events("persisted") == [("persisted", 0)]

    run(tmp_path, test)
