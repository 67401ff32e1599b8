"""The master of the states: a service of whoever leads, and the operations that it serves."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any, Final

from fastcheck_dask.clock import SYSTEM_CLOCK, Clock
from fastcheck_dask.coordination.election import Leadership, master_of
from fastcheck_dask.coordination.entries import Entries
from fastcheck_dask.coordination.states.bits import Operation, StateBits
from fastcheck_dask.coordination.states.protocol import open_bits, rule_out
from fastcheck_dask.errors import CoordinationError, FencedError, NoMasterError

#: How long an operation may take before it is ruled out: as long may a reader have to wait.
LEASE_SECONDS: Final = 2.0
SWEEP_SECONDS: Final = 0.25

#: Serves one operation: fields of the request, fields of the reply.
Operations = Mapping[str, Callable[[Mapping[str, Any]], Mapping[str, Any]]]

logger = logging.getLogger(__name__)


class StateMaster:
    """Keeps the bits while its node leads; any thread may call.

    Parameters
    ----------
    name : str
        Of the node.
    entries : Entries
        Its session, in which it stands for election too.
    lease_seconds, sweep_seconds : float
        How long an operation may take, and how often that is looked at.
    """

    def __init__(
        self,
        name: str,
        entries: Entries,
        *,
        lease_seconds: float = LEASE_SECONDS,
        sweep_seconds: float = SWEEP_SECONDS,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._name, self._entries = name, entries
        self._lease, self._sweep_seconds, self._clock = lease_seconds, sweep_seconds, clock
        #: Of the bits.
        self._lock = threading.Lock()
        self._office: tuple[Leadership, StateBits] | None = None

    @property
    def operations(self) -> Operations:
        """What the data port of the node serves, by the name of the operation.

        None of them blocks, but for one question to the coordinator where the node is not the master:
        `NoMasterError` then says who is.
        """
        return {
            "state_begin": lambda request: self._begin(Operation.from_request(request)),
            "state_end": lambda request: self._end(Operation.from_request(request), request),
            "state_query": lambda _request: self._query(),
        }

    def serve(self, leadership: Leadership) -> None:
        """Serve while the office is held: the service of an `Election`."""
        while not leadership.in_force:
            if not leadership.wait(self._sweep_seconds, "states"):
                return
        bits = leadership.perform(open_bits(leadership.fencing_token, leadership.nonce))
        self._office = leadership, bits
        try:
            while leadership.wait(self._sweep_seconds, "states"):
                if leadership.in_force:
                    self._sweep(leadership, bits)
        finally:
            self._office = None

    def _sweep(self, leadership: Leadership, bits: StateBits) -> None:
        with self._lock:
            expired = bits.expired(self._clock.now())
        for operation in expired:
            logger.info("the state of node %s was being changed for too long", operation.node)
            try:
                version = leadership.perform(rule_out(operation, leadership.fencing_token))
            except FencedError:
                raise
            except CoordinationError as error:
                logger.debug("operation %s is not ruled out yet: %s", operation, error)
                return
            if version is not None:
                with self._lock:
                    bits.ruled_out(operation, version)

    def _begin(self, operation: Operation) -> Mapping[str, Any]:
        bits = self._bits()
        with self._lock:
            return bits.begin(operation, self._clock.now() + self._lease)

    def _end(self, operation: Operation, request: Mapping[str, Any]) -> Mapping[str, Any]:
        fencing_token, version = request.get("fencing_token"), request.get("version")
        if type(fencing_token) is not int or type(version) is not int:
            raise CoordinationError(f"state_end came with {fencing_token!r:.80} and {version!r:.80}")
        bits = self._bits()
        with self._lock:
            return bits.end(operation, fencing_token, version)

    def _query(self) -> Mapping[str, Any]:
        bits = self._bits()
        with self._lock:
            return bits.query()

    def _bits(self) -> StateBits:
        office = self._office
        if office is None or not office[0].in_force:
            raise self._not_master()
        return office[1]

    def _not_master(self) -> NoMasterError:
        try:
            master = master_of(self._entries)
        except CoordinationError:
            master = None
        if master is None or master.name == self._name:
            return NoMasterError(self._name, "", "")
        return NoMasterError(self._name, master.name, master.address)
