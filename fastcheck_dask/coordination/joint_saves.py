"""Joint saves as entries of the coordinator: read, begun, joined and decided.

::

    joint/<run>/last                        number of the newest joint save
    joint/<run>/ranks/rank-<rank>           who saves as that rank; its version fences what it writes
    joint/<run>/saves/<number>              tag and world size, ten digits
    joint/<run>/saves/<number>/rank-<rank>  what that rank has prepared
    joint/<run>/saves/<number>/decision     committed or aborted
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from typing import Final

from fastcheck_dask.coordination.commits import bounded, fenced
from fastcheck_dask.coordination.entries import (
    Change,
    Check,
    Create,
    Entries,
    Entry,
    EntryConflictError,
    OutcomeUnknownError,
    Watch,
    Write,
)
from fastcheck_dask.coordination.joint import (
    JointCommit,
    JointSave,
    JointView,
    Outcome,
    Part,
    Rank,
    rank_name,
    run_of_rank,
)
from fastcheck_dask.errors import CoordinationError, UnknownFormatError
from fastcheck_dask.ids import check_name

log = logging.getLogger(__name__)

_DECISION: Final = "decision"


class JointSaves:
    """The joint saves of one run, as one rank sees and changes them. Any thread may call.

    Every method blocks for at most a few calls of the coordinator, and raises `CoordinationError` when it
    cannot be reached. Writes are repeated until it is known what came of them.
    """

    def __init__(self, entries: Entries, run: str, me: Rank) -> None:
        self._entries, self._me = entries, me
        self.run = check_name(run, "run")
        self._top = f"joint/{run}"
        self._fence_path = f"{self._top}/ranks/{rank_name(me.rank)}"
        self._fence_version = -1

    def join(self, order: int, owner: str) -> None:
        """Become the one that writes for this rank: what others have not written by now they never do.

        Parameters
        ----------
        order : int
            Of the claim, see `RunClaim.order`.
        owner : str
            Who it is, as the claim says.

        Raises
        ------
        FencedError
            If a later claim has joined.
        """
        value = json.dumps({"order": order, "owner": owner}).encode()
        while True:
            found = self._entries.get(self._fence_path)
            if found is not None and (present := _fence(found))[0] > order:
                raise fenced(run_of_rank(self.run, self._me.rank), present[1])
            version = None if found is None else found.version
            if self._applied(
                Create(self._fence_path, value) if found is None else Write(self._fence_path, value, version)
            ):
                self._fence_version = 0 if version is None else version + 1
                return

    def numbers(self, *, after: int = 0) -> list[int]:
        """Return the numbers of the joint saves, ascending."""
        return [number for name in self._entries.names(f"{self._top}/saves") if (number := int(name)) > after]

    def read(self, number: int) -> JointView:
        """Return a joint save with all its parts."""
        top = self._path(number)
        names = self._entries.names(top)
        ranks = [name for name in names if name != _DECISION]
        head, decision, *parts = self._entries.get_many(
            top, f"{top}/{_DECISION}", *(f"{top}/{name}" for name in ranks)
        )
        if head is None:
            raise CoordinationError(f"joint save {number} of run {self.run} is gone: somebody deleted it")
        found = [Part.from_bytes(entry.value) for entry in parts if entry is not None]
        return JointView(
            JointSave.from_bytes(head.value),
            {part.rank: part for part in found},
            None if decision is None else Outcome.from_bytes(decision.value),
        )

    def outcomes(self, numbers: Iterable[int]) -> dict[int, Outcome]:
        """Return the decisions of those that are decided."""
        asked = list(numbers)
        found = self._entries.get_many(*(f"{self._path(number)}/{_DECISION}" for number in asked))
        return {
            number: Outcome.from_bytes(entry.value)
            for number, entry in zip(asked, found, strict=True)
            if entry is not None
        }

    def own_parts(self, numbers: Iterable[int]) -> dict[int, Part]:
        """Return what this rank has prepared, by number of the joint save."""
        asked = list(numbers)
        name = rank_name(self._me.rank)
        found = self._entries.get_many(*(f"{self._path(number)}/{name}" for number in asked))
        return {
            number: Part.from_bytes(entry.value)
            for number, entry in zip(asked, found, strict=True)
            if entry is not None
        }

    def commits(self) -> list[JointCommit]:
        """Return the committed ones, oldest first."""
        outcomes = {number: one for number, one in self.outcomes(self.numbers()).items() if one.committed}
        heads = self._entries.get_many(*map(self._path, outcomes))
        found = []
        for (number, outcome), head in zip(outcomes.items(), heads, strict=True):
            if head is None:
                raise CoordinationError(f"joint save {number} of run {self.run} is gone: somebody deleted it")
            save = JointSave.from_bytes(head.value)
            found.append(
                JointCommit(
                    number,
                    save.tag,
                    save.world_size,
                    outcome.created_unix,
                    outcome.tokens,
                    outcome.generations,
                )
            )
        return found

    def last(self) -> Entry | None:
        """Return what changes whenever a joint save is begun; to be read before one looks for them."""
        return self._entries.get(f"{self._top}/last")

    def begin(self, tag: str, *, above: int, last: Entry | None) -> None:
        """Begin a joint save under the next number, unless somebody did meanwhile: look again.

        Parameters
        ----------
        tag : str
            What is saved.
        above : int
            A number that it has to be greater than, since a coordinator may have lost its data.
        last : Entry or None
            What :meth:`last` gave before it was found that there is none to take part in: two ranks that look
            at the same time begin only one.

        Raises
        ------
        FencedError
            If another one writes for this rank by now.
        """
        path = f"{self._top}/last"
        number = 1 + max(above, 0 if last is None else int(last.value))
        save = JointSave(number, tag, self._me.world_size, self._me.rank)
        value = str(number).encode()
        if not self._applied(
            Create(path, value) if last is None else Write(path, value, last.version),
            Check(self._fence_path, self._fence_version),
            Create(self._path(number), save.to_bytes()),
        ):
            self._check_fence(self._entries.get(self._fence_path))

    def add_part(self, number: int, part: Part) -> None:
        """Put this rank's part there. Idempotent.

        Raises
        ------
        FencedError
            If another one writes for this rank by now, and the part is not there.
        """
        path = f"{self._path(number)}/{rank_name(part.rank)}"
        data = bounded(part.to_bytes(), f"part of rank {part.rank} in joint save {number} of run {self.run}")
        while not self._applied(Check(self._fence_path, self._fence_version), Create(path, data)):
            found, fence = self._entries.get_many(path, self._fence_path)
            if found is not None and Part.from_bytes(found.value).record.token == part.record.token:
                return
            self._check_fence(fence)
            if found is not None:
                raise CoordinationError(
                    f"joint save {number} of run {self.run} has another part of rank {part.rank}"
                )

    def decide(self, number: int, wanted: Outcome) -> Outcome:
        """Decide a joint save, unless it is decided already; return what holds."""
        path = f"{self._path(number)}/{_DECISION}"
        while True:
            found = self._entries.get(path)
            if found is not None:
                return Outcome.from_bytes(found.value)
            self._applied(Create(path, bounded(wanted.to_bytes(), f"decision of {path}")))

    def _check_fence(self, found: Entry | None) -> None:
        if found is None or found.version != self._fence_version:
            raise fenced(run_of_rank(self.run, self._me.rank), "" if found is None else _fence(found)[1])

    def watch(self, number: int) -> Watch:
        """Watch a joint save: parts that come, and its decision."""
        return self._entries.watch(self._path(number))

    def _path(self, number: int) -> str:
        return f"{self._top}/saves/{number:010d}"

    def _applied(self, *changes: Change) -> bool:
        """Apply once and say whether it surely took effect; if not, look what is there."""
        try:
            self._entries.apply(*changes)
        except (EntryConflictError, OutcomeUnknownError) as error:
            log.debug("run %s: %s", self.run, error)
            return False
        return True


def _fence(entry: Entry) -> tuple[int, str]:
    try:
        found = json.loads(entry.value)
        return int(found["order"]), str(found["owner"])
    except (ValueError, TypeError, KeyError) as error:
        raise UnknownFormatError(f"the entry of a rank cannot be read: {error!r}") from error
