"""When storage nodes started and ended, so that an end which nobody announced is known for what it was.

A node writes its entry when it starts and when it ends properly, the master when it finds a node gone that
did neither: one write for each of these events, and none in between.

::

    lives/<node>             never ephemeral; removed some days after the end
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

from fastcheck_dask.coordination.entries import (
    Create,
    Entries,
    Entry,
    EntryConflictError,
    OutcomeUnknownError,
    Write,
)
from fastcheck_dask.coordination.memory_group import MemoryGroup, group_of_this_process
from fastcheck_dask.coordination.processes import boot_id
from fastcheck_dask.errors import UnknownFormatError
from fastcheck_dask.ids import check_name

LIVES: Final = "lives"
#: Ends of the same name that are remembered, the last one included.
ENDS_KEPT: Final = 8
_VMSTAT: Final = Path("/proc/vmstat")
#: Of a reason: it may be any exception's text.
_WHY_CHARACTERS: Final = 300

#: *ended*: asked to, by a signal. *failed*: an error of its own, which it named. *killed*: gone without a
#: word, while its machine is there. *memory*: the same, and the kernel ended processes for want of memory.
#: *host*: its machine is gone, unreachable, or was started anew. *silent*: there, but it does not answer.
Cause = Literal["ended", "failed", "killed", "memory", "host", "silent"]
_CAUSES: Final = ("ended", "failed", "killed", "memory", "host", "silent")
#: Causes of an end that was planned.
PLANNED: Final = frozenset({"ended"})

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class End:
    """How a life of a node ended."""

    #: When that was; of what was not announced, when it was noticed. Seconds since 1970.
    unix: float
    cause: Cause
    why: str
    #: When that life had begun.
    started_unix: float


@dataclass(frozen=True)
class Life:
    """The last life of a node of some name, and how it and those before it ended."""

    name: str
    address: str
    host: str
    rack: str
    started_unix: float
    pid: int
    #: Which boot of its machine it belongs to; empty if it cannot be told.
    boot: str
    #: Processes that the kernel of its machine had ended for want of memory by then, None if unknown.
    oom_kills: int | None
    #: Oldest first.
    ends: tuple[End, ...] = ()
    #: Its cgroup, as it was by then; None if unknown.
    group: MemoryGroup | None = None

    @property
    def end(self) -> End | None:
        """How it ended; None if it has not, as far as is known."""
        last = self.ends[-1] if self.ends else None
        return last if last is not None and last.started_unix == self.started_unix else None

    def is_of(self, other: Life) -> bool:
        """Say whether both are of the same process."""
        return (self.pid, self.started_unix) == (other.pid, other.started_unix)

    def ended(self, end: End) -> Life:
        """Return the life with its end, in place of what was thought to be its end before."""
        before = self.ends[:-1] if self.end is not None else self.ends
        return replace(self, ends=(*before, replace(end, why=end.why[:_WHY_CHARACTERS]))[-ENDS_KEPT:])

    def back(self) -> Life:
        """Return the life as not ended: the node was found to be alive after all."""
        return replace(self, ends=self.ends[:-1]) if self.end is not None else self

    def to_bytes(self) -> bytes:
        """Return it as canonical JSON."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Life:
        """Undo :meth:`to_bytes`; fields that this version does not know are dropped.

        Raises
        ------
        UnknownFormatError
            If it is not the life of a node.
        """
        try:
            found: Any = json.loads(data)
            ends = tuple(_end(one) for one in found["ends"])
            names = ("name", "address", "host", "rack", "started_unix", "pid", "boot", "oom_kills")
            made = cls(**{name: found[name] for name in names}, ends=ends, group=_group(found.get("group")))
        except (ValueError, TypeError, KeyError) as error:
            raise UnknownFormatError(
                f"life of a node, {len(data)} bytes: cannot be read: {error!r}"
            ) from error
        texts = (made.name, made.address, made.host, made.rack, made.boot)
        numbers = (made.started_unix, made.pid, 0 if made.oom_kills is None else made.oom_kills)
        if not all(isinstance(text, str) for text in texts) or not all(map(_is_number, numbers)):
            raise UnknownFormatError(f"life of a node has a field of the wrong type: {made!r:.200}")
        return made


def _group(found: Any) -> MemoryGroup | None:
    """Read a cgroup, of which versions before this one say nothing."""
    if found is None:
        return None
    path, inode, kills = found["path"], found["inode"], found["oom_kills"]
    if not isinstance(path, str) or not _is_number(inode) or not _is_number(kills):
        raise ValueError(f"no such cgroup: {found!r:.200}")
    return MemoryGroup(path, inode, kills)


def _end(found: Any) -> End:
    end = End(**{name: found[name] for name in ("unix", "cause", "why", "started_unix")})
    if end.cause not in _CAUSES or not isinstance(end.why, str):
        raise ValueError(f"no such end: {end!r:.200}")
    if not _is_number(end.unix) or not _is_number(end.started_unix):
        raise ValueError(f"no such end: {end!r:.200}")
    return end


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True)
class Here:
    """What tells machines and their boots apart, and the kernel's counts of processes it ended."""

    host: str
    boot: str
    oom_kills: int | None
    #: The cgroup that somebody is judged by; None if it cannot be seen.
    group: MemoryGroup | None = None

    @classmethod
    def of_this_machine(cls, host: str) -> Here:
        """Return what is so now on this machine; `host` is the name by which others know it."""
        try:
            boot = boot_id()
        except OSError:
            boot = ""
        return cls(host, boot, oom_kills(), group_of_this_process())

    @classmethod
    def for_judging(cls, life: Life) -> Here:
        """Return the same, with the cgroup of a node that ran on this machine."""
        here = cls.of_this_machine(life.host)
        on_this_machine = life.boot and life.boot == here.boot
        return replace(here, group=life.group.now() if on_this_machine and life.group is not None else None)


def oom_kills() -> int | None:
    """Return how many processes this machine's kernel has ended for want of memory; None if unknown."""
    try:
        lines = _VMSTAT.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)


#: What was found where the node listened. *refused*: the machine answered, and nobody listens.
Finding = Literal["refused", "unreachable", "silent"]


def judge(life: Life, finding: Finding | None, here: Here) -> tuple[Cause, str]:
    """Say what became of a node that is gone without a word, as far as this machine can know. Pure.

    Parameters
    ----------
    life : Life
        As it was left.
    finding : {"refused", "unreachable", "silent"} or None
        What is where it listened; None if its place is taken by another process.
    here : Here
        This machine.
    """
    if life.boot and life.boot == here.boot:
        if finding == "silent":
            return "silent", "its process is there and does not answer: stopped, or stuck"
        return _on_this_machine(life, here)
    if finding == "unreachable":
        return "host", f"its machine ({life.host}) does not answer either: lost, or cut off"
    if finding == "silent":
        return "silent", "its port is open and does not answer: stopped, stuck, or cut off"
    if finding is None and life.host == here.host and life.boot and here.boot:
        return "host", f"its machine ({life.host}) was started anew"
    return (
        "killed",
        f"its process is gone (SIGKILL, out of memory, or a crash); its machine ({life.host}) is there",
    )


def _on_this_machine(life: Life, here: Here) -> tuple[Cause, str]:
    was, group = life.group, here.group
    if was is not None and group is not None and was.inode == group.inode:
        # It counts whatever ended a process of the group: what others of the machine ran into is left out.
        more = group.oom_kills - was.oom_kills
        if more > 0:
            return (
                "memory",
                f"the kernel ended {_processes(more)} of its cgroup ({group.path}) for want of memory",
            )
        return "killed", "its process is gone: SIGKILL or a crash, not for want of memory"
    if life.oom_kills is None or here.oom_kills is None:
        return "killed", "its process is gone: SIGKILL, out of memory, or a crash"
    more = here.oom_kills - life.oom_kills
    if more > 0:
        return "memory", f"its process is gone; since it started the kernel ended {more} for want of memory"
    return "killed", "its process is gone: SIGKILL or a crash, not for want of memory"


def _processes(count: int) -> str:
    return "a process" if count == 1 else f"{count} processes"


def life_path(node: str) -> str:
    """Return where the life of a node stands."""
    return f"{LIVES}/{check_name(node, 'a storage node')}"


def read_lives(entries: Entries) -> dict[str, tuple[Life, Entry]]:
    """Return the lives by node, with their entries; one that cannot be read is named in the log.

    Raises
    ------
    CoordinationError
        If the coordinator cannot be reached.
    """
    names = entries.names(LIVES)
    found = {}
    for name, entry in zip(names, entries.get_many(*map(life_path, names)), strict=True):
        life = None if entry is None else _readable(name, entry)
        if life is not None and entry is not None:
            found[name] = (life, entry)
    return found


def _readable(name: str, entry: Entry) -> Life | None:
    try:
        return Life.from_bytes(entry.value)
    except UnknownFormatError as error:
        logger.warning("node %s: %s", name, error)
        return None


def begin(entries: Entries, life: Life, *, now: float, here: Here) -> None:
    """Write that a node has started, after it was registered: whoever had its name before is gone.

    Raises
    ------
    CoordinationError
        If the coordinator cannot be reached.
    """

    def begun(before: Life | None) -> Life:
        if before is None or before.is_of(life):
            # The answer to our own write was lost.
            return before or life
        if before.end is None:
            before = before.ended(End(now, *judge(before, None, here), before.started_unix))
        return replace(life, ends=before.ends)

    _change(entries, life.name, begun)


def end(entries: Entries, life: Life, end: End) -> None:
    """Write that a node ends; nothing if another process has taken its name. Errors as with :func:`begin`."""

    def ended(before: Life | None) -> Life | None:
        return before.ended(end) if before is not None and before.is_of(life) else None

    _change(entries, life.name, ended)


def _change(entries: Entries, node: str, change: Callable[[Life | None], Life | None]) -> None:
    """Change a life; whoever changes it meanwhile comes first."""
    path = life_path(node)
    while True:
        entry = entries.get(path)
        new = change(None if entry is None else _readable(node, entry))
        if new is None or (entry is not None and entry.value == new.to_bytes()):
            return
        data = new.to_bytes()
        try:
            entries.apply(Create(path, data) if entry is None else Write(path, data, entry.version))
        except (EntryConflictError, OutcomeUnknownError) as error:
            logger.debug("life of node %s: %s", node, error)
        else:
            return
