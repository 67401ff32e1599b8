"""PrefixIndex: floats whose exponents lie close together, and byte planes for everything else."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

from numcodecs.abc import Codec

from fastcheck_codecs import payload
from fastcheck_codecs.bitops import Bytes, as_bytes
from fastcheck_codecs.errors import CodecError
from fastcheck_codecs.header import Block, CodecId
from fastcheck_codecs.prefixes import put_index, put_table


class PrefixIndex(Codec):  # type: ignore[misc]
    """Self-contained payloads of floats, with an index in the place of their prefix.

    Parameters
    ----------
    prefix_bits : "auto" or int
        ``"auto"``: the exponent becomes its distance below a reference for its neighbourhood, nearly
        always of 4 bits. 7 to 16: the first so many bits become an index into the table of those that
        occur.
    dtype : str, optional
        True dtype of the data, for those that numpy lacks (``"bfloat16"`` held as uint16). By default
        that of the array given to `encode`; bytes otherwise.
    checksum : bool
        Compare the crc32c of what was decoded. Checksums are always written.

    Notes
    -----
    Source: FastCheck, "prefix index". Applies to float16, bfloat16, float32, float64 and complex
    numbers of them; every other dtype is stored as byte planes. A codec has no mutable state: threads
    may share one. Each thread that uses it keeps up to 25 MiB of work space.

    Examples
    --------
    >>> import numpy as np
    >>> payload = PrefixIndex().encode(np.linspace(0, 1, 5, dtype=np.float32))
    >>> PrefixIndex().decode(payload).view(np.float32)
    array([0.  , 0.25, 0.5 , 0.75, 1.  ], dtype=float32)
    """

    codec_id: ClassVar[str] = "fastcheck.prefix_index"

    def __init__(
        self, prefix_bits: str | int = "auto", dtype: str | None = None, checksum: bool = True
    ) -> None:
        if prefix_bits != "auto" and (not isinstance(prefix_bits, int) or not 7 <= prefix_bits <= 16):
            raise CodecError(f"prefix_bits is 'auto' or 7 to 16, not {prefix_bits!r}")
        self.prefix_bits = prefix_bits
        self.dtype = dtype
        self._checksum = checksum

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
            If memory is not contiguous.
        """
        return payload.encode(as_bytes(buf), self._plan(buf))

    def encode_into(self, buf: Any, out: Any) -> int:
        """Encode into the start of `out`, of at least ``max_encoded_nbytes``; return the bytes used."""
        return payload.encode_into(as_bytes(buf), self._plan(buf), out=as_bytes(out))

    def decode(self, buf: Any, out: Any = None) -> Any:
        """Decode a full payload of either codec.

        Parameters
        ----------
        buf : buffer
            A payload.
        out : buffer, optional
            Writable, contiguous, of exactly the raw size, not overlapping the payload. Its contents
            are unspecified after an error.

        Returns
        -------
        buffer
            `out`, or a fresh ndarray of uint8, shape (raw size,).

        Raises
        ------
        CodecError
            If the payload is damaged, or is a delta.
        """
        return payload.decode(buf, out=out, base=None, verify=self._checksum)

    def get_config(self) -> dict[str, Any]:
        """Give what `numcodecs.get_codec` needs to build this codec."""
        return {"id": self.codec_id, "prefix_bits": self.prefix_bits, "dtype": self.dtype}

    def _plan(self, buf: Any) -> payload.Plan:
        word_type = payload.word_type_of(buf, self.dtype)
        plan = partial(payload.Plan, codec=CodecId.PREFIX_INDEX, word_type=word_type)
        if not word_type.exponent_bits:
            return plan()
        if isinstance(self.prefix_bits, int):
            coder = partial(put_table, prefix_bits=self.prefix_bits)
            return plan(coder=coder, block=Block.TABLE, prefix_bits=self.prefix_bits)
        coder = partial(put_index, exponent_bits=word_type.exponent_bits)
        return plan(coder=coder, block=Block.INDEX)
