"""Note which storage nodes are gone without a word, when that was seen, and what can be known of it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Final

from fastcheck_dask.clock import SYSTEM_CLOCK, Clock
from fastcheck_dask.coordination.base import Coordinator
from fastcheck_dask.coordination.entries import Delete, Entry, EntryConflictError, OutcomeUnknownError, Write
from fastcheck_dask.coordination.lives import End, Finding, Here, Life, judge, life_path, read_lives
from fastcheck_dask.errors import ConfigError, FastCheckError
from fastcheck_dask.master.duty import Leadership
from fastcheck_dask.tiers.peer import PeerClient
from fastcheck_dask.tiers.wire import location_of

#: How long an ended life is remembered.
KEEP_SECONDS: Final = 7 * 86400.0
_CONNECT_SECONDS: Final = 2.0
#: How often the lives are read although the registry stayed the same: a node may come and go in between.
_ANYWAY_SECONDS: Final = 60.0

logger = logging.getLogger(__name__)

#: Looks where a node listened; None if it is there and answers.
Probe = Callable[[Life], Awaitable[Finding | None]]


@dataclass(frozen=True)
class Todo:
    """What a round has to do."""

    #: Neither registered nor known to have ended.
    missing: tuple[Life, ...]
    #: Registered, and thought to have ended.
    back: tuple[Life, ...]
    #: Ended long ago.
    old: tuple[Life, ...]


def compare(lives: Collection[Life], registered: Mapping[str, str], now: float) -> Todo:
    """Compare what nodes wrote with who is there; no I/O.

    Parameters
    ----------
    lives : collection of Life
        All of them.
    registered : mapping of str to str
        Addresses of the nodes in the registry, by name.
    now : float
        Seconds since 1970.
    """

    def there(life: Life) -> bool:
        return registered.get(life.name) == life.address

    return Todo(
        tuple(life for life in lives if life.end is None and life.name not in registered),
        # One that announced its end may still be leaving.
        tuple(life for life in lives if there(life) and life.end is not None and life.end.cause != "ended"),
        tuple(
            life
            for life in lives
            if life.end is not None and life.name not in registered and now - life.end.unix > KEEP_SECONDS
        ),
    )


async def look(life: Life, client: Callable[[str, str], PeerClient] = PeerClient) -> Finding | None:
    """Look where a node listened, as a `client`; takes a few seconds if nothing answers."""
    try:
        host, _, port = location_of(life.address).rpartition(":")
        async with asyncio.timeout(_CONNECT_SECONDS):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except ConnectionRefusedError:
        return "refused"
    except (OSError, ConfigError):
        return "unreachable"
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    opened = client(life.name, life.address)
    try:
        answer = await opened.ping()
    except FastCheckError:
        return "silent"
    finally:
        await opened.close()
    # Another node may have been given the port.
    return None if answer.get("name") == life.name else "refused"


class NodeWatchDuty:
    """Notes the ends of nodes, each once; nothing is written while nodes neither come nor go.

    Parameters
    ----------
    coordinator : Coordinator
        With the registry and the entries of the lives.
    probe : callable
        Looks where a node listened.
    interval_seconds : float
        Pause between two rounds.
    unix_time : callable
        Seconds since 1970.
    clock : Clock
        Monotonic.

    Notes
    -----
    Entries are read through the quorum, which costs the coordinator a write: they are left alone while the
    registry stays the same and nothing is open.
    """

    name = "node watch"

    def __init__(
        self,
        coordinator: Coordinator,
        *,
        probe: Probe = look,
        interval_seconds: float = 2.0,
        unix_time: Callable[[], float] = time.time,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._coordinator, self._probe = coordinator, probe
        self.interval_seconds = interval_seconds
        self._unix_time, self._clock = unix_time, clock
        #: The registry when nothing was open last, and until when that is believed.
        self._settled: dict[str, str] | None = None
        self._settled_until = 0.0

    async def run(self, leadership: Leadership) -> None:
        """Compare the registry with the lives, and note what differs."""
        if await self._registered() == self._settled and self._clock.now() < self._settled_until:
            return
        until = self._clock.now() + _ANYWAY_SECONDS
        found = await asyncio.to_thread(read_lives, self._coordinator.entries)
        # After the lives: a node is registered before it writes that it lives.
        registered = await self._registered()
        todo = compare([life for life, _ in found.values()], registered, self._unix_time())
        if not todo.missing and not todo.back:
            self._settled, self._settled_until = registered, until
        findings = await asyncio.gather(*map(self._probe, todo.missing))
        for life, finding in zip(todo.missing, findings, strict=True):
            # One that answers has lost its session, and will be in the registry again.
            if finding is not None:
                cause, why = judge(life, finding, Here.for_judging(life))
                end = End(self._unix_time(), cause, why, life.started_unix)
                if await self._write(leadership, found[life.name][1], life.ended(end)):
                    logger.warning("storage node %s is gone: %s", life.name, why)
        for life in todo.back:
            if await self._write(leadership, found[life.name][1], life.back()):
                logger.info("storage node %s is back", life.name)
        for life in todo.old:
            await self._write(leadership, found[life.name][1], life, remove=True)

    async def _registered(self) -> dict[str, str]:
        nodes = await asyncio.to_thread(self._coordinator.nodes)
        return {node.name: node.address for node in nodes}

    async def _write(self, leadership: Leadership, entry: Entry, life: Life, *, remove: bool = False) -> bool:
        """Change one life unless it changed meanwhile; say whether it was."""
        path = life_path(life.name)
        change = Delete(path, entry.version) if remove else Write(path, life.to_bytes(), entry.version)
        if not leadership.in_force:
            return False
        try:
            await asyncio.to_thread(leadership.apply, change)
        except (EntryConflictError, OutcomeUnknownError) as error:
            # The next round sees what is so.
            logger.debug("life of node %s: %s", life.name, error)
            return False
        return True
