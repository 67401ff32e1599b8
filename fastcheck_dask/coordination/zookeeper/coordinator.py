"""The ZooKeeper coordinator: one session, its registrations and claims, and what it asks of the server."""

from __future__ import annotations

import contextlib

from kazoo.exceptions import NodeExistsError

from fastcheck_dask.clock import Deadline
from fastcheck_dask.coordination.access import Access
from fastcheck_dask.coordination.base import CommitRecord, Decision, Health, NodeInfo, Registration, RunClaim
from fastcheck_dask.coordination.zookeeper.claims import ZooKeeperClaim, claim, present_owner
from fastcheck_dask.coordination.zookeeper.client import Session
from fastcheck_dask.coordination.zookeeper.commits import (
    abort,
    all_commits,
    commit,
    latest_commit,
    mark_persisted,
    newest_decided,
    relocate,
)
from fastcheck_dask.coordination.zookeeper.entries import ZooKeeperEntries
from fastcheck_dask.coordination.zookeeper.ephemeral import Keeper
from fastcheck_dask.coordination.zookeeper.registry import live_nodes, register
from fastcheck_dask.coordination.zookeeper.transport import open_to_all
from fastcheck_dask.coordination.zookeeper.znodes import FORMAT_VERSION, Znodes
from fastcheck_dask.errors import ConfigError
from fastcheck_dask.ids import check_name


class ZooKeeperCoordinator:
    """Coordination through ZooKeeper.

    Registrations and claims are ephemeral znodes. When the session was lost a thread makes them again under
    the new one: a node that was silent for a while still has its data. A claim comes back only if nobody
    claimed the run meanwhile; else commits under it raise `FencedError`. Any thread may call; a call blocks
    for at most `timeout_seconds`, except that :meth:`claim` waits `wait_seconds` longer, and :meth:`register`
    one and a half sessions for the znode of a process of the same name that was just killed. A forked child
    may not use it.

    Parameters
    ----------
    hosts : str
        ``host:port,host:port``.
    root : str
        Absolute path of the znode under which everything lies; created if missing.
    timeout_seconds : float
        How long a call waits for its answer.
    session_seconds : float
        After how long without a sign of life the server forgets what is ephemeral; it may insist on more
        (at least two of its ticks).
    access : Access, optional
        With credentials, all that is made here is for them and for those they grant it to.

    Raises
    ------
    CoordinationError
        If no server answers within the time-out, or it does not let us in.
    ConfigError
        If what lies under the root was written by a newer version, or is open to everyone although there
        are credentials; or a file for TLS cannot be used.
    """

    def __init__(
        self,
        hosts: str,
        root: str,
        *,
        timeout_seconds: float = 10.0,
        session_seconds: float = 10.0,
        access: Access | None = None,
    ) -> None:
        self._znodes = Znodes(root.rstrip("/"))
        self._keeper = Keeper()
        self._session = Session(
            hosts,
            timeout_seconds=timeout_seconds,
            session_seconds=session_seconds,
            on_change=self._keeper.poke,
            access=access or Access(),
        )
        try:
            self._prepare_root()
        except BaseException:
            self._session.close()
            raise
        self._keeper.start(self._session)
        self._entries = ZooKeeperEntries(self._session, self._znodes)

    @property
    def entries(self) -> ZooKeeperEntries:
        """Small shared entries, in the same session."""
        return self._entries

    def register(self, info: NodeInfo) -> Registration:
        """Announce a storage node; see `Coordinator`."""
        return register(self._session, self._keeper, znodes=self._znodes, info=info)

    def nodes(self) -> tuple[NodeInfo, ...]:
        """Return the live storage nodes, sorted by name."""
        return live_nodes(self._session, self._znodes)

    def claim(self, run: str, owner: str, *, wait_seconds: float = 0.0, takeover: bool = False) -> RunClaim:
        """Own a run; see `Coordinator`."""
        return claim(
            self._session,
            self._keeper,
            znodes=self._znodes,
            run=run,
            owner=owner,
            wait_seconds=wait_seconds,
            takeover=takeover,
        )

    def owner(self, run: str) -> str | None:
        """Return who owns a run now; see `Coordinator`."""
        return present_owner(self._session, self._znodes, check_name(run, "run"))

    def runs(self) -> tuple[str, ...]:
        """Return the names of all runs."""
        deadline = self._session.deadline()
        self._session.sync(self._znodes.runs, deadline=deadline)
        return tuple(self._session.children(self._znodes.runs, deadline=deadline) or ())

    def commit(self, record: CommitRecord, claim: RunClaim) -> CommitRecord:
        """Publish a generation; see `Coordinator`."""
        if not isinstance(claim, ZooKeeperClaim):
            raise ConfigError(f"the claim was not made by a ZooKeeper coordinator: {type(claim).__name__}")
        return commit(self._session, self._znodes, record=record, claim=claim)

    def abort(self, run: str, generation: int, *, token: str, reason: str) -> Decision:
        """Decide that a generation will not be committed; see `Coordinator`."""
        return abort(self._session, self._znodes, run=run, generation=generation, token=token, reason=reason)

    def newest_decided(self, run: str) -> int:
        """Return the greatest generation that was committed or aborted, 0 if there is none."""
        return newest_decided(self._session, self._znodes, check_name(run, "run"))

    def mark_persisted(self, run: str, generation: int, token: str) -> None:
        """Note that the object tier has a generation; see `Coordinator`."""
        mark_persisted(
            self._session, self._znodes, run=check_name(run, "run"), generation=generation, token=token
        )

    def relocate(self, record: CommitRecord, moved: CommitRecord, *, fencing_token: int) -> CommitRecord:
        """Say that other nodes hold the newest generation of a run; see `Coordinator`."""
        return relocate(self._session, self._znodes, record=record, moved=moved, fencing_token=fencing_token)

    def latest(self, run: str) -> CommitRecord | None:
        """Return the newest committed generation of a run, None if there is none."""
        return latest_commit(self._session, self._znodes, check_name(run, "run"))

    def commits(self, run: str) -> tuple[CommitRecord, ...]:
        """Return all committed generations of a run, oldest first."""
        return all_commits(self._session, self._znodes, check_name(run, "run"))

    @property
    def layout_version(self) -> int:
        """Version of the layout under the root; another one would have been refused."""
        return FORMAT_VERSION

    def health(self) -> Health:
        """Say how the connection is; see `Coordinator`."""
        return self._session.health()

    def close(self) -> None:
        """End the session; see `Coordinator`. In a forked child this does nothing."""
        if not self._session.foreign:
            self._keeper.stop()
            self._session.close()
            self._entries.close()
            self._keeper.join(self._session.timeout_seconds)

    def _prepare_root(self) -> None:
        session, znodes = self._session, self._znodes
        deadline = session.deadline()
        for path in (znodes.root, znodes.nodes, znodes.runs, znodes.entries):
            session.ensure(path, deadline=deadline)
        wanted = str(FORMAT_VERSION).encode()
        with contextlib.suppress(NodeExistsError):
            session.repeat(
                f"creating {znodes.format}",
                lambda c: c.create_async(znodes.format, wanted),
                deadline=deadline,
            )
        found = session.read(znodes.format, deadline=deadline)
        if found is None or found.data != wanted:
            raise ConfigError(
                f"ZooKeeper at {session.hosts}: {znodes.root} has layout version "
                f"{found.data[:20] if found else None!r}, this FastCheck reads {wanted!r}; use the version "
                "that wrote it or name another root"
            )
        if session.access.user:
            self._refuse_open_root(deadline)

    def _refuse_open_root(self, deadline: Deadline) -> None:
        session, root = self._session, self._znodes.root
        names = session.children(root, deadline=deadline) or []
        for path in (root, *(f"{root}/{name}" for name in names)):
            if open_to_all(session.acl(path, deadline=deadline)):
                raise ConfigError(
                    f"ZooKeeper at {session.hosts}: {path} is open to everyone, it was made without "
                    "credentials: end what uses it and run `fastcheck zookeeper protect`, or name another "
                    "root"
                )
