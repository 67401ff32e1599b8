"""The registry: an ephemeral znode for each storage node."""

from __future__ import annotations

import logging
from typing import Final

from fastcheck_dask.clock import Deadline
from fastcheck_dask.coordination.base import NodeInfo
from fastcheck_dask.coordination.commits import bounded
from fastcheck_dask.coordination.zookeeper.client import Session
from fastcheck_dask.coordination.zookeeper.ephemeral import Ephemeral, Keeper, OccupiedError
from fastcheck_dask.coordination.zookeeper.znodes import Znodes, sign, signed_text
from fastcheck_dask.errors import ClosedError, ConfigError, CoordinationError, UnknownFormatError
from fastcheck_dask.ids import check_name, new_token

logger = logging.getLogger(__name__)

#: The server notices a dead session up to a tick late.
_PATIENCE_SESSIONS: Final = 1.5
_POLL_SECONDS: Final = 0.05


class NodeRegistration:
    """A storage node's znode; it is made again when the session was lost."""

    def __init__(self, session: Session, keeper: Keeper, *, path: str, name: str) -> None:
        self._session, self._name = session, name
        self._token = new_token()
        self._entry = Ephemeral(session, path, self._token)
        self._keeper = keeper
        self._closed = False

    def open(self, info: NodeInfo) -> None:
        """Make the znode, waiting for that of a session which has not ended yet."""
        patience = Deadline.after(_PATIENCE_SESSIONS * self._session.session_seconds)
        self._entry.want(self._bytes(info))
        try:
            self._settle_patiently(patience)
        except BaseException:
            # The write may yet take effect: the keeper removes what should not be there.
            self._entry.want(None)
            raise
        finally:
            self._keeper.add(self._entry)

    def update(self, info: NodeInfo) -> None:
        """Replace what the registry says of the node."""
        self._session.check_usable()
        if self._closed:
            raise ClosedError(f"the registration of storage node {self._name!r} was closed")
        if info.name != self._name:
            raise ConfigError(f"the registration is of storage node {self._name!r}; got {info.name!r}")
        self._entry.want(self._bytes(info))
        self._entry.settle(self._session.deadline())

    def restore(self) -> None:
        """Do nothing: the keeper does it as soon as there is a new session."""

    def close(self) -> None:
        """Leave the registry. Idempotent; when ZooKeeper cannot be reached this raises, and is done later."""
        if self._closed or self._session.closed or self._session.foreign:
            return
        self._closed = True
        self._entry.want(None)
        self._keeper.poke()
        self._entry.settle(self._session.deadline())

    def _settle_patiently(self, patience: Deadline) -> None:
        while True:
            try:
                return self._entry.settle(self._session.deadline())
            except OccupiedError as error:
                if patience.passed or error.session_id == self._session.session_id:
                    raise CoordinationError(
                        f"a live storage node named {self._name!r} is registered at ZooKeeper "
                        f"{self._session.hosts}; give this one another name"
                    ) from error
            self._session.pause(_POLL_SECONDS)

    def _bytes(self, info: NodeInfo) -> bytes:
        data = sign(self._token, info.to_bytes().decode())
        return bounded(data, f"description of storage node {info.name}")


def register(session: Session, keeper: Keeper, *, znodes: Znodes, info: NodeInfo) -> NodeRegistration:
    """Announce a storage node; see `Coordinator.register`."""
    session.check_usable()
    check_name(info.name, "storage node")
    registration = NodeRegistration(session, keeper, path=znodes.node(info.name), name=info.name)
    registration.open(info)
    return registration


def live_nodes(session: Session, znodes: Znodes) -> tuple[NodeInfo, ...]:
    """Return the live storage nodes, sorted by name; an entry that cannot be read is left out."""
    deadline = session.deadline()
    names = session.children(znodes.nodes, deadline=deadline)
    if names is None:
        raise CoordinationError(f"ZooKeeper at {session.hosts} has no {znodes.nodes}: was it emptied?")
    found = []
    for name, znode in zip(names, session.read_many(map(znodes.node, names), deadline=deadline), strict=True):
        if znode is None:
            continue
        try:
            found.append(NodeInfo.from_bytes(signed_text(znode.data).encode()))
        except UnknownFormatError as error:
            logger.warning("storage node %s is not used: %s", name, error)
    return tuple(found)
