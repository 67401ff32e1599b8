"""Every error that FastCheck raises: a class for each thing that a handler would do differently.

Arguments go to ``Exception.__init__`` as they are, so an error survives pickling by Dask and the
trip from the agent to the training process (see :func:`to_wire` and :func:`from_wire`).
"""

from __future__ import annotations

from typing import ClassVar

#: Causes that the text of an `UnrecoverableError` names; all are in its `causes`.
_SHOWN_CAUSES = 8
#: And of each at most so much: a cause may itself be such an error.
_CAUSE_CHARACTERS = 300


class FastCheckError(Exception):
    """Root of the tree; `retryable` says whether the same call may succeed later, unchanged."""

    retryable: ClassVar[bool] = False


class _MessageError(FastCheckError):
    """An error made of a message and nothing else."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def __str__(self) -> str:
        return self.message


class ConfigError(_MessageError, ValueError):
    """A setting or an argument is wrong; the message says which, what was wanted and what came."""


class LayoutError(_MessageError, ValueError):
    """The state, or what was asked of it, does not fit what is stored."""


class UnsupportedLeafError(FastCheckError, TypeError):
    """A value in the state cannot be stored so that it comes back without running code."""

    def __init__(self, path: str, got: str, advice: str) -> None:
        super().__init__(path, got, advice)
        self.path, self.got, self.advice = path, got, advice

    def __str__(self) -> str:
        return f"state at {self.path or 'its root'}: cannot store {self.got}; {self.advice}"


class CorruptDataError(_MessageError):
    """Stored bytes are damaged; they can be rebuilt from parity or another tier."""


class ShardCorruptError(CorruptDataError):
    """One chunk failed its checksum."""

    def __init__(self, chunk: str, where: str, want: str, got: str) -> None:
        FastCheckError.__init__(self, chunk, where, want, got)
        self.chunk, self.where, self.want, self.got = chunk, where, want, got

    def __str__(self) -> str:
        return (
            f"chunk {self.chunk} from {self.where}: checksum {self.got}, expected {self.want}; "
            "it has to be rebuilt from parity or read from the object tier"
        )


class UnknownFormatError(CorruptDataError):
    """Written by a newer version, or not by FastCheck at all."""


class ShardUnavailableError(_MessageError, LookupError):
    """One source does not have what was asked; try the next one."""

    retryable = True


class CheckpointNotFoundError(ShardUnavailableError):
    """No committed checkpoint has that tag."""

    retryable = False


class UnrecoverableError(FastCheckError, LookupError):
    """A committed checkpoint exists, and no source could give all of it."""

    def __init__(self, what: str, causes: tuple[str, ...]) -> None:
        super().__init__(what, tuple(causes))
        self.what, self.causes = what, tuple(causes)

    def __str__(self) -> str:
        shown = "; ".join(_shortened(cause) for cause in self.causes[:_SHOWN_CAUSES]) or "nothing"
        left = len(self.causes) - _SHOWN_CAUSES
        more = f"; and {left} more (see the debug log)" if left > 0 else ""
        return f"{self.what} cannot be recovered. Looked at: {shown}{more}"


def _shortened(cause: str) -> str:
    return cause if len(cause) <= _CAUSE_CHARACTERS else f"{cause[:_CAUSE_CHARACTERS]}..."


class TierError(_MessageError):
    """A tier could not do what was asked; back off or fail over."""

    retryable = True


class TierFullError(TierError):
    """Not enough room."""

    retryable = False

    def __init__(self, where: str, wanted_bytes: int, free_bytes: int, advice: str) -> None:
        FastCheckError.__init__(self, where, wanted_bytes, free_bytes, advice)
        self.where, self.wanted_bytes, self.free_bytes, self.advice = where, wanted_bytes, free_bytes, advice

    def __str__(self) -> str:
        return (
            f"{self.where} is too small: {self.wanted_bytes:,} bytes are needed and "
            f"{self.free_bytes:,} are free; {self.advice}"
        )


class NodeFullError(TierFullError):
    """A storage node has no room; another one may."""

    def __init__(self, node: str, wanted_bytes: int, free_bytes: int) -> None:
        FastCheckError.__init__(self, node, wanted_bytes, free_bytes)
        self.node = node
        self.where, self.wanted_bytes, self.free_bytes = f"storage node {node}", wanted_bytes, free_bytes
        self.advice = "start storage nodes with more memory (--memory), or more of them"


class RootAwayError(TierError):
    """Another location that a checkpoint needs cannot be reached; nothing may be stored in its place."""


class TierTimeoutError(TierError, TimeoutError):
    """No answer in time."""


class NodeUnavailableError(TierError):
    """A storage node does not answer; the save or load goes on with the others."""

    def __init__(self, node: str, why: str) -> None:
        FastCheckError.__init__(self, node, why)
        self.node, self.why = node, why

    def __str__(self) -> str:
        return f"storage node {self.node}: {self.why}"


class NodeRefusedError(NodeUnavailableError):
    """A storage node and this process do not let each other in: one has no TLS, or a wrong certificate."""

    retryable = False


class StaleBaseError(TierError):
    """A node refuses a delta because it does not hold its base; send the chunks whole."""


class TooFewNodesError(TierError):
    """Fewer storage nodes are alive than the shards need."""

    def __init__(self, wanted: int, alive: int, advice: str) -> None:
        FastCheckError.__init__(self, wanted, alive, advice)
        self.wanted, self.alive, self.advice = wanted, alive, advice

    def __str__(self) -> str:
        return f"{self.wanted} storage nodes are needed and {self.alive} are alive; {self.advice}"


class SaveFailedError(TierError):
    """A save did not become visible; the checkpoint before it is still in force."""


class SaveBusyError(TierError):
    """Both slots are in use by earlier saves and `on_busy` is ``"raise"`` (or the save was skipped)."""


class CoordinationError(_MessageError):
    """The coordinator cannot be asked or refused; do not write."""

    retryable = True


class SessionLostError(CoordinationError):
    """The session with the coordinator is over; what was ephemeral is gone."""


class FencedError(CoordinationError):
    """A newer owner exists; stop."""

    retryable = False


class NoMasterError(CoordinationError):
    """Nobody leads, or who was asked does not; ask whom the coordinator names now."""

    def __init__(self, asked: str, master: str, address: str) -> None:
        FastCheckError.__init__(self, asked, master, address)
        self.asked, self.master, self.address = asked, master, address
        self.message = str(self)

    def __str__(self) -> str:
        known = (
            f"it is {self.master} at {self.address or 'an unknown address'}" if self.master else "nobody is"
        )
        return f"{self.asked} is not the master, {known} as far as it knows; ask again"


class RunInUseError(CoordinationError):
    """Another live process owns this run."""

    retryable = False


class CommitConflictError(CoordinationError):
    """The generation was decided already, by somebody else."""

    retryable = False


class ClosedError(_MessageError, RuntimeError):
    """The object was closed, or belongs to the process that forked this one."""


def _all_classes(root: type[FastCheckError]) -> dict[str, type[FastCheckError]]:
    found = {root.__name__: root}
    for child in root.__subclasses__():
        found |= _all_classes(child)
    return found


def to_wire(error: BaseException) -> list[object]:
    """Turn an error into plain values; foreign errors become a `TierError` that names them."""
    if isinstance(error, FastCheckError):
        return [type(error).__name__, *(list(a) if isinstance(a, tuple) else a for a in error.args)]
    return ["TierError", f"{type(error).__name__}: {error}"]


def from_wire(values: list[object]) -> FastCheckError:
    """Undo :func:`to_wire`; a class that this version does not know becomes a `TierError`.

    Raises
    ------
    ValueError
        If the arguments do not fit the class: the sender is damaged or not ours.
    """
    name, *arguments = values
    found = _all_classes(FastCheckError).get(str(name))
    if found is None or found.__name__.startswith("_"):
        return TierError(f"{name}: {arguments}")
    try:
        error = found(*(tuple(a) if isinstance(a, list) else a for a in arguments))
        # Arguments of a wrong type show only here; an error that cannot be printed hides what went wrong.
        str(error)
    except (TypeError, ValueError) as misfit:
        raise ValueError(f"{name} cannot have the arguments {arguments}") from misfit
    return error
