"""The agent process: owns the run, serves saves, and ends by itself when the trainer is gone."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

from fastcheck_dask.agent.async_channel import AsyncChannel
from fastcheck_dask.agent.node_states import NodeStates
from fastcheck_dask.agent.ranks import RankDuties
from fastcheck_dask.agent.service import RunConfig, SaveService
from fastcheck_dask.clock import SYSTEM_CLOCK
from fastcheck_dask.config import Settings
from fastcheck_dask.coordination.access import Access
from fastcheck_dask.coordination.base import Coordinator
from fastcheck_dask.coordination.connect import connect
from fastcheck_dask.coordination.joint import Rank
from fastcheck_dask.coordination.rank_coordinator import RankCoordinator
from fastcheck_dask.coordination.states import StateReader
from fastcheck_dask.errors import ClosedError, ConfigError, FastCheckError, RunInUseError, to_wire
from fastcheck_dask.node.master_link import WireLink
from fastcheck_dask.tiers.joint_marker import JointFolder
from fastcheck_dask.tiers.local import LocalTier
from fastcheck_dask.tiers.peer import clients_for
from fastcheck_dask.tiers.process_lock import ProcessLock

log = logging.getLogger(__name__)

#: How long a new agent waits for its predecessor to finish the save in flight, in seconds.
_PREDECESSOR_SECONDS = 60.0
#: How long the last messages may take to a trainer that does not read, in seconds.
_FLUSH_SECONDS = 5.0


class _Outbox(logging.Handler):
    """What the agent tells the trainer; log records go there too, and to stderr once it is gone."""

    def __init__(self, channel: AsyncChannel) -> None:
        super().__init__()
        self._channel = channel
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._stderr = logging.StreamHandler()
        self.trainer_gone = False

    def post(self, message: dict[str, Any]) -> None:
        """Queue a message for the trainer; from any thread, never blocks."""
        self._loop.call_soon_threadsafe(self._queue.put_nowait, message)

    def emit(self, record: logging.LogRecord) -> None:
        """Send a log record to the trainer's loggers."""
        if self.trainer_gone or self._loop.is_closed():
            self._stderr.emit(record)
            return
        text = self.format(record)
        self.post({"event": "log", "level": record.levelno, "logger": record.name, "text": text})

    async def run(self) -> None:
        """Send what is queued, for ever."""
        while True:
            message = await self._queue.get()
            if not self.trainer_gone:
                with contextlib.suppress(ClosedError):
                    await self._channel.send(message)
            self._queue.task_done()

    async def flushed(self) -> None:
        """Wait until all that was posted is sent, or nobody receives it any more."""
        await asyncio.sleep(0)
        if not self.trainer_gone:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._queue.join(), _FLUSH_SECONDS)


class _Requests:
    """Takes what the trainer asks for: saves one after the other, everything else at once."""

    def __init__(self, channel: AsyncChannel, outbox: _Outbox, service: SaveService) -> None:
        self._channel, self._outbox, self._service = channel, outbox, service
        self._saves: asyncio.Queue[Callable[[], Awaitable[None]] | None] = asyncio.Queue()
        self._last_seq = -1

    async def serve(self) -> bool:
        """Serve until the trainer closes or is gone, and finish; return whether it closed properly."""
        working = asyncio.create_task(self._work())
        # Should it break, nothing may wait for saves that nobody does: the agent ends, and that is noticed.
        working.add_done_callback(lambda _: self._channel.stop_receiving())
        proper = await self._receive()
        # Nobody is there any more to say that it is over.
        self._service.set_busy(False)
        if not proper:
            self._outbox.trainer_gone = True
            for number in self._service.orphans():
                log.warning("slot %d: the trainer died before it handed this snapshot over", number)
                self._accept(number, -1)
        self._saves.put_nowait(None)
        await working
        await self._service.finish()
        return proper

    async def _work(self) -> None:
        while (save := await self._saves.get()) is not None:
            await save()

    async def _receive(self) -> bool:
        while (message := await self._channel.receive()) is not None:
            match message["op"]:
                case "save":
                    # A trainer that was interrupted says it twice, to be sure.
                    if message["seq"] > self._last_seq:
                        self._last_seq = message["seq"]
                        self._accept(message["slot"], message["seq"])
                case "gave_up":
                    # In its turn: the other ranks match saves by their order.
                    call = partial(self._service.gave_up, message["tag"], message["reason"])
                    self._saves.put_nowait(call)
                case "ping":
                    self._outbox.post({"event": "pong"})
                case "busy":
                    self._service.set_busy(message["busy"])
                    self._outbox.post({"event": "noted"})
                case "close":
                    return True
                case _:
                    self._outbox.post(await _answer(message, self._service))
        return False

    def _accept(self, number: int, seq: int) -> None:
        self._service.accept(number)
        self._saves.put_nowait(partial(self._service.save, number, seq))


async def _answer(message: dict[str, Any], service: SaveService) -> dict[str, Any]:
    reply: dict[str, Any] = {"event": "reply", "id": message["id"]}
    try:
        if message["op"] == "records":
            return reply | {"records": await asyncio.to_thread(service.records)}
        if message["op"] == "commits":
            return reply | await asyncio.to_thread(service.known_commits, message["run"])
        if message["op"] == "adopt":
            return reply | {"adopted": await service.adopt(message["slot"])}
        raise ConfigError(f"the agent knows no request {message['op']!r}")
    except Exception as error:  # a failed request is answered, whatever it was
        log.debug("request %s failed", message["op"], exc_info=True)
        return reply | {"error": to_wire(error)}


def _states(config: RunConfig, coordinator: Coordinator) -> NodeStates | None:
    if not config.peers:
        return None
    entries = coordinator.entries
    return NodeStates(StateReader(entries, link=WireLink(entries, clients_for(config.settings))))


def _take_over(run: str, local_dir: str | None, patience_seconds: float) -> ProcessLock:
    """Own the run's slots; the agent of a dead trainer may first finish the save that is in flight."""
    folder = LocalTier(run, Path(local_dir) if local_dir else None)
    lock = ProcessLock(folder.path / "agent.lock", role="agent")
    if not lock.acquire(wait_seconds=patience_seconds, clock=SYSTEM_CLOCK):
        holder = lock.holder()
        raise RunInUseError(
            f"run {run}: the agent of its former trainer ({holder}) is still saving after "
            f"{patience_seconds:.0f} s; end that process, or wait and try again"
        )
    return lock


def _as_rank(
    coordinator: Coordinator, ranks: dict[str, Any], settings: Settings
) -> tuple[RankCoordinator, RankDuties]:
    """Return the coordinator as one rank sees it, and what its agent does for the others."""
    numbers = [marker.number for marker in JointFolder(ranks["location"]).markers()]
    of_rank = RankCoordinator(
        coordinator,
        run=ranks["run"],
        me=Rank(ranks["rank"], ranks["world_size"]),
        commit_seconds=settings.commit_seconds,
        above=max(numbers, default=0),
    )
    return of_rank, RankDuties(of_rank, ranks["location"], rank=ranks["rank"])


async def _run(channel: AsyncChannel, start: dict[str, Any]) -> None:
    """Be the agent of a run until its trainer closes or is gone; tell the trainer if that cannot be."""
    outbox = _Outbox(channel)
    logging.getLogger("fastcheck_dask").addHandler(outbox)
    logging.getLogger("fastcheck_dask").setLevel(start["log_level"])
    sending = asyncio.create_task(outbox.run())
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(sending.cancel)
        stack.push_async_callback(outbox.flushed)
        try:
            await _serve(channel, start, outbox, stack)
        except Exception as error:  # the trainer has to hear of it, whatever it was
            log.error("the agent gives up: %s", error, exc_info=not isinstance(error, FastCheckError))
            outbox.post({"event": "cannot_start", "error": to_wire(error)})


async def _serve(
    channel: AsyncChannel, start: dict[str, Any], outbox: _Outbox, stack: contextlib.AsyncExitStack
) -> None:
    """Own the run, and do what the trainer asks for; what `stack` holds is given back after it."""
    ranks = start["ranks"]
    config = RunConfig(
        run=start["run"],
        location=start["location"],
        coordinator_url=start["coordinator_url"],
        peers=start["peers"],
        wanted_shards=start["wanted_shards"],
        settings=Settings.from_dict(start["settings"]),
        takeover=start["takeover"],
    )
    settings = config.settings
    patience = _PREDECESSOR_SECONDS + (settings.commit_seconds if ranks else 0.0)
    lock = await asyncio.to_thread(_take_over, config.run, settings.local_dir, patience)
    stack.callback(lock.release)
    coordinator = await asyncio.to_thread(_connected, config)
    stack.push_async_callback(_closed, coordinator)
    duties: RankDuties | None = None
    if ranks is not None:
        coordinator, duties = await asyncio.to_thread(_as_rank, coordinator, ranks, settings)
    claim = await asyncio.to_thread(
        coordinator.claim,
        config.run,
        start["owner"],
        wait_seconds=settings.session_seconds * 1.5,
        takeover=config.takeover,
    )
    service = SaveService(
        config, coordinator, claim, outbox.post, states=_states(config, coordinator), ranks=duties
    )
    try:
        free = await service.start(start["keep"])
        outbox.post({"event": "ready", "free": free})
        if await _Requests(channel, outbox, service).serve():
            outbox.post({"event": "closed", "safe": await asyncio.to_thread(service.safe_elsewhere)})
    finally:
        await service.close()
        await asyncio.to_thread(claim.close)


def _connected(config: RunConfig) -> Coordinator:
    return connect(
        config.coordinator_url,
        timeout_seconds=config.settings.coordinator_seconds,
        session_seconds=config.settings.session_seconds,
        access=Access.of(config.settings),
    )


async def _closed(coordinator: Coordinator) -> None:
    # The kernel or the session's end takes back what could not be given back.
    with contextlib.suppress(FastCheckError):
        await asyncio.to_thread(coordinator.close)


def _watch(trainer_pid: int, channel: AsyncChannel) -> None:
    """End the channel when the trainer dies."""
    loop = asyncio.get_running_loop()
    try:
        pidfd = os.pidfd_open(trainer_pid)
    except ProcessLookupError:
        channel.stop_receiving()
        return
    if os.getppid() != trainer_pid:
        # It died before we looked, and the number may be another process's by now.
        os.close(pidfd)
        channel.stop_receiving()
        return

    def gone() -> None:
        loop.remove_reader(pidfd)
        os.close(pidfd)
        channel.stop_receiving()

    loop.add_reader(pidfd, gone)


async def _main(socket_fd: int, trainer_pid: int) -> None:
    channel = await AsyncChannel.over(socket.socket(fileno=socket_fd))
    # A forked child of the trainer may keep the socket open: only the trainer's own end counts.
    _watch(trainer_pid, channel)
    start = await channel.receive()
    if start is not None:
        await _run(channel, start)
    await channel.close()


def main() -> None:
    """Run the agent: ``python -m fastcheck_dask.agent.process SOCKET_FD TRAINER_PID``."""
    # A Ctrl-C in the terminal is for the trainer, which closes the agent, or dies and leaves it to finish.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    asyncio.run(_main(int(sys.argv[1]), int(sys.argv[2])))


if __name__ == "__main__":
    main()
