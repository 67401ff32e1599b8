"""What could not be persisted is tried again, without keeping training or a newer generation waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from fastcheck_dask.agent.persisting import Persisting
from fastcheck_dask.engine.persist import Persisted
from fastcheck_dask.errors import CommitConflictError, TierError

LONG = 3600.0


def saved(generation: int) -> Any:
    record = SimpleNamespace(generation=generation, token=f"t{generation}")
    return SimpleNamespace(record=record, manifest=SimpleNamespace(token=record.token), manifest_bytes=b"")


class Slots:
    """Two slots, the base in the first."""

    def __init__(self) -> None:
        self.held: list[int] = []
        self.base_number: int | None = 0
        self.base: Any = SimpleNamespace(manifest=SimpleNamespace(token="t1"))

    def hold(self, number: int, use: str) -> None:
        assert use == "persist"
        self.held.append(number)

    def release(self, number: int, use: str) -> None:
        assert use == "persist"
        self.held.remove(number)


class Rig:
    """A `Persisting` whose attempts end as they are told to, with what it told."""

    def __init__(self, *outcomes: Any, pauses: tuple[float, ...] = (0.0, 0.0, 0.0)) -> None:
        self.outcomes = list(outcomes)
        self.told: list[tuple[str, int]] = []
        self.stats: list[dict[str, Any]] = []
        self.sources: list[bool] = []
        self.slots = Slots()
        self.delayed = asyncio.Event()
        self.errors: list[str] = []
        slots: Any = self.slots
        persister: Any = self
        self.persisting = Persisting(
            persister, slots, self.notify, persisted=self.persisted, delayed=self.failed, pauses=pauses
        )

    async def persist(self, *_: Any, source: Any, **__: Any) -> Persisted:
        self.sources.append(source is not None)
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return Persisted(3, 4)

    async def persisted(self, one: Any, seq: int, noted: bool, stats: dict[str, Any]) -> None:
        assert noted
        self.notify({"event": "persisted", "seq": seq, "stats": stats})

    async def failed(self, one: Any, error: Exception) -> None:
        self.errors.append(str(error))

    def notify(self, message: dict[str, Any]) -> None:
        self.told.append((message["event"], message["seq"]))
        self.stats.append(message.get("stats", {}))
        if message["event"] == "persist_delayed":
            self.delayed.set()


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(test())  # type: ignore[arg-type]


@pytest.mark.parametrize("failures", range(4))
def test_transient_failures_are_tried_again_until_it_is_there(failures: int) -> None:
    async def test() -> None:
        rig = Rig(*[TierError("busy")] * failures, None)
        await rig.persisting.begin(saved(1), 0, 7)
        assert rig.persisting._task is not None
        await rig.persisting._task
        assert rig.told == [("persist_delayed", 7)] * failures + [("persisted", 7)]
        assert rig.stats[-1]["persist_attempts"] == failures + 1
        assert (rig.stats[-1]["persisted_bytes"], rig.stats[-1]["persist_error"]) == (7, None)
        assert all("busy" in stats["persist_error"] for stats in rig.stats[:-1])
        assert rig.errors == ["busy"] * failures
        assert rig.slots.held == []
        assert not rig.persisting.busy

    run(test)


def test_attempts_are_bounded_and_the_last_failure_is_told() -> None:
    async def test() -> None:
        rig = Rig(*[TierError("busy")] * 4)
        await rig.persisting.begin(saved(1), 0, 7)
        assert rig.persisting._task is not None
        await rig.persisting._task
        assert rig.told == [("persist_delayed", 7)] * 3 + [("persist_failed", 7)]
        assert (rig.outcomes, rig.slots.held) == ([], [])

    run(test)


@pytest.mark.parametrize("error", [CommitConflictError("another author"), ValueError("a bug")])
def test_what_will_not_pass_is_not_tried_again(error: Exception) -> None:
    async def test() -> None:
        rig = Rig(error, pauses=(LONG,))
        await rig.persisting.begin(saved(1), 0, 7)
        assert rig.persisting._task is not None
        await rig.persisting._task
        assert rig.told == [("persist_failed", 7)]
        assert rig.errors == [str(error)]

    run(test)


def test_slot_is_free_in_the_pauses_and_held_again_while_it_still_has_the_checkpoint() -> None:
    async def test() -> None:
        rig = Rig(TierError("busy"), TierError("busy"), None, pauses=(LONG, LONG))
        await rig.persisting.begin(saved(1), 0, 7)
        await rig.delayed.wait()
        assert rig.slots.held == []
        assert rig.persisting.busy
        await rig.persisting.finish(None)

    async def held_again() -> None:
        rig = Rig(TierError("busy"), None)
        held: list[list[int]] = []
        persist = rig.persist

        async def watched(*arguments: Any, **options: Any) -> Persisted:
            held.append(list(rig.slots.held))
            return await persist(*arguments, **options)

        rig.persist = watched  # type: ignore[method-assign]
        await rig.persisting.begin(saved(1), 0, 7)
        assert rig.persisting._task is not None
        await rig.persisting._task
        assert held == [[0], [0]]

    async def replaced() -> None:
        rig = Rig(TierError("busy"), None)
        await rig.persisting.begin(saved(1), 0, 7)
        await rig.delayed.wait()
        rig.slots.base, rig.slots.base_number = None, None
        assert rig.persisting._task is not None
        await rig.persisting._task
        assert rig.sources == [True, False]

    run(test)
    run(held_again)
    run(replaced)


def test_newer_generation_does_not_wait_and_the_older_is_told_as_failed() -> None:
    async def test() -> None:
        rig = Rig(TierError("busy"), None, pauses=(LONG,))
        await rig.persisting.begin(saved(1), 0, 1)
        await rig.delayed.wait()
        await rig.persisting.begin(saved(2), 1, 2)
        await rig.persisting.finish(None)
        assert rig.told == [("persist_delayed", 1), ("persist_failed", 1), ("persisted", 2)]
        assert rig.slots.held == []

    run(test)


@pytest.mark.parametrize(("outcome", "told"), [(None, "persisted"), (TierError("busy"), "persist_failed")])
def test_at_the_end_the_newest_is_tried_once_more_and_told_once(outcome: Any, told: str) -> None:
    async def test() -> None:
        rig = Rig(TierError("busy"), outcome, pauses=(LONG,))
        one = saved(1)
        await rig.persisting.begin(one, 0, 7)
        await rig.delayed.wait()
        await rig.persisting.finish((one, 7))
        assert rig.told == [("persist_delayed", 7), (told, 7)]
        assert rig.outcomes == []

    run(test)


def test_at_the_end_what_is_not_the_newest_is_told_as_failed() -> None:
    async def test() -> None:
        rig = Rig(TierError("busy"), None, pauses=(LONG,))
        await rig.persisting.begin(saved(1), 0, 1)
        await rig.delayed.wait()
        await rig.persisting.finish((saved(2), 2))
        assert rig.told == [("persist_delayed", 1), ("persist_failed", 1), ("persisted", 2)]

    run(test)
