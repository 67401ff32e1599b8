"""Ownership of a run: an ephemeral znode, and a fencing token that each claim raises."""

from __future__ import annotations

import logging
from typing import Any, Final

from fastcheck_dask.clock import Deadline
from fastcheck_dask.coordination.commits import fenced, in_use
from fastcheck_dask.coordination.zookeeper.client import ReplyLostError, Session, Znode
from fastcheck_dask.coordination.zookeeper.ephemeral import Ephemeral, Keeper
from fastcheck_dask.coordination.zookeeper.znodes import Znodes, sign, signature, signed_text
from fastcheck_dask.errors import CoordinationError
from fastcheck_dask.ids import check_name, new_token

logger = logging.getLogger(__name__)

_POLL_SECONDS: Final = 0.05
_RETRY_SECONDS: Final = 0.02
_VERSION_BITS: Final = 20


class ZooKeeperClaim(Ephemeral):
    """Ownership of a run through a `ZooKeeperCoordinator`."""

    def __init__(self, session: Session, *, znodes: Znodes, run: str, token: str) -> None:
        super().__init__(session, znodes.owner(run), token)
        self.run = run
        self.fencing_token = 0
        self.order = 0
        self.lost = False
        self._fence = znodes.fence(run)

    @property
    def in_force(self) -> bool:
        """Whether it was neither given back nor found lost; the server has the last word, in each commit."""
        return not self.lost and self._wanted is not None

    def holds(self, fence: Znode | None) -> bool:
        """Say whether the claim is in force under the fence that was read."""
        return self.in_force and self.is_ours(fence)

    def is_ours(self, fence: Znode | None) -> bool:
        """Say whether a fence that was read is as this claim left it."""
        # A server that lost its data counts versions anew: another claim may have come to the same one.
        if fence is None or fence.version != self.fencing_token:
            return False
        return signature(fence.data) == self.token

    def check(self) -> None:
        """Raise `FencedError` unless the run is still owned."""
        deadline = self.session.deadline()
        self.session.sync(self._fence, deadline=deadline)
        fence = self.session.read(self._fence, deadline=deadline)
        if not self.holds(fence):
            raise fenced(self.run, instead(self, fence))

    def create(self, data: bytes, *, deadline: Deadline) -> None:
        """Stand as the owner again after the session was lost, unless somebody claimed the run since."""

        def build(transaction: Any) -> None:
            transaction.check(self._fence, self.fencing_token)
            transaction.create(self.path, data, ephemeral=True)

        refused = self.session.transact(f"claiming run {self.run} again", build, deadline=deadline)
        if isinstance(refused, tuple):
            index, error = refused
            if index == 0:
                self._lose()
            else:
                raise error

    def close(self) -> None:
        """Give the run back. Idempotent; when ZooKeeper cannot be reached this raises, and is done later."""
        if self._wanted is None or self.session.closed or self.session.foreign:
            return
        self.want(None)
        self.settle(self.session.deadline())

    def _settle_once(self, deadline: Deadline) -> None:
        if self.in_force and not self.is_ours(self.session.read(self._fence, deadline=deadline)):
            self._lose()
        super()._settle_once(deadline)

    def _lose(self) -> None:
        logger.warning("run %s: the claim under fencing token %d is lost", self.run, self.fencing_token)
        self.lost = self.finished = True


def instead(claim: ZooKeeperClaim, fence: Znode | None) -> str:
    """Return who claimed the run after `claim`; empty if nobody did."""
    if fence is None or signature(fence.data) == claim.token:
        return ""
    return signed_text(fence.data)


def claim(
    session: Session,
    keeper: Keeper,
    *,
    znodes: Znodes,
    run: str,
    owner: str,
    wait_seconds: float,
    takeover: bool,
) -> ZooKeeperClaim:
    """Own a run; see `Coordinator.claim`."""
    session.check_usable()
    check_name(run, "run")
    patience = Deadline.after(wait_seconds)
    made = ZooKeeperClaim(session, znodes=znodes, run=run, token=new_token())
    data = sign(made.token, owner)
    try:
        _prepare(session, znodes, run=run)
        while (taken_by := _try_claim(made, data, znodes=znodes, takeover=takeover)) is not None:
            if patience.passed:
                raise in_use(run, repr(taken_by))
            session.pause(min(_POLL_SECONDS, patience.left() or 0.0))
    except BaseException:
        # A write whose answer is missing may yet take effect: the keeper removes what should not be there.
        made.want(None)
        raise
    finally:
        keeper.add(made)
    return made


def present_owner(session: Session, znodes: Znodes, run: str) -> str | None:
    """Return who owns a run now; see `Coordinator.owner`."""
    deadline = session.deadline()
    session.sync(znodes.owner(run), deadline=deadline)
    found = session.read(znodes.owner(run), deadline=deadline)
    return None if found is None else signed_text(found.data) or "an unknown process"


def _prepare(session: Session, znodes: Znodes, *, run: str) -> None:
    deadline = session.deadline()
    for path in (znodes.fence(run), znodes.latest(run), znodes.decisions(run)):
        session.ensure(path, deadline=deadline)


def _try_claim(made: ZooKeeperClaim, data: bytes, *, znodes: Znodes, takeover: bool) -> str | None:
    """Take the run and return None, or return who has it."""
    session, run = made.session, made.run
    deadline = session.deadline()
    while True:
        session_id = session.session_id
        fence = session.read(znodes.fence(run), deadline=deadline)
        found = session.read(made.path, deadline=deadline)
        if fence is None:
            raise CoordinationError(
                f"ZooKeeper at {session.hosts} has no {znodes.fence(run)}: was it emptied?"
            )
        foreign = found is not None and signature(found.data) != made.token
        if found is not None and foreign and not takeover:
            return signed_text(found.data) or "an unknown process"
        if found is not None and found.session_id == session_id and signature(fence.data) == made.token:
            made.fencing_token = fence.version
            # Versions of a znode begin anew when somebody deletes it; the time it was made does not.
            made.order = (fence.created_ms << _VERSION_BITS) + fence.version
            made.want(data)
            made.settle(deadline)
            return None
        fence_path = znodes.fence(run)
        _write_claim(
            made, data, fence_path=fence_path, version=fence.version, replace=foreign, deadline=deadline
        )


def _write_claim(
    made: ZooKeeperClaim, data: bytes, *, fence_path: str, version: int, replace: bool, deadline: Deadline
) -> None:
    """Write owner and fence once; what came of it is read back, so that a lost answer does no harm."""

    def build(transaction: Any) -> None:
        transaction.set_data(fence_path, data, version=version)
        if replace:
            transaction.delete(made.path)
        transaction.create(made.path, data, ephemeral=True)

    what = f"claiming run {made.run}"
    try:
        refused = made.session.transact(what, build, deadline=deadline)
    except ReplyLostError as error:
        made.session.after_lost_reply(what, error, deadline=deadline)
        return
    if isinstance(refused, tuple):
        # Somebody was faster, or our own znode of a session that ended is about to go.
        made.session.pause(_RETRY_SECONDS)
        made.session.sync(fence_path, deadline=deadline)
