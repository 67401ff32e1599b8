"""Lossless codecs for checkpoints: XOR delta and prefix index, for numcodecs and zarr."""

from __future__ import annotations

from fastcheck_codecs.bitops import Checksum, checksum
from fastcheck_codecs.choice import delta_is_smaller
from fastcheck_codecs.errors import CodecError
from fastcheck_codecs.header import Summary, is_delta, is_identity, max_encoded_nbytes, raw_nbytes, summary
from fastcheck_codecs.native import kernels
from fastcheck_codecs.payload import encode_raw_into
from fastcheck_codecs.prefix_index import PrefixIndex
from fastcheck_codecs.raw import RawRoom, raw_parts
from fastcheck_codecs.xor_delta import XorDelta

__all__ = [
    "Checksum",
    "CodecError",
    "PrefixIndex",
    "RawRoom",
    "Summary",
    "XorDelta",
    "checksum",
    "delta_is_smaller",
    "encode_raw_into",
    "is_delta",
    "is_identity",
    "kernels",
    "max_encoded_nbytes",
    "raw_nbytes",
    "raw_parts",
    "summary",
]
