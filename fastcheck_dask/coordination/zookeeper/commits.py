"""Commits in ZooKeeper: a decision and ``latest`` in one transaction, fenced by the claim's token."""

from __future__ import annotations

from typing import Any, Final

from kazoo.exceptions import BadVersionError, NodeExistsError, NoNodeError

from fastcheck_dask.clock import Deadline
from fastcheck_dask.coordination.base import Abort, CommitRecord, Decision
from fastcheck_dask.coordination.candidacy import EPOCH
from fastcheck_dask.coordination.commits import (
    bounded,
    check_abort,
    check_commit,
    conflicting_mark,
    judge,
    judge_relocation,
    read_record,
    read_stored,
)
from fastcheck_dask.coordination.zookeeper.claims import ZooKeeperClaim, instead
from fastcheck_dask.coordination.zookeeper.client import ReplyLostError, Session, Znode
from fastcheck_dask.coordination.zookeeper.znodes import Znodes
from fastcheck_dask.errors import CommitConflictError, CoordinationError, FencedError, UnknownFormatError

#: Records asked for at once.
_BATCH: Final = 200


def commit(session: Session, znodes: Znodes, *, record: CommitRecord, claim: ZooKeeperClaim) -> CommitRecord:
    """Publish a generation; see `Coordinator.commit`.

    Notes
    -----
    Every try begins by reading what is there, so that a write whose answer was lost is recognised by its
    token, and an author that was fenced after its write took effect learns that it did.
    """
    session.check_usable()
    data = check_commit(record, claim)
    deadline = session.deadline()
    sent = False
    while True:
        try:
            stored, latest = _judged(session, znodes, record=record, claim=claim, deadline=deadline)
            if stored is not None:
                return stored
            sent = True
            entry = (record, data)
            if _publish(session, znodes, claim=claim, entry=entry, latest=latest, deadline=deadline):
                return record
        except (FencedError, CommitConflictError):
            raise
        except CoordinationError as error:
            raise (_in_doubt(record, error) if sent else error) from error.__cause__


def abort(
    session: Session, znodes: Znodes, *, run: str, generation: int, token: str, reason: str
) -> Decision:
    """Decide that a generation will not be committed; see `Coordinator.abort`."""
    session.check_usable()
    wanted = Abort(run, generation, token, reason)
    data = check_abort(wanted)
    path = znodes.decision(run, generation)
    deadline = session.deadline()
    what = f"aborting generation {generation} of run {run}"
    session.ensure(znodes.decisions(run), deadline=deadline)
    while True:
        session.sync(path, deadline=deadline)
        found = session.read(path, deadline=deadline)
        if found is not None:
            return read_stored(found.data, run=run, generation=generation)
        try:
            session.attempt(what, lambda c: c.create_async(path, data), deadline=deadline)
        except NodeExistsError:
            continue
        except ReplyLostError as error:
            session.after_lost_reply(what, error, deadline=deadline)


def newest_decided(session: Session, znodes: Znodes, run: str) -> int:
    """Return the greatest generation that was committed or aborted, 0 if there is none."""
    deadline = session.deadline()
    session.sync(znodes.decisions(run), deadline=deadline)
    names = session.children(znodes.decisions(run), deadline=deadline)
    return max((int(name) for name in names or ()), default=0)


def mark_persisted(session: Session, znodes: Znodes, *, run: str, generation: int, token: str) -> None:
    """Note that the object tier has a generation; see `Coordinator.mark_persisted`."""
    session.check_usable()
    path = znodes.decision(run, generation)
    deadline = session.deadline()
    session.sync(path, deadline=deadline)
    while (found := session.read(path, deadline=deadline)) is not None:
        record = read_stored(found.data, run=run, generation=generation)
        if isinstance(record, Abort) or record.token != token:
            raise conflicting_mark(run, generation)
        if record.persisted:
            return
        _replace(
            session, path, data=record.as_persisted().to_bytes(), version=found.version, deadline=deadline
        )


def relocate(
    session: Session, znodes: Znodes, *, record: CommitRecord, moved: CommitRecord, fencing_token: int
) -> CommitRecord:
    """Say that other nodes hold the newest generation of a run; see `Coordinator.relocate`."""
    session.check_usable()
    run, generation = record.run, record.generation
    paths = (f"{znodes.entries}/{EPOCH}", znodes.latest(run), znodes.decision(run, generation))
    what = f"relocating generation {generation} of run {run}"
    deadline = session.deadline()
    while True:
        session.sync(znodes.latest(run), deadline=deadline)
        epoch, latest, decision = session.read_many(list(paths), deadline=deadline)
        is_newest = decision is not None and _number(latest, run) == generation
        found = read_record(decision.data, run=run, generation=generation) if decision and is_newest else None
        stored = judge_relocation(
            record,
            moved,
            stored=found,
            masters_token=None if epoch is None else epoch.version,
            fencing_token=fencing_token,
        )
        if stored is not None:
            return stored
        assert found is not None
        versions = [one.version for one in (epoch, latest, decision) if one is not None]
        changed = found.held_by(moved.nodes, moved.addresses)
        if _move(session, paths, versions=versions, data=changed.to_bytes(), what=what, deadline=deadline):
            return changed


def _move(
    session: Session,
    paths: tuple[str, str, str],
    *,
    versions: list[int],
    data: bytes,
    what: str,
    deadline: Deadline,
) -> bool:
    """Write the last one of three entries if none of them has changed; say whether it surely was."""
    bounded(data, what)

    def build(transaction: Any) -> None:
        for path, version in zip(paths[:2], versions[:2], strict=True):
            transaction.check(path, version)
        transaction.set_data(paths[2], data, version=versions[2])

    try:
        return isinstance(session.transact(what, build, deadline=deadline), list)
    except ReplyLostError as error:
        session.after_lost_reply(what, error, deadline=deadline)
        return False


def latest_commit(session: Session, znodes: Znodes, run: str) -> CommitRecord | None:
    """Return the newest committed generation of a run, None if there is none."""
    deadline = session.deadline()
    session.sync(znodes.latest(run), deadline=deadline)
    generation = _number(session.read(znodes.latest(run), deadline=deadline), run)
    if generation is None:
        return None
    decision = session.read(znodes.decision(run, generation), deadline=deadline)
    if decision is None:
        raise CoordinationError(
            f"ZooKeeper at {session.hosts}: generation {generation} of run {run} is the latest, and its "
            "record is gone: somebody deleted it"
        )
    return read_record(decision.data, run=run, generation=generation)


def all_commits(session: Session, znodes: Znodes, run: str) -> tuple[CommitRecord, ...]:
    """Return all committed generations of a run, oldest first."""
    deadline = session.deadline()
    session.sync(znodes.decisions(run), deadline=deadline)
    names = session.children(znodes.decisions(run), deadline=deadline) or []
    found: list[Decision] = []
    for start in range(0, len(names), _BATCH):
        generations = [int(name) for name in names[start : start + _BATCH]]
        paths = [znodes.decision(run, generation) for generation in generations]
        decisions = session.read_many(paths, deadline=deadline)
        found += [
            read_stored(decision.data, run=run, generation=generation)
            for generation, decision in zip(generations, decisions, strict=True)
            if decision is not None
        ]
    return tuple(one for one in found if isinstance(one, CommitRecord))


def _judged(
    session: Session, znodes: Znodes, *, record: CommitRecord, claim: ZooKeeperClaim, deadline: Deadline
) -> tuple[CommitRecord | None, Znode]:
    """Return the stored record if the commit is already there, and ``latest`` as it was before."""
    run, generation = record.run, record.generation
    session.sync(znodes.latest(run), deadline=deadline)
    # `latest` is read first: whatever it covers then has its decision, now.
    latest, fence, decision = session.read_many(
        [znodes.latest(run), znodes.fence(run), znodes.decision(run, generation)], deadline=deadline
    )
    stored = judge(
        record,
        stored=None if decision is None else read_stored(decision.data, run=run, generation=generation),
        latest=_number(latest, run),
        in_force=claim.session is session and claim.holds(fence),
        owner=instead(claim, fence),
    )
    if latest is None:
        raise CoordinationError(f"ZooKeeper at {session.hosts} has no {znodes.latest(run)}: was it emptied?")
    return stored, latest


def _publish(
    session: Session,
    znodes: Znodes,
    *,
    claim: ZooKeeperClaim,
    entry: tuple[CommitRecord, bytes],
    latest: Znode,
    deadline: Deadline,
) -> bool:
    """Send the transaction once and say whether it surely took effect; if not, look again."""
    record, data = entry
    run, generation = record.run, record.generation

    def build(transaction: Any) -> None:
        transaction.check(znodes.fence(run), claim.fencing_token)
        transaction.create(znodes.decision(run, generation), data)
        transaction.set_data(znodes.latest(run), str(generation).encode(), version=latest.version)

    what = f"committing generation {generation} of run {run}"
    try:
        return isinstance(session.transact(what, build, deadline=deadline), list)
    except ReplyLostError as error:
        session.after_lost_reply(what, error, deadline=deadline)
        return False


def _replace(session: Session, path: str, *, data: bytes, version: int, deadline: Deadline) -> None:
    """Write once over the version that was read; what came of it is read back."""
    bounded(data, path)
    try:
        session.attempt(f"writing {path}", lambda c: c.set_async(path, data, version), deadline=deadline)
    except (BadVersionError, NoNodeError):
        session.sync(path, deadline=deadline)
    except ReplyLostError as error:
        session.after_lost_reply(f"writing {path}", error, deadline=deadline)


def _number(latest: Znode | None, run: str) -> int | None:
    if latest is None or not latest.data:
        return None
    if not latest.data.isdigit():
        raise UnknownFormatError(f"the latest generation of run {run} reads {latest.data[:40]!r}")
    return int(latest.data)


def _in_doubt(record: CommitRecord, error: CoordinationError) -> CoordinationError:
    return CoordinationError(
        f"{error.message}; generation {record.generation} of run {record.run} may or may not be committed: "
        "commit it again with the same token to learn"
    )
