"""What the agent's process does with requests, with fakes for what it serves."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from fastcheck_dask.agent import process
from fastcheck_dask.agent.async_channel import AsyncChannel
from fastcheck_dask.agent.channel import BlockingChannel, Message
from fastcheck_dask.agent.process import _Outbox, _Requests
from fastcheck_dask.errors import TierError


class FakeService:
    """Notes what it is asked."""

    def __init__(self) -> None:
        self.done: list[Any] = []
        self.error: Exception | None = None
        self.complete: list[int] = []
        self.busy: list[bool] = []

    def accept(self, number: int) -> None:
        self.done.append(("accept", number))

    async def save(self, number: int, seq: int) -> None:
        if self.error is not None:
            raise self.error
        self.done.append(("save", number, seq))

    def set_busy(self, busy: bool) -> None:
        self.busy.append(busy)

    async def finish(self) -> None:
        self.done.append("finish")

    async def adopt(self, number: int) -> bool:
        return number == 1

    def records(self) -> list[bytes]:
        raise ZeroDivisionError("division by zero")

    def orphans(self) -> list[int]:
        return self.complete


def serve(
    service: FakeService, talk: Callable[[BlockingChannel, AsyncChannel], Awaitable[None]]
) -> tuple[bool | BaseException, list[Message]]:
    """Serve what `talk` asks; return how it ended and what was answered."""

    async def main() -> tuple[bool | BaseException, list[Message]]:
        ours, theirs = socket.socketpair()
        trainer, channel = BlockingChannel(theirs), await AsyncChannel.over(ours)
        outbox = _Outbox(channel)
        sending = asyncio.create_task(outbox.run())
        serving = asyncio.create_task(_Requests(channel, outbox, service).serve())  # type: ignore[arg-type]
        async with asyncio.timeout(30):
            await talk(trainer, channel)
            (ended,) = await asyncio.gather(serving, return_exceptions=True)
            await outbox.flushed()
        sending.cancel()
        await channel.close()
        answers = []
        while (message := trainer.receive()) is not None:
            answers.append(message)
        trainer.close()
        return ended, answers

    return asyncio.run(main())


def test_requests_are_answered_and_close_finishes() -> None:
    service = FakeService()

    async def talk(trainer: BlockingChannel, _: AsyncChannel) -> None:
        for message in (
            {"op": "save", "slot": 0, "seq": 0},
            {"op": "save", "slot": 0, "seq": 0},
            {"op": "ping"},
            {"op": "adopt", "id": 1, "slot": 1},
            {"op": "records", "id": 2},
            {"op": "nonsense", "id": 3},
            {"op": "save", "slot": 1, "seq": 1},
            {"op": "close"},
        ):
            trainer.send(message)

    proper, answers = serve(service, talk)
    assert proper is True
    assert [d for d in service.done if d[0] == "save"] == [("save", 0, 0), ("save", 1, 1)]
    assert service.done[-1] == "finish"
    assert answers[0] == {"event": "pong"}
    assert answers[1] == {"event": "reply", "id": 1, "adopted": True}
    assert answers[2]["id"] == 2
    assert "ZeroDivisionError" in answers[2]["error"][1]
    assert answers[3]["error"][0] == "ConfigError"


@pytest.mark.parametrize("ends", ["close", "dies"])
def test_busy_is_passed_on_answered_and_over_when_the_trainer_is_gone(ends: str) -> None:
    service = FakeService()

    async def talk(trainer: BlockingChannel, _: AsyncChannel) -> None:
        trainer.send({"op": "busy", "busy": True})
        if ends == "close":
            trainer.send({"op": "close"})
        else:
            trainer.shut()

    _, answers = serve(service, talk)
    assert service.busy == [True, False]
    assert answers == ([{"event": "noted"}] if ends == "close" else [])


def test_trainer_gone_orphans_are_saved_and_it_ends() -> None:
    service = FakeService()
    service.complete = [1]

    async def talk(trainer: BlockingChannel, _: AsyncChannel) -> None:
        trainer.send({"op": "save", "slot": 0, "seq": 4})
        trainer.shut()

    proper, answers = serve(service, talk)
    assert proper is False
    assert [d for d in service.done if d[0] == "save"] == [("save", 0, 4), ("save", 1, -1)]
    assert service.done[-1] == "finish"
    assert answers == []


def test_save_breaks_unexpectedly_agent_ends_instead_of_ignoring_saves() -> None:
    service = FakeService()
    service.error = AssertionError("broken")

    async def talk(trainer: BlockingChannel, _: AsyncChannel) -> None:
        trainer.send({"op": "save", "slot": 0, "seq": 0})

    ended, _ = serve(service, talk)
    assert isinstance(ended, AssertionError)


def test_outbox_forwards_logs_until_the_trainer_is_gone(capsys: pytest.CaptureFixture[str]) -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        trainer, channel = BlockingChannel(theirs), await AsyncChannel.over(ours)
        outbox = _Outbox(channel)
        sending = asyncio.create_task(outbox.run())
        record = logging.LogRecord("fastcheck_dask.x", logging.WARNING, "", 0, "hello %s", ("you",), None)
        outbox.emit(record)
        await outbox.flushed()
        assert trainer.receive() == {
            "event": "log",
            "level": logging.WARNING,
            "logger": "fastcheck_dask.x",
            "text": "hello you",
        }
        outbox.trainer_gone = True
        outbox.emit(record)
        await outbox.flushed()
        sending.cancel()
        await channel.close()
        trainer.close()

    asyncio.run(main())
    assert capsys.readouterr().err == "hello you\n"


def test_outbox_trainer_does_not_read_flush_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_FLUSH_SECONDS", 0.05)

    async def main() -> None:
        ours, theirs = socket.socketpair()
        channel = await AsyncChannel.over(ours)
        outbox = _Outbox(channel)
        sending = asyncio.create_task(outbox.run())
        for _ in range(4):
            outbox.post({"event": "x", "text": "y" * 2**20})
        async with asyncio.timeout(30):
            await outbox.flushed()
        assert not outbox._queue.empty()
        sending.cancel()
        theirs.close()
        await channel.close()

    asyncio.run(main())


def test_answer_typed_error_stays_typed() -> None:
    class Failing(FakeService):
        async def adopt(self, number: int) -> bool:
            raise TierError("full")

    reply = asyncio.run(process._answer({"op": "adopt", "id": 1, "slot": 0}, Failing()))  # type: ignore[arg-type]
    assert reply["error"] == ["TierError", "full"]
