"""What FastCheck asks of a coordinator: who is alive, who owns a run, what was committed."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from typing import Literal, Protocol

from fastcheck_dask.coordination.entries import Entries
from fastcheck_dask.errors import UnknownFormatError


@dataclass(frozen=True)
class NodeInfo:
    """One storage node as its registration describes it."""

    name: str
    #: Address of the data port, ``fcs://host:port`` or ``fcss://host:port``.
    address: str
    rack: str
    host: str
    capacity_bytes: int
    state: str = "available"

    def to_bytes(self) -> bytes:
        """Return the description as canonical JSON."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> NodeInfo:
        """Undo :meth:`to_bytes`; fields that this version does not know are dropped."""
        try:
            found = json.loads(data)
            info = cls(**{field.name: found[field.name] for field in fields(cls)})
        except (ValueError, TypeError, KeyError) as error:
            raise UnknownFormatError(
                f"node description of {len(data)} bytes cannot be read: {error!r}"
            ) from error
        texts = (info.name, info.address, info.rack, info.host, info.state)
        if type(info.capacity_bytes) is not int or not all(isinstance(text, str) for text in texts):
            raise UnknownFormatError(f"node description has a field of the wrong type: {info}")
        return info


@dataclass(frozen=True)
class CommitRecord:
    """What makes a generation visible; it names the manifest, which lies in the other tiers."""

    run: str
    generation: int
    tag: str
    #: By which the author recognises its own write when the reply was lost.
    token: str
    #: sha256 of the manifest's bytes, hex.
    manifest_digest: str
    #: Names of the storage nodes by shard index, the parity nodes last; empty without a peer tier.
    nodes: tuple[str, ...]
    #: Data-port addresses in the same order.
    addresses: tuple[str, ...]
    #: Number of data shards; 0 without a peer tier.
    shards: int
    #: Number of parity shards: so many nodes may be lost.
    parity: int
    raw_bytes: int
    created_unix: float
    #: Whether the object tier has it, complete and with its commit marker.
    persisted: bool = False

    def to_bytes(self) -> bytes:
        """Return the record as canonical JSON."""
        # One parity shard is written as those wrote it who knew of no second one.
        parity = self.parity if self.parity > 1 else bool(self.parity)
        document = {**asdict(self), "parity": parity}
        return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> CommitRecord:
        """Undo :meth:`to_bytes`."""
        try:
            fields = json.loads(data)
            fields["nodes"], fields["addresses"] = tuple(fields["nodes"]), tuple(fields["addresses"])
            fields["parity"] = int(fields["parity"])
            return cls(**fields)
        except (ValueError, TypeError, KeyError) as error:
            raise UnknownFormatError(f"commit record of {len(data)} bytes cannot be read: {error}") from error

    def held_by(self, nodes: tuple[str, ...], addresses: tuple[str, ...]) -> CommitRecord:
        """Return the record with other nodes, by shard index."""
        return replace(self, nodes=nodes, addresses=addresses)

    def as_persisted(self) -> CommitRecord:
        """Return the record with `persisted` set."""
        return replace(self, persisted=True)


HealthState = Literal["connected", "suspended", "lost", "closed"]


@dataclass(frozen=True)
class Health:
    """How the connection with the coordinator is, as far as this side knows."""

    #: *suspended*: no contact, and the session may live. *lost*: no contact for longer than the session
    #: lasts, what is ephemeral is gone. Both end by themselves when the coordinator is there again.
    state: HealthState
    #: Since when, by the monotonic clock of this machine, in seconds.
    since_seconds: float
    #: The servers, or the file.
    hosts: str
    session_id: str
    #: Why there is no connection, empty if there is one.
    why: str = ""


@dataclass(frozen=True)
class Abort:
    """The decision that a generation will never be committed."""

    run: str
    generation: int
    #: By which who aborted recognises its own write.
    token: str
    #: Who aborted, and why.
    reason: str

    def to_bytes(self) -> bytes:
        """Return the decision as canonical JSON."""
        return json.dumps({"abort": asdict(self)}, sort_keys=True, separators=(",", ":")).encode()


#: What became of a generation; it is decided once.
Decision = CommitRecord | Abort


def read_decision(data: bytes) -> Decision:
    """Undo `to_bytes` of either decision; raise `UnknownFormatError` if it is none."""
    try:
        found = json.loads(data)
        if isinstance(found, dict) and "abort" in found:
            return Abort(**found["abort"])
    except (ValueError, TypeError) as error:
        raise UnknownFormatError(f"decision of {len(data)} bytes cannot be read: {error}") from error
    return CommitRecord.from_bytes(data)


class Registration(Protocol):
    """A node's place in the registry; it ends with the process that made it, or when closed."""

    def update(self, info: NodeInfo) -> None:
        """Replace what the registry says of the node."""
        ...

    def restore(self) -> None:
        """Stand in the registry again if the session that did is over; to be called now and then.

        Costs the coordinator nothing worth mentioning, however many nodes there are: nobody else is looked
        at, and nothing is written unless it has to be.
        """
        ...

    def close(self) -> None:
        """Leave the registry. Idempotent."""
        ...


class RunClaim(Protocol):
    """Ownership of a run by one live process; at most one exists at a time."""

    run: str
    #: Grows with each claim of the run: a write under an older number is refused with `FencedError`.
    fencing_token: int
    #: The same order for those who cannot ask the coordinator (storage nodes): it also grows over a
    #: coordinator that lost its data and counts anew.
    order: int

    def check(self) -> None:
        """Ask whether the run is still owned; `FencedError` says who claimed it since."""
        ...

    def close(self) -> None:
        """Give the run back. Idempotent."""
        ...


class Coordinator(Protocol):
    """The coordinator.

    Every method blocks for at most the time-out that the implementation was made with, may be called from
    any thread, and raises `CoordinationError` when the coordinator cannot be reached.
    """

    @property
    def entries(self) -> Entries:
        """Small shared entries with versions, in the same session."""
        ...

    def register(self, info: NodeInfo) -> Registration:
        """Announce a storage node. A live node of the same name raises `CoordinationError`."""
        ...

    def nodes(self) -> tuple[NodeInfo, ...]:
        """Return the live storage nodes, sorted by name."""
        ...

    def claim(self, run: str, owner: str, *, wait_seconds: float = 0.0, takeover: bool = False) -> RunClaim:
        """Own a run; `RunInUseError` names the present owner when it is still there after `wait_seconds`.

        With `takeover` the run is claimed at once, whoever owns it: that owner's claim is no longer in force.
        """
        ...

    def owner(self, run: str) -> str | None:
        """Return what the present owner of a run calls itself, None if no live process owns it."""
        ...

    def runs(self) -> tuple[str, ...]:
        """Return the names of all runs that were ever claimed, sorted."""
        ...

    def commit(self, record: CommitRecord, claim: RunClaim) -> CommitRecord:
        """Publish a generation: the decision and ``latest`` in one transaction, first writer wins.

        Committing again with the token that won returns the stored record. `CommitConflictError` when the
        generation was decided with another token, was aborted (it says by whom and why), or is not greater
        than the latest; `FencedError` when the claim is no longer in force. (An author commits the newest
        decided + 1; a coordinator that lost its data may be told of a later one first, because the object
        tier knew it.)
        """
        ...

    def abort(self, run: str, generation: int, *, token: str, reason: str) -> Decision:
        """Decide that a generation will not be committed, unless it is decided already; return what holds.

        For a resolver of a save whose author is gone, or for the author: nobody has to own the run. `reason`
        says who aborts and why.
        """
        ...

    def newest_decided(self, run: str) -> int:
        """Return the greatest generation that was committed or aborted, 0 if there is none."""
        ...

    def mark_persisted(self, run: str, generation: int, token: str) -> None:
        """Note that the object tier has a generation. Idempotent; unknown generations are ignored."""
        ...

    def relocate(self, record: CommitRecord, moved: CommitRecord, *, fencing_token: int) -> CommitRecord:
        """Say that other nodes hold the newest generation of a run; for the master, in one transaction.

        `moved` is `record` with other `nodes` and `addresses`, each of which holds its shard already. Returns
        what is stored then; saying the same again changes nothing. `FencedError` if `fencing_token` is not
        that of the present master. `CommitConflictError` if `record` is not the newest generation any more,
        or others hold it than `record` says: read again.
        """
        ...

    def latest(self, run: str) -> CommitRecord | None:
        """Return the newest committed generation of a run, None if there is none."""
        ...

    def commits(self, run: str) -> tuple[CommitRecord, ...]:
        """Return all committed generations of a run, oldest first."""
        ...

    @property
    def layout_version(self) -> int:
        """Version of the layout in which it keeps what it knows."""
        ...

    def health(self) -> Health:
        """Say how the connection is. Asks nobody and does not block for the answer; raises nothing."""
        ...

    def close(self) -> None:
        """End the session: registrations and claims made through it are over. Idempotent."""
        ...
