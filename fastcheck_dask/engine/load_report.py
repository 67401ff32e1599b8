"""Where the bytes of a load came from."""

from __future__ import annotations

from dataclasses import dataclass, field

from fastcheck_dask.layout.notes import OlderGroup


@dataclass
class LoadReport:
    """Where the bytes of a load came from."""

    generation: int
    tag: str
    #: Raw bytes by source: ``"local"``, ``"peers"``, ``"parity"``, ``"object"``, and ``"derived"`` for what
    #: was made here of other chunks.
    raw_bytes: dict[str, int] = field(default_factory=dict)
    #: Encoded bytes that came over the network or from the object tier.
    received_bytes: int = 0
    #: Chunks that were lost or damaged and came from a slower source, each with the reason.
    rebuilt: list[str] = field(default_factory=list)
    #: Newer generations that could not be had, each with the reason.
    skipped: list[str] = field(default_factory=list)
    #: Groups of the state that are of an older step than the rest, by their names.
    older: dict[str, OlderGroup] = field(default_factory=dict)
    #: Objects beside the chunks that are not as they were saved: the state did not need them, other readers
    #: do. Each with what is wrong, and whether it was written anew.
    damaged: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def source(self) -> str:
        """The sources that gave anything, joined by ``+``; ``"inline"`` if the manifest held everything."""
        order = ("local", "peers", "parity", "object")
        return "+".join(s for s in order if self.raw_bytes.get(s)) or "inline"

    def count(self, source: str, nbytes: int) -> None:
        """Note that a source gave raw bytes."""
        self.raw_bytes[source] = self.raw_bytes.get(source, 0) + nbytes
