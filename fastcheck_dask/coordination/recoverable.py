"""What could be recovered now, for each run, as the master publishes it.

::

    recoverable/<run>         the newest generation, and from where it could be had at this moment
    recoverable/<run>/drill   what the last restore drill found
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Final, Literal, Self

from fastcheck_dask.coordination.entries import Entries
from fastcheck_dask.errors import UnknownFormatError
from fastcheck_dask.ids import check_name

#: Entries of the runs.
RECOVERABLE: Final = "recoverable"


class _Document:
    """A dataclass that goes into an entry as canonical JSON."""

    def to_bytes(self) -> bytes:
        """Return it as canonical JSON."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":")).encode()  # type: ignore[call-overload]

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Undo :meth:`to_bytes`; fields that this version does not know are dropped."""
        try:
            found: dict[str, Any] = json.loads(data)
            return cls(**{field.name: found[field.name] for field in fields(cls)})  # type: ignore[arg-type]
        except (ValueError, TypeError, KeyError) as error:
            raise UnknownFormatError(
                f"{cls.__name__} of {len(data)} bytes cannot be read: {error!r}"
            ) from error


@dataclass(frozen=True)
class Recoverable(_Document):
    """From where the newest generation of a run could be had now."""

    generation: int
    tag: str
    #: *peers*: complete in the memory of the nodes, parity included; *object*: not there, but in the object
    #: tier; *nowhere*: it is lost unless a node comes back.
    source: Literal["peers", "object", "nowhere"]
    #: Nodes of which any one may be lost without losing it from memory.
    may_die: list[str]
    #: How each node's shard is: whole, damaged, leaving, silent or gone.
    nodes: Mapping[str, str]
    #: Damaged chunks by node.
    damaged: Mapping[str, int]
    #: Whether the object tier has it.
    persisted: bool


@dataclass(frozen=True)
class Drill(_Document):
    """What a restore drill found: a generation was rebuilt without as many of its nodes as may be lost."""

    generation: int
    tag: str
    #: The nodes that were left out, with commas between them.
    left_out: str
    #: Whether every bit could be had, and had its digest.
    passed: bool
    #: Why not; empty if it could.
    why: str
    raw_bytes: int
    seconds: float
    finished_unix: float


def recoverable_path(run: str) -> str:
    """Return where it stands what could be recovered of a run."""
    return f"{RECOVERABLE}/{check_name(run, 'run')}"


def drill_path(run: str) -> str:
    """Return where the last drill of a run stands."""
    return f"{recoverable_path(run)}/drill"


def read_recoverable(entries: Entries, run: str) -> tuple[Recoverable | None, Drill | None]:
    """Return what is published of a run.

    Raises
    ------
    CoordinationError
        If the coordinator cannot be reached.
    UnknownFormatError
        If it cannot be read.
    """
    now, drill = entries.get_many(recoverable_path(run), drill_path(run))
    return (
        None if now is None or not now.value else Recoverable.from_bytes(now.value),
        None if drill is None else Drill.from_bytes(drill.value),
    )
