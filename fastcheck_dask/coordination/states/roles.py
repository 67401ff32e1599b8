"""Who changes a state, and who reads them all: the protocol with a real coordinator and a real master."""

from __future__ import annotations

import logging
import threading
import time

from fastcheck_dask.clock import Deadline
from fastcheck_dask.coordination.entries import Entries
from fastcheck_dask.coordination.states.protocol import Known, Written, read, update
from fastcheck_dask.coordination.states.value import NodeState
from fastcheck_dask.coordination.steps import MasterLink, perform
from fastcheck_dask.errors import UnknownFormatError
from fastcheck_dask.ids import check_name

logger = logging.getLogger(__name__)


class StateUpdater:
    """Publishes the state of one node; for one thread.

    Parameters
    ----------
    node : str
        Name of the node. Its state goes with the session of `entries`.
    entries : Entries
        The coordinator's entries.
    link : MasterLink
        The way to the master.
    """

    def __init__(self, node: str, entries: Entries, *, link: MasterLink) -> None:
        self._node = check_name(node, "a storage node")
        self._entries, self._link = entries, link
        self._last: tuple[NodeState, Written] | None = None

    def needs(self, state: NodeState) -> bool:
        """Say whether a state has to be published: it is new, or the last one went with its session."""
        return self._last is None or self._last[0] != state or self._last[1].session != self._entries.session

    def update(
        self, state: NodeState, *, deadline: Deadline | None = None, stopping: threading.Event | None = None
    ) -> int:
        """Publish a state; every read that begins afterwards sees it, or a newer one. Blocks.

        Returns
        -------
        int
            Its version.

        Raises
        ------
        CoordinationError
            If it was not known to be published by the deadline; it may be later.
        """
        self._last = None
        written = perform(
            # Nanoseconds: no number comes twice in a session, also after attempts that were given up.
            update(self._node, state.to_bytes(), time.monotonic_ns()),
            self._entries,
            link=self._link,
            deadline=deadline,
            stopping=stopping,
        )
        self._last = state, written
        return written.version


class StateReader:
    """Reads the states of all nodes; for one thread.

    Parameters
    ----------
    entries : Entries
        The coordinator's entries.
    link : MasterLink
        The way to the master.
    """

    def __init__(self, entries: Entries, *, link: MasterLink) -> None:
        self._entries, self._link = entries, link
        self._known: dict[str, Known] = {}

    def read(self, *, deadline: Deadline | None = None) -> dict[str, NodeState]:
        """Return the states by node; one whose session ended is not there. Blocks.

        No state is older than the last one that was published before the call. What did not change since
        the last call is not read again.

        Raises
        ------
        CoordinationError
            If there was no master, or states were still changing, until the deadline.
        """
        self._known = perform(read(self._known), self._entries, link=self._link, deadline=deadline)
        found = {}
        for name, known in self._known.items():
            try:
                found[name] = NodeState.from_bytes(known.value)
            except UnknownFormatError as error:
                logger.warning("the state of storage node %s is not used: %s", name, error)
        return found
