"""The coordinator as one rank sees it: what it commits is decided for all ranks at once.

To everybody else the run of a rank is a run like any other. Here a commit has two steps: the rank puts its
part into the joint save of that tag and waits for the decision; then the decision is written as that of its
own generation. What a rank that dies leaves undone, the next one of its number does before its first save: no
node drops a part that may still be committed, or was.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from dataclasses import dataclass
from typing import Final

from fastcheck_dask.clock import SYSTEM_CLOCK, Clock, Deadline
from fastcheck_dask.coordination.base import (
    CommitRecord,
    Coordinator,
    Decision,
    Health,
    NodeInfo,
    Registration,
    RunClaim,
)
from fastcheck_dask.coordination.commits import check_commit
from fastcheck_dask.coordination.entries import Entries, Watch
from fastcheck_dask.coordination.joint import (
    JointCommit,
    JointView,
    Late,
    Outcome,
    Part,
    Pass,
    Rank,
    Wait,
    judge_joint,
    match,
    run_of_rank,
)
from fastcheck_dask.coordination.joint_saves import JointSaves
from fastcheck_dask.errors import CommitConflictError, ConfigError, CoordinationError, FencedError
from fastcheck_dask.ids import new_token

log = logging.getLogger(__name__)

#: How often those are asked for who have not come, since no watch tells that a process died: at first, and
#: after a while.
_POLL_SECONDS: Final = (0.25, 2.0)
_RETRY_SECONDS: Final = 0.25


@dataclass
class _Own:
    """The save of this rank that was last on its way."""

    number: int
    part: Part
    deadline: Deadline


class RankCoordinator:
    """A `Coordinator` for one rank of a run, over a real one and its entries.

    :meth:`commit` blocks until the joint save is decided, for at most `commit_seconds` (and one time-out of
    the coordinator); everything else blocks as it does there. Any thread may call; one commit at a time.

    Parameters
    ----------
    inner : Coordinator
        The real one.
    run : str
        The run of all ranks.
    me : Rank
        This one.
    commit_seconds : float
        How long a rank that has prepared waits for the others.
    above : int
        The greatest number of a joint save that the object tier knows.
    clock : Clock
    """

    def __init__(
        self,
        inner: Coordinator,
        *,
        run: str,
        me: Rank,
        commit_seconds: float,
        above: int = 0,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._inner, self._me, self._clock = inner, me, clock
        self._saves = JointSaves(inner.entries, run, me)
        self._runs = [run_of_rank(run, rank) for rank in range(me.world_size)]
        self._run = self._runs[me.rank]
        self._commit_seconds = commit_seconds
        self._above = above
        self._claim: RunClaim | None = None
        self._owner = ""
        #: Number of the last joint save that a save of this rank was matched with, or that passed.
        self._consumed = 0
        self._joined_after = 0
        #: Those ranks that lived when they were last asked for, and who they were.
        self._seen: dict[int, str] = {}
        #: A part whose decision is not known, or not written as that of our generation.
        self._own: _Own | None = None
        #: Of the last save whose decision is known.
        self._decided_token = ""
        self._closed = threading.Event()

    # ---- what is as with any run

    @property
    def entries(self) -> Entries:
        """Small shared entries, in the same session."""
        return self._inner.entries

    @property
    def layout_version(self) -> int:
        """Version of the layout; see `Coordinator`."""
        return self._inner.layout_version

    def health(self) -> Health:
        """Say how the connection is; see `Coordinator`."""
        return self._inner.health()

    def register(self, info: NodeInfo) -> Registration:
        """Announce a storage node; see `Coordinator`."""
        return self._inner.register(info)

    def nodes(self) -> tuple[NodeInfo, ...]:
        """Return the live storage nodes, sorted by name."""
        return self._inner.nodes()

    def owner(self, run: str) -> str | None:
        """Return who owns a run; see `Coordinator`."""
        return self._inner.owner(run)

    def runs(self) -> tuple[str, ...]:
        """Return the names of all runs; see `Coordinator`."""
        return self._inner.runs()

    def abort(self, run: str, generation: int, *, token: str, reason: str) -> Decision:
        """Decide that a generation will not be committed; see `Coordinator`."""
        return self._inner.abort(run, generation, token=token, reason=reason)

    def mark_persisted(self, run: str, generation: int, token: str) -> None:
        """Note that the object tier has a generation; see `Coordinator`."""
        self._inner.mark_persisted(run, generation, token)

    def relocate(self, record: CommitRecord, moved: CommitRecord, *, fencing_token: int) -> CommitRecord:
        """Say that other nodes hold the newest generation of a run; see `Coordinator`."""
        return self._inner.relocate(record, moved, fencing_token=fencing_token)

    def latest(self, run: str) -> CommitRecord | None:
        """Return the newest committed generation of a run."""
        return self._inner.latest(run)

    def commits(self, run: str) -> tuple[CommitRecord, ...]:
        """Return all committed generations of a run, oldest first."""
        return self._inner.commits(run)

    def close(self) -> None:
        """End the session; a commit that waits fails. Idempotent."""
        self._closed.set()
        self._inner.close()

    # ---- what concerns all ranks

    def claim(self, run: str, owner: str, *, wait_seconds: float = 0.0, takeover: bool = False) -> RunClaim:
        """Own this rank's run, and settle what the rank's former process left; see `Coordinator`."""
        if run != self._run:
            raise ConfigError(f"this coordinator is of run {self._run}; got {run}")
        # The name says which life of the rank it is.
        name = f"{owner}, life {new_token()[:12]}"
        claim = self._inner.claim(run, name, wait_seconds=wait_seconds, takeover=takeover)
        try:
            self._claim, self._owner = claim, name
            self._settle()
            numbers = self._saves.numbers()
            self._joined_after = max(numbers, default=0)
            self._consumed = max(self._saves.outcomes(numbers), default=0)
        except BaseException:
            claim.close()
            raise
        return claim

    def newest_decided(self, run: str) -> int:
        """Return the greatest decided generation; first finds out what became of a part of ours in doubt."""
        if run == self._run and self._own is not None:
            self._settle()
        return self._inner.newest_decided(run)

    def commit(self, record: CommitRecord, claim: RunClaim) -> CommitRecord:
        """Publish this rank's part of a joint save, and return when all ranks' parts are committed.

        Raises
        ------
        CommitConflictError
            If the joint save was aborted; the message says by which rank and why.
        FencedError
            If this rank has another owner, and nothing of this save was or will be committed.
        CoordinationError
            If the coordinator could not be reached until the time was over. The part stays a promise:
            `newest_decided` finds out what became of it.
        """
        check_commit(record, claim)
        if self._own is None or self._own.part.record.token != record.token:
            assert self._own is None, "what is in doubt is settled before a save begins, by newest_decided"
            deadline = Deadline.after(self._commit_seconds, self._clock)
            claim.check()
            number = self._matched(record.tag, record.token)
            self._own = _Own(number, Part(self._me.rank, self._owner, record), deadline)
        own = self._own
        outcome = self._decided(own)
        stored = self._write_down(own.part.record, outcome)
        self._consumed, self._own, self._decided_token = own.number, None, record.token
        if not outcome.committed:
            raise CommitConflictError(f"save {record.tag!r} was aborted for all ranks: {outcome.reason}")
        return record if stored is None else stored

    def give_up(self, tag: str, *, token: str = "", reason: str) -> None:
        """Say that this rank has no part for the save of that tag: the others need not wait for it.

        `token` is that of the save, if it came as far as one: nothing is done if its decision is known.

        Raises
        ------
        CoordinationError
            If the coordinator cannot be reached: the others find out by their deadline.
        """
        if self._own is not None:
            self._settle()
            return
        if token and token == self._decided_token:
            return
        try:
            number = self._matched(tag, token)
        except CommitConflictError:
            return
        self._saves.decide(number, Outcome(False, f"rank {self._me.rank} failed: {reason}"))
        self._consumed = number

    def joint_commits(self) -> list[JointCommit]:
        """Return the checkpoints that all ranks have, oldest first."""
        return self._saves.commits()

    # ---- taking part

    def _matched(self, tag: str, token: str) -> int:
        """Return the number of the joint save in which a save of this tag takes part; begin it if need be.

        Raises
        ------
        CommitConflictError
            If it was aborted before this rank came.
        """
        self._look_around(range(self._me.world_size))
        while True:
            last = self._saves.last()
            for number in self._saves.numbers(after=self._consumed):
                view = self._saves.read(number)
                gone = self._gone_authors(view)
                found = match(view, self._me, tag, gone=gone, joined_after=self._joined_after)
                if isinstance(found, Late):
                    self._consumed, self._decided_token = number, token
                    raise CommitConflictError(
                        f"save {tag!r} was aborted before rank {self._me.rank} came to it: {found.reason}"
                    )
                if isinstance(found, Outcome):
                    held = self._saves.decide(number, found)
                    log.warning("joint save %d (%s) does not go on: %s", number, view.save.tag, held.reason)
                elif not isinstance(found, Pass):
                    return number
                self._consumed = number
            self._saves.begin(tag, above=max(self._above, self._consumed), last=last)

    def _gone_authors(self, view: JointView) -> list[int]:
        """Return the ranks whose part was prepared by a process that does not own that rank any more."""
        if view.outcome is not None:
            return []
        return [
            rank
            for rank, part in view.parts.items()
            if self._inner.owner(run_of_rank(self._saves.run, rank)) != part.owner
        ]

    def _look_around(self, ranks: range) -> None:
        for rank in ranks:
            owner = self._inner.owner(self._runs[rank])
            if owner is not None:
                self._seen[rank] = owner

    def _died(self, missing: list[int]) -> list[int]:
        """Return those of `missing` that lived and do not, or live anew: they never come to this save.

        Who was not seen yet may be starting.
        """
        died = []
        for rank in missing:
            owner, before = self._inner.owner(self._runs[rank]), self._seen.get(rank)
            if before is None and owner is not None:
                self._seen[rank] = owner
            elif before is not None and owner != before:
                died.append(rank)
        return died

    def _decided(self, own: _Own) -> Outcome:
        """Put the part there, and wait for the decision or make it."""
        while True:
            try:
                self._saves.add_part(own.number, own.part)
                with contextlib.closing(self._saves.watch(own.number)) as watch:
                    return self._awaited(own, watch)
            except FencedError:
                # The part is not there and will not be.
                self._own = None
                raise
            except CoordinationError as error:
                if own.deadline.passed or self._closed.is_set():
                    raise
                log.warning("joint save %d: tried again: %s", own.number, error)
                self._closed.wait(_RETRY_SECONDS)

    def _awaited(self, own: _Own, watch: Watch) -> Outcome:
        seconds, most = _POLL_SECONDS
        while (outcome := self._try_decide(own)) is None:
            if not watch.wait(min(seconds, own.deadline.left() or 0.0)):
                seconds = min(seconds * 1.5, most)
        return outcome

    def _try_decide(self, own: _Own) -> Outcome | None:
        late = f"within {self._commit_seconds:g} s (commit_timeout)" if own.deadline.passed else ""
        view = self._saves.read(own.number)
        gone = self._died(view.missing) if view.outcome is None else []
        found = judge_joint(view, self._me.rank, gone=gone, late=late)
        if isinstance(found, Wait):
            return None
        return view.outcome or self._saves.decide(own.number, found)

    # ---- what was decided

    def _write_down(self, record: CommitRecord, outcome: Outcome) -> CommitRecord | None:
        """Write the decision of a joint save as that of our generation; return the record that holds."""
        assert self._claim is not None
        if not outcome.committed:
            self._inner.abort(self._run, record.generation, token=record.token, reason=outcome.reason)
            return None
        try:
            return self._inner.commit(record, self._claim)
        except FencedError as error:
            # It is committed, whatever became of us: the next owner writes it down, and no node may drop it.
            log.warning("generation %d is left to the next owner: %s", record.generation, error)
            return None
        except CommitConflictError as error:
            raise CoordinationError(
                f"generation {record.generation} is committed by all ranks: {error}"
            ) from error

    def _settle(self) -> None:
        """Decide every joint save with a part of ours, and write down what became of our generations."""
        assert self._claim is not None
        # From here on nothing is added by a former process of this rank, or by a call of ours that was lost.
        self._saves.join(self._claim.order, self._owner)
        written = self._inner.newest_decided(self._run)
        for number, part in sorted(self._saves.own_parts(self._saves.numbers()).items()):
            if part.record.generation > written:
                self._write_down(part.record, self._settled(number, part))
                self._consumed = max(self._consumed, number)
        self._own = None

    def _settled(self, number: int, part: Part) -> Outcome:
        """Decide a joint save now: nothing begins before it is known what becomes of the part."""
        view = self._saves.read(number)
        found = judge_joint(view, self._me.rank, gone=(), late="")
        if isinstance(found, Wait):
            me = self._me.rank
            why = f"rank {me} was started anew, or lost the coordinator, before all ranks had prepared"
            # A save of this life was meant: the others, when they come to it, are told at once.
            found = Outcome(False, f"{why} {view.save.tag!r}", leftover=part.owner != self._owner)
        return view.outcome or self._saves.decide(number, found)
