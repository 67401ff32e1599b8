"""Joint saves: one checkpoint made of a part of each rank, and the rules by which it is decided. Pure.

Every rank saves its own part as a run of its own; the joint save decides for all of them. A rank that has put
its part there has promised to keep it until the decision is known: committed when every rank's part is there,
aborted when one of them cannot come. Whoever sees either may decide; the first decision stands.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from fastcheck_dask.coordination.base import CommitRecord
from fastcheck_dask.errors import ConfigError, UnknownFormatError
from fastcheck_dask.ids import check_name

#: More are not written into one decision.
MAX_WORLD_SIZE = 10_000
_NAMED_RANKS = 16


@dataclass(frozen=True)
class Rank:
    """One of the processes that train together."""

    rank: int
    world_size: int

    def __post_init__(self) -> None:
        whole = all(type(value) is int for value in (self.rank, self.world_size))
        if not whole or not 0 <= self.rank < self.world_size <= MAX_WORLD_SIZE:
            raise ConfigError(
                f"rank and world_size must be whole numbers, 0 <= rank < world_size <= {MAX_WORLD_SIZE}; "
                f"got rank={self.rank!r} and world_size={self.world_size!r}"
            )


def rank_name(rank: int) -> str:
    """Return the name by which a rank's folder goes, and its entry.

    >>> rank_name(3)
    'rank-00003'
    """
    return f"rank-{rank:05d}"


def run_of_rank(run: str, rank: int) -> str:
    """Return the run under which one rank of a run saves.

    >>> run_of_rank("ckpts-0123", 3)
    'ckpts-0123.r00003'
    """
    return check_name(f"{run}.r{rank:05d}", "the run of a rank (run_id, with '.r' and the rank)")


@dataclass(frozen=True)
class JointSave:
    """What a joint save is of; said by the rank that came first."""

    number: int
    tag: str
    world_size: int
    #: The rank that began it.
    first: int

    def to_bytes(self) -> bytes:
        """Return it as canonical JSON."""
        return _json(asdict(self))

    @classmethod
    def from_bytes(cls, data: bytes) -> JointSave:
        """Undo :meth:`to_bytes`."""
        try:
            return cls(**_parsed(data, "joint save"))
        except TypeError as error:
            raise UnknownFormatError(f"joint save cannot be read: {error}") from error


@dataclass(frozen=True)
class Part:
    """What one rank has prepared: its nodes, or its folder, keep it until the joint save is decided."""

    rank: int
    #: The claim under which it was made, as `Coordinator.owner` names it.
    owner: str
    record: CommitRecord

    def to_bytes(self) -> bytes:
        """Return it as canonical JSON."""
        record = self.record.to_bytes().decode()
        return _json({"rank": self.rank, "owner": self.owner, "record": record})

    @classmethod
    def from_bytes(cls, data: bytes) -> Part:
        """Undo :meth:`to_bytes`."""
        found = _parsed(data, "part of a joint save")
        try:
            return cls(found["rank"], found["owner"], CommitRecord.from_bytes(found["record"].encode()))
        except (KeyError, AttributeError) as error:
            raise UnknownFormatError(f"part of a joint save cannot be read: {error!r}") from error


@dataclass(frozen=True)
class Outcome:
    """The decision about a joint save."""

    committed: bool
    #: Who decided; for an abort also why.
    reason: str
    #: Tokens and generations of the parts by rank, of a commit.
    tokens: tuple[str, ...] = ()
    generations: tuple[int, ...] = ()
    #: When the last part was made, of a commit.
    created_unix: float = 0.0
    #: Aborted because the rank that prepared a part is gone: no save of those who live was meant.
    leftover: bool = False

    def to_bytes(self) -> bytes:
        """Return it as canonical JSON."""
        return _json(asdict(self))

    @classmethod
    def from_bytes(cls, data: bytes) -> Outcome:
        """Undo :meth:`to_bytes`."""
        found = _parsed(data, "decision of a joint save")
        try:
            found["tokens"], found["generations"] = tuple(found["tokens"]), tuple(found["generations"])
            return cls(**found)
        except (KeyError, TypeError) as error:
            raise UnknownFormatError(f"decision of a joint save cannot be read: {error!r}") from error


@dataclass(frozen=True)
class JointView:
    """A joint save as it was read: the parts first, the decision after them."""

    save: JointSave
    parts: Mapping[int, Part]
    outcome: Outcome | None = None

    @property
    def missing(self) -> list[int]:
        """Ranks whose part is not there."""
        return [rank for rank in range(self.save.world_size) if rank not in self.parts]


@dataclass(frozen=True)
class JointCommit:
    """A checkpoint that all ranks have."""

    number: int
    tag: str
    world_size: int
    created_unix: float
    tokens: tuple[str, ...]
    generations: tuple[int, ...]


@dataclass(frozen=True)
class Take:
    """Take part in it."""


@dataclass(frozen=True)
class Pass:
    """It is none of this save's business: look at the next one."""


@dataclass(frozen=True)
class Late:
    """It was this save's, and was aborted before this rank came."""

    reason: str


#: An `Outcome` says: decide it so, and look at the next one.
Match = Take | Pass | Late | Outcome


def match(view: JointView, me: Rank, tag: str, *, gone: Collection[int] = (), joined_after: int = 0) -> Match:
    """Say what a joint save is to a rank that saves `tag`, the first one after those it has seen.

    Parameters
    ----------
    view : JointView
        The joint save.
    me : Rank
        Who saves.
    tag : str
        What it saves.
    gone : collection of int
        Ranks that have a part in it and do not live any more. A part that they prepared in a former life does
        not belong to a state of this one, whatever its tag.
    joined_after : int
        Number of the newest joint save when this rank came to life.
    """
    save, outcome = view.save, view.outcome
    if outcome is not None:
        meant = save.number > joined_after and not outcome.leftover and save.tag == tag
        return Late(outcome.reason) if meant and not outcome.committed else Pass()
    if gone:
        return Outcome(
            False,
            f"rank {me.rank}: {named(gone)} prepared it, and died or was started anew since",
            leftover=True,
        )
    if save.world_size != me.world_size:
        return Outcome(
            False,
            f"rank {me.rank} was started with world_size={me.world_size}, rank {save.first} with "
            f"world_size={save.world_size}; all ranks must have the same one",
        )
    if save.tag != tag:
        return Outcome(
            False,
            f"rank {me.rank} saves {tag!r}, and rank {save.first} had begun {save.tag!r}; all ranks must "
            "save the same tags in the same order",
        )
    if me.rank in view.parts:
        return Outcome(False, f"rank {me.rank} saves {tag!r} again")
    return Take()


@dataclass(frozen=True)
class Wait:
    """Nothing can be decided yet."""


def judge_joint(view: JointView, me: int, *, gone: Collection[int], late: str) -> Outcome | Wait:
    """Say how a joint save is to be decided now.

    Parameters
    ----------
    view : JointView
        The joint save; it is returned as decided if it is.
    me : int
        The rank that asks.
    gone : collection of int
        Ranks that were there and are not any more.
    late : str
        Why nobody is waited for any longer; empty as long as there is time.
    """
    if view.outcome is not None:
        return view.outcome
    missing = view.missing
    if not missing:
        parts = [view.parts[rank].record for rank in range(view.save.world_size)]
        return Outcome(
            True,
            f"rank {me}: all parts are there",
            tokens=tuple(part.token for part in parts),
            generations=tuple(part.generation for part in parts),
            created_unix=max(part.created_unix for part in parts),
        )
    died = [rank for rank in missing if rank in gone]
    if died:
        return Outcome(
            False, f"rank {me}: {named(died)} died, or was ended, without having prepared {view.save.tag!r}"
        )
    if late:
        return Outcome(False, f"rank {me}: {named(missing)} had not prepared {view.save.tag!r} {late}")
    return Wait()


def named(ranks: Iterable[int]) -> str:
    """Name ranks in a message.

    >>> named([2]), named([0, 3])
    ('rank 2', 'ranks 0, 3')
    """
    numbers = sorted(ranks)
    shown = ", ".join(map(str, numbers[:_NAMED_RANKS]))
    more = f" and {len(numbers) - _NAMED_RANKS} more" if len(numbers) > _NAMED_RANKS else ""
    return f"rank{'s' if len(numbers) > 1 else ''} {shown}{more}"


def _json(document: dict[str, Any]) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def _parsed(data: bytes, what: str) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except ValueError as error:
        raise UnknownFormatError(f"{what} of {len(data)} bytes cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise UnknownFormatError(f"{what} of {len(data)} bytes cannot be read: not an object")
    return found
