"""Where things lie in ZooKeeper, and how an entry names its author. Pure.

::

    <root>/format                              layout version
    <root>/nodes/<name>                        ephemeral: a storage node
    <root>/runs/<run>/owner                    ephemeral: who owns the run
    <root>/runs/<run>/fence                    its version is the fencing token; holds the last claim
    <root>/runs/<run>/latest                   newest committed generation, decimal; empty before the first
    <root>/runs/<run>/decisions/<generation>   commit record or abort, ten digits
    <root>/entries/<path>                      an entry
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Final

FORMAT_VERSION: Final = 1


@dataclass(frozen=True)
class Znodes:
    """Paths under one root."""

    #: Absolute, without a slash at its end.
    root: str

    @property
    def format(self) -> str:
        """The layout's version."""
        return f"{self.root}/format"

    @property
    def nodes(self) -> str:
        """Parent of the storage nodes."""
        return f"{self.root}/nodes"

    @property
    def runs(self) -> str:
        """Parent of the runs."""
        return f"{self.root}/runs"

    @property
    def entries(self) -> str:
        """Parent of the entries; it is never deleted."""
        return f"{self.root}/entries"

    def node(self, name: str) -> str:
        """Return where a storage node registers."""
        return f"{self.nodes}/{name}"

    def owner(self, run: str) -> str:
        """Return where the owner of a run stands."""
        return f"{self.runs}/{run}/owner"

    def fence(self, run: str) -> str:
        """Return whose version is the fencing token of a run."""
        return f"{self.runs}/{run}/fence"

    def latest(self, run: str) -> str:
        """Return where the newest committed generation stands."""
        return f"{self.runs}/{run}/latest"

    def decisions(self, run: str) -> str:
        """Return the parent of a run's commit records."""
        return f"{self.runs}/{run}/decisions"

    def decision(self, run: str, generation: int) -> str:
        """Return where a generation's commit record lies."""
        return f"{self.decisions(run)}/{generation:010d}"


def sign(token: str, text: str) -> bytes:
    """Return an entry's bytes: what it says, and the token by which its author recognises it.

    >>> signature(sign("t", "x")), signed_text(sign("t", "x"))
    ('t', 'x')
    """
    return json.dumps({"token": token, "text": text}, sort_keys=True).encode()


def signature(data: bytes) -> str:
    """Return the author's token, empty for bytes that :func:`sign` did not make."""
    return _field(data, "token")


def signed_text(data: bytes) -> str:
    """Return what the entry says, empty for bytes that :func:`sign` did not make."""
    return _field(data, "text")


def _field(data: bytes, name: str) -> str:
    try:
        found = json.loads(data)
    except ValueError:
        return ""
    value = found.get(name) if isinstance(found, dict) else None
    return value if isinstance(value, str) else ""
