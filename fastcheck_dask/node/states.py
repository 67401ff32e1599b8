"""A storage node's part in the states: it stands for election, and publishes what it is and holds."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, Final

from fastcheck_dask.clock import Deadline
from fastcheck_dask.coordination.election import Election, Service
from fastcheck_dask.coordination.entries import Entries
from fastcheck_dask.coordination.services import together
from fastcheck_dask.coordination.states import NodeState, StateMaster, StateUpdater
from fastcheck_dask.coordination.states.master import Operations
from fastcheck_dask.coordination.states.value import RUN_LIMIT
from fastcheck_dask.errors import ClosedError, CoordinationError
from fastcheck_dask.node.master_link import WireLink
from fastcheck_dask.tiers.peer import PeerClient

#: How often the node looks whether there is something new to publish,
LOOK_SECONDS: Final = 1.0
#: and how long one attempt may take before it looks again.
_PUBLISH_SECONDS: Final = 10.0
#: How long a node that ends waits until everybody knows.
_DRAIN_SECONDS: Final = 0.5
#: Used bytes are told in so many steps: a state that changed all the time would say no more.
_STEPS: Final = 16

logger = logging.getLogger(__name__)


class NodeStates:
    """Publishes the state of a node, and serves those of all while it leads.

    Nothing here is needed to save or load: when there is no master or no coordinator, it goes on trying.

    Parameters
    ----------
    name : str
        Of the node.
    entries : Entries
        The session with which its state goes.
    status : callable
        Returns what the store holds: ``used_bytes``, ``limit_bytes``, and ``runs`` as `ShardStore.status`.
    stand : bool
        Whether the node stands for election.
    service : callable, optional
        What else the node does while it leads.
    client : callable
        Opens a node by name and address.
    """

    def __init__(
        self,
        name: str,
        entries: Entries,
        status: Callable[[], dict[str, Any]],
        *,
        stand: bool = True,
        service: Service | None = None,
        client: Callable[[str, str], PeerClient] = PeerClient,
    ) -> None:
        self._name, self._entries, self._status = name, entries, status
        self._stand = stand
        self._master = StateMaster(name, entries)
        self._service = self._master.serve if service is None else together(self._master.serve, service)
        self._updater = StateUpdater(name, entries, link=WireLink(entries, client))
        self._election: Election | None = None
        self._draining = False
        self._closing = threading.Event()
        self._drained = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fastcheck-states", daemon=True)

    @property
    def leads(self) -> bool:
        """Whether this node is the master, as far as it knows."""
        election = self._election
        return election is not None and election.leadership is not None

    @property
    def operations(self) -> Operations:
        """What the data port has to serve."""
        return self._master.operations

    def start(self, address: str) -> None:
        """Begin to stand and to publish; `address` is that of the data port."""
        if self._stand:
            self._election = Election(self._entries, self._name, self._service, address=address)
            self._election.start()
        self._thread.start()

    def drain(self) -> None:
        """Publish that nothing new shall come here. Waits for that, for half a second at most."""
        if self._thread.is_alive():
            self._draining = True
            self._wake.set()
            self._drained.wait(_DRAIN_SECONDS)

    def close(self) -> None:
        """End all of it; the state goes with the session. Idempotent."""
        self._closing.set()
        self._wake.set()
        if self._election is not None:
            self._election.close()
        if self._thread.is_alive():
            self._thread.join(_DRAIN_SECONDS)

    def _run(self) -> None:
        reported = ""
        while not self._closing.is_set():
            self._wake.clear()
            try:
                self._publish()
                reported = ""
            except ClosedError:
                break
            except CoordinationError as error:
                if str(error) != reported:
                    logger.warning("node %s cannot publish its state: %s", self._name, error)
                    reported = str(error)
            self._wake.wait(LOOK_SECONDS)

    def _publish(self) -> None:
        draining = self._draining
        state = node_state(self._status(), draining=draining)
        if self._updater.needs(state):
            deadline = Deadline.after(_PUBLISH_SECONDS)
            self._updater.update(state, deadline=deadline, stopping=self._closing)
        if draining:
            self._drained.set()


def node_state(status: dict[str, Any], *, draining: bool) -> NodeState:
    """Return what is published of a node; coarse, so that it does not change all the time."""
    limit = status["limit_bytes"]
    step = max(1, limit // _STEPS)
    committed = {run: found[0] for run, found in sorted(status["runs"].items()) if found is not None}
    return NodeState(
        state="draining" if draining else "available",
        used_bytes=min(limit, -(-status["used_bytes"] // step) * step),
        limit_bytes=limit,
        generations=dict(list(committed.items())[:RUN_LIMIT]),
        runs=len(status["runs"]),
    )
