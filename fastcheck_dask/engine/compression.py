"""Whether a save is worth compressing: what encoding takes against what it spares the link. No I/O.

Times are kept in seconds for each raw byte, so that a slow save weighs more than a fast one.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from fastcheck_dask.config import Compression

#: A save with fewer raw bytes is over before it says anything about the link, and is compressed.
MEASURED_FROM_BYTES = 64 * 2**20

#: By how much raw has to be faster before saves go raw; they go back as soon as it is not faster at all.
_MARGIN = 1.2
#: How many saves in a row have to say so.
_PATIENCE_RAW = 3
_PATIENCE_COMPRESSED = 2
#: After each return it takes twice as many as before, up to this.
_PATIENCE_LIMIT = 96
#: One save of so many is compressed although raw is faster: what encoding takes depends on the data.
_PROBE_EVERY = 32
#: How much of a mean the newest save makes up.
_WEIGHT = 0.3
#: Seconds for a byte, where a clock saw no time pass.
_SHORTEST = 1e-15


@dataclass
class Meter:
    """What one save encodes and sends, and how long that takes. Belongs to one event loop."""

    raw_bytes: int = 0
    sent_bytes: int = 0
    #: Of the encoder processes, summed.
    encode_seconds: float = 0.0
    #: During which at least one message was on its way.
    link_seconds: float = 0.0
    clock: Callable[[], float] = time.monotonic
    _sending: int = field(default=0, repr=False)
    _since: float = field(default=0.0, repr=False)

    def encoded(self, raw_bytes: int, seconds: float) -> None:
        """Count what was encoded."""
        self.raw_bytes += raw_bytes
        self.encode_seconds += seconds

    @contextlib.contextmanager
    def sending(self, nbytes: int) -> Iterator[None]:
        """Count what is sent inside the block; several may be open at once."""
        if not self._sending:
            self._since = self.clock()
        self._sending += 1
        try:
            yield
            self.sent_bytes += nbytes
        finally:
            self._sending -= 1
            if not self._sending:
                self.link_seconds += self.clock() - self._since

    @property
    def encode_bytes_per_second(self) -> float | None:
        """Raw bytes that one encoder process took in a second; None if nothing was measured."""
        return self.raw_bytes / self.encode_seconds if self.encode_seconds > 0 else None

    @property
    def link_bytes_per_second(self) -> float | None:
        """Bytes that all nodes together took in a second; None if nothing was measured."""
        return self.sent_bytes / self.link_seconds if self.link_seconds > 0 and self.sent_bytes else None


class CompressionPolicy:
    """Decides for one save after the other. Belongs to one event loop.

    Parameters
    ----------
    mode : {"auto", "always", "never"}
        ``"auto"`` goes by what the saves before measured; the others are kept to.
    encoders : int
        Encoder processes that work at once.
    """

    def __init__(self, mode: Compression, encoders: int) -> None:
        self._mode = mode
        self._encoders = encoders
        self._raw = False
        #: Seconds for each raw byte of one encoder process, by whether it compresses.
        self._encode: dict[bool, float] = {}
        #: Seconds for each byte of the link.
        self._link: float | None = None
        self._patience = _PATIENCE_RAW
        self._in_a_row = 0
        self._since_probe = 0

    def compresses(self, raw_bytes: int) -> bool:
        """Say whether a save of so many raw bytes, the next one, shall be compressed."""
        if self._mode != "auto":
            return self._mode == "always"
        return not self._raw or self._since_probe >= _PROBE_EVERY or raw_bytes < MEASURED_FROM_BYTES

    def observe(self, meter: Meter, *, compressed: bool) -> None:
        """Take note of a save that went through."""
        if self._mode != "auto" or meter.raw_bytes < MEASURED_FROM_BYTES:
            return
        encode, link = meter.encode_bytes_per_second, meter.link_bytes_per_second
        if encode is None or link is None:
            return
        self._encode[compressed] = _mean(self._encode.get(compressed), 1 / encode)
        self._link = _mean(self._link, 1 / link)
        self._since_probe = 0 if compressed else self._since_probe + 1
        gain = self._gain(self._link)
        if gain is not None:
            self._decide(gain)

    def _gain(self, link: float) -> float | None:
        """Return how many times as long a compressed save takes when its encoders are the bottleneck."""
        if True not in self._encode:
            return None
        return self._encode[True] / max(self._encode.get(False, 0.0), link * self._encoders, _SHORTEST)

    def _decide(self, gain: float) -> None:
        speaks_against = gain < 1 if self._raw else gain > _MARGIN
        self._in_a_row = self._in_a_row + 1 if speaks_against else 0
        if self._in_a_row < (_PATIENCE_COMPRESSED if self._raw else self._patience):
            return
        if self._raw:
            self._compress_again()
        else:
            self._raw, self._in_a_row, self._since_probe = True, 0, 0

    def _compress_again(self) -> None:
        # A link that is fast only as long as little is sent would have it change to and fro.
        self._patience = min(2 * self._patience, _PATIENCE_LIMIT)
        self._raw, self._in_a_row, self._since_probe = False, 0, 0

    def refuse_raw(self) -> bool:
        """Note that a node has no room for what is not compressed; False if raw is what was asked for."""
        if self._mode == "never":
            return False
        self._patience = _PATIENCE_LIMIT
        self._compress_again()
        return True


def _mean(before: float | None, newest: float) -> float:
    return newest if before is None else before + _WEIGHT * (newest - before)
