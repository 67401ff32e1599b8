"""XorDelta: what changed since a base, as the XOR or the difference of the bits."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from numcodecs.abc import Codec

from fastcheck_codecs import payload
from fastcheck_codecs.bitops import Bytes, Words, as_bytes, balance
from fastcheck_codecs.errors import CodecError
from fastcheck_codecs.header import CodecId, Residual
from fastcheck_codecs.planes import Traits, collisions, histogram, pick, traits_of

RESIDUALS = ("auto", "xor", "difference")

#: Share of the bits that XOR has to win by: on training state it seldom does, and then by little.
_MARGIN = 0.002


class XorDelta(Codec):  # type: ignore[misc]
    """Residual of the bits against a base, in byte planes.

    Parameters
    ----------
    base : buffer, optional
        Bits of the previous generation: any dtype, contiguous, as many bytes as the data. It is kept
        by reference, never copied, never part of the configuration. Without it payloads are full.
    base_id : str or int, optional
        A name for the base, for information only.
    residual : {"auto", "xor", "difference"}
        ``"auto"`` chooses for each block from a sample; ``"xor"`` and ``"difference"`` are kept to.
    dtype : str, optional
        True dtype of the data, for those that numpy lacks (``"bfloat16"`` held as uint16). By default
        that of the array given to `encode`; bytes otherwise.
    checksum : bool
        Compare the crc32c of what was decoded, which proves the base as well. Without it the crc32c of the
        base is compared. Checksums are always written.

    Notes
    -----
    Source: FastCheck, "incremental compression". A codec has no mutable state: threads may share one.
    Each thread that uses it keeps up to 25 MiB of work space.

    Examples
    --------
    >>> base = np.zeros(1000, np.float32)
    >>> delta = XorDelta(base=base).encode(np.ones(1000, np.float32))
    >>> XorDelta(base=base).decode(delta).view(np.float32)[:2]
    array([1., 1.], dtype=float32)
    >>> XorDelta().decode(delta)
    Traceback (most recent call last):
        ...
    fastcheck_codecs.errors.CodecError: this payload is a delta, and no base was given
    """

    codec_id: ClassVar[str] = "fastcheck.xor_delta"

    def __init__(
        self,
        base: Any = None,
        base_id: str | int | None = None,
        residual: str = "auto",
        dtype: str | None = None,
        checksum: bool = True,
    ) -> None:
        if residual not in RESIDUALS:
            raise CodecError(f"residual is one of {', '.join(RESIDUALS)}, not {residual!r}")
        self.base_id = base_id
        self.residual = residual
        self.dtype = dtype
        self._checksum = checksum
        self._base = None if base is None else as_bytes(base)

    def encode(self, buf: Any) -> Bytes:
        """Encode a contiguous buffer; it is neither changed nor aliased.

        Parameters
        ----------
        buf : buffer
            Array of any shape and dtype, or bytes.

        Returns
        -------
        ndarray of uint8, shape (n,)
            The payload, in memory of its own; n is at most ``max_encoded_nbytes``.

        Raises
        ------
        CodecError
            If the size differs from that of the base, or memory is not contiguous.
        """
        return payload.encode(as_bytes(buf), self._plan(buf))

    def encode_into(self, buf: Any, out: Any) -> int:
        """Encode into the start of `out`, of at least ``max_encoded_nbytes``; return the bytes used."""
        return payload.encode_into(as_bytes(buf), self._plan(buf), out=as_bytes(out))

    def decode(self, buf: Any, out: Any = None) -> Any:
        """Decode a delta against the base, or a full payload of either codec.

        Parameters
        ----------
        buf : buffer
            A payload.
        out : buffer, optional
            Writable, contiguous, of exactly the raw size, not overlapping payload or base. Its
            contents are unspecified after an error.

        Returns
        -------
        buffer
            `out`, or a fresh ndarray of uint8, shape (raw size,).

        Raises
        ------
        CodecError
            If the payload is damaged, or is a delta and the base is missing or another one.
        """
        return payload.decode(buf, out=out, base=self._base, verify=self._checksum)

    def undo(self, buf: Any, current: Any) -> Bytes:
        """Take a delta back: return the bits that it was made against.

        The codec's own base is not needed. With ``checksum=False`` the caller has to verify the result.

        Parameters
        ----------
        buf : buffer
            A delta.
        current : buffer
            Contiguous; the bits that the delta decodes to.

        Returns
        -------
        ndarray of uint8, shape (raw size,)
            In memory of its own.

        Raises
        ------
        CodecError
            If the payload is damaged or is no delta, or `current` is not what it decodes to.

        Examples
        --------
        >>> before, after = np.zeros(3, np.float32), np.ones(3, np.float32)
        >>> XorDelta().undo(XorDelta(base=before).encode(after), after).view(np.float32)
        array([0., 0., 0.], dtype=float32)
        """
        return payload.undo(buf, current=as_bytes(current), verify=self._checksum)

    def get_config(self) -> dict[str, Any]:
        """Give what `numcodecs.get_codec` needs to build this codec, without its base."""
        return {"id": self.codec_id, "base_id": self.base_id, "residual": self.residual, "dtype": self.dtype}

    def _plan(self, buf: Any) -> payload.Plan:
        return payload.Plan(
            codec=CodecId.XOR_DELTA,
            word_type=payload.word_type_of(buf, self.dtype),
            base=self._base,
            choose=self._choose,
        )

    def _choose(self, words: Words, base: Words) -> tuple[Residual, list[Traits] | None]:
        if self.residual != "auto":
            return Residual[self.residual.upper()], None
        current, previous = pick(words), pick(base)
        xor = current ^ previous
        if not xor.any():
            return Residual.XOR, None
        difference = current - previous
        balance(difference)
        xors, differences, count = histogram(xor), histogram(difference), xor.size
        if bits(xors, count) < (1 - _MARGIN) * bits(differences, count):
            return Residual.XOR, traits_of(xors, count)
        return Residual.DIFFERENCE, traits_of(differences, count)


def bits(counts: npt.NDArray[np.float64], count: int) -> float:
    """Estimate the bits per word that byte planes need, from the chance of equal bytes.

    Parameters
    ----------
    counts : ndarray of float64, shape (planes, 256)
        Histogram of a sample.
    count : int
        Words in the sample.
    """
    chances = collisions(counts, count)
    return -math.log2(np.maximum(chances, 1 / 256).prod())
