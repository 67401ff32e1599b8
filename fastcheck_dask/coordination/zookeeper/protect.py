"""``fastcheck zookeeper protect``: closes znodes that were made without credentials."""

from __future__ import annotations

from typing import Any

from fastcheck_dask.config import settings
from fastcheck_dask.coordination.access import Access
from fastcheck_dask.coordination.zookeeper.client import Session
from fastcheck_dask.coordination.zookeeper.transport import acl_of
from fastcheck_dask.errors import ConfigError, CoordinationError


def protect(hosts: str, root: str, access: Access | None = None) -> int:
    """Give all znodes under a root, and the root, to our credentials and whom they grant it to.

    Nobody else may be at work there: what somebody without credentials makes meanwhile stays open. May be
    run again, also when it did not come to its end. Without `access` it is what is configured.

    Returns
    -------
    int
        The number of znodes.

    Raises
    ------
    ConfigError
        If there are no credentials.
    CoordinationError
        If there is nothing under the root, or ZooKeeper refuses or does not answer.
    """
    found = settings()
    access = Access.of(found) if access is None else access
    acl = acl_of(access)
    if acl is None:
        raise ConfigError("there are no credentials to protect it with: give fastcheck.coordinator.auth")
    session = Session(
        hosts,
        timeout_seconds=found.coordinator_seconds,
        session_seconds=found.session_seconds,
        on_change=lambda: None,
        access=access,
    )
    try:
        return _close(session, root, acl)
    finally:
        session.close()


def _close(session: Session, root: str, acl: list[Any]) -> int:
    waiting, count = [root], 0
    while waiting:
        path, deadline = waiting.pop(), session.deadline()
        # Before its children are listed: from then on nobody else makes new ones.
        session.set_acl(path, acl, deadline=deadline)
        names = session.children(path, deadline=deadline)
        if names is not None:
            waiting += [f"{path}/{name}" for name in names]
            count += 1
    if not count:
        raise CoordinationError(f"ZooKeeper at {session.hosts} has no {root}")
    return count
