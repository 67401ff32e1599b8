"""What is known of a storage node, and where it lies. Pure.

::

    states/<node>            ephemeral: the node's state
    state_versions/<node>    its version grows with each write of the state, and when a late one is ruled out;
                             its value names the write. Never deleted, so a version means one moment for ever
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final

from fastcheck_dask.errors import UnknownFormatError

STATES: Final = "states"
VERSIONS: Final = "state_versions"
STATE_NAMES: Final = ("available", "draining", "unavailable")
#: Runs that are listed at most; an entry is small.
RUN_LIMIT: Final = 64


def state_path(node: str) -> str:
    """Return where a node's state lies."""
    return f"{STATES}/{node}"


def version_path(node: str) -> str:
    """Return the entry that counts the writes of a node's state."""
    return f"{VERSIONS}/{node}"


@dataclass(frozen=True)
class NodeState:
    """The state of a storage node."""

    #: ``available``, ``draining`` (keeps and gives what it has, takes nothing new) or ``unavailable``.
    state: str
    used_bytes: int
    limit_bytes: int
    #: Newest committed generation by run, of the first `RUN_LIMIT` runs.
    generations: Mapping[str, int] = field(default_factory=dict)
    #: How many runs it holds, the listed ones included.
    runs: int = 0

    def to_bytes(self) -> bytes:
        """Return the state as canonical JSON."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> NodeState:
        """Undo :meth:`to_bytes`; fields that this version does not know are dropped.

        Raises
        ------
        UnknownFormatError
            If it is not the state of a node.
        """
        try:
            found: Any = json.loads(data)
            made = cls(**{one.name: found[one.name] for one in fields(cls)})
        except (ValueError, TypeError, KeyError) as error:
            raise UnknownFormatError(f"node state of {len(data)} bytes cannot be read: {error!r}") from error
        numbers = [made.used_bytes, made.limit_bytes, made.runs]
        if not isinstance(made.generations, dict) or made.state not in STATE_NAMES:
            raise UnknownFormatError(f"node state has a field of the wrong type: {made!r:.200}")
        numbers += made.generations.values()
        if not all(type(number) is int for number in numbers):
            raise UnknownFormatError(f"node state has a field of the wrong type: {made!r:.200}")
        return made
