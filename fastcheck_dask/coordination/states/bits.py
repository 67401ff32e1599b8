"""The master's bits: which states are being changed, and the version of those that are not. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastcheck_dask.errors import CoordinationError


@dataclass(frozen=True)
class Operation:
    """One attempt to change the state of a node."""

    node: str
    #: In which it was begun.
    session: str
    #: Grows with each attempt of a session.
    number: int

    @property
    def token(self) -> bytes:
        """By which it recognises its write."""
        return f"{self.session}/{self.number}".encode()

    def to_request(self, op: str, **fields: Any) -> dict[str, Any]:
        """Return what to ask the master."""
        return {"op": op, "node": self.node, "session": self.session, "number": self.number, **fields}

    @classmethod
    def from_request(cls, request: Mapping[str, Any]) -> Operation:
        """Undo :meth:`to_request`; `CoordinationError` if a field is wrong."""
        node, session, number = request.get("node"), request.get("session"), request.get("number")
        if not isinstance(node, str) or not isinstance(session, str) or type(number) is not int:
            raise CoordinationError(
                f"node {node!r:.80}, session {session!r:.80}, number {number!r:.80}: not an operation"
            )
        return cls(node, session, number)


class StateBits:
    """Soft state of one master: it begins with zeros, for what was begun under another cannot take effect.

    Not thread-safe.

    Attributes
    ----------
    bits : dict of (node, session) to (Operation, float)
        The operations that were begun and not ended, and until when they may take.
    versions : dict of str to int
        Version of each node's state; of a node without a bit it is the present one.
    """

    def __init__(self, fencing_token: int, versions: Mapping[str, int], *, nonce: str = "") -> None:
        self.fencing_token, self.nonce = fencing_token, nonce
        self.versions = dict(versions)
        self.bits: dict[tuple[str, str], tuple[Operation, float]] = {}

    def begin(self, operation: Operation, until: float) -> dict[str, Any]:
        """Set the bit of an operation; the reply names the fencing token under which it may write.

        A session has one operation at a time, so the next one takes its place; that a former one which may
        still arrive cannot take effect besides, the version sees to. `CoordinationError` for an operation
        that is older than the bit: a message that was repeated on its way.
        """
        present = self.bits.get((operation.node, operation.session))
        if present is not None and present[0].number > operation.number:
            raise CoordinationError(
                f"operation {operation.number} of node {operation.node} is over; begin anew"
            )
        self.bits[operation.node, operation.session] = operation, until
        return {"fencing_token": self.fencing_token}

    def end(self, operation: Operation, fencing_token: int, version: int) -> dict[str, Any]:
        """Clear the bit of this operation, and of no other, and note the version that it wrote."""
        if fencing_token == self.fencing_token:
            self.ruled_out(operation, version)
        return {}

    def query(self) -> dict[str, Any]:
        """Say which nodes are changing their state, and the versions of all."""
        return {
            "fencing_token": self.fencing_token,
            "nonce": self.nonce,
            "versions": dict(self.versions),
            "changing": sorted({node for node, _ in self.bits}),
        }

    def expired(self, now: float) -> list[Operation]:
        """Return the operations that took too long."""
        return [operation for operation, until in self.bits.values() if until <= now]

    def ruled_out(self, operation: Operation, version: int) -> None:
        """Clear the bit of an operation that cannot take effect any more."""
        if self.bits.get((operation.node, operation.session), (None, 0.0))[0] == operation:
            self._clear(operation, version)

    def _clear(self, operation: Operation, version: int) -> None:
        del self.bits[operation.node, operation.session]
        # Versions only grow: who knows a greater one knows better.
        self.versions[operation.node] = max(version, self.versions.get(operation.node, -1))
