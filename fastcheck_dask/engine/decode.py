"""Turn what a node gave back into bits, and believe none of it unverified."""

from __future__ import annotations

from fastcheck_codecs import CodecError, PrefixIndex, checksum

from fastcheck_dask.engine.encode import Bits, digest
from fastcheck_dask.errors import ShardCorruptError
from fastcheck_dask.tiers.descriptors import Descriptor


def decode_verified(descriptor: Descriptor, payload: Bits, target: Bits, *, wanted: str, where: str) -> None:
    """Verify and decode one whole payload into its place.

    Parameters
    ----------
    descriptor : Descriptor
        What came beside the payload.
    payload : ndarray of uint8
    target : ndarray of uint8
        As long as the chunk; receives the bits, and holds anything after an error.
    wanted : str
        The digest that the manifest has for the raw bits.
    where : str
        Who gave it, for the error.

    Raises
    ------
    ShardCorruptError
        If a checksum or the digest is another one, or the payload cannot be decoded.
    """
    key, got = descriptor.key, checksum(payload)
    if got != descriptor.crc32c:
        raise ShardCorruptError(key, where, f"{descriptor.crc32c:#010x}", f"{got:#010x}")
    try:
        # The digest below is the stronger check; the codec's own would read the bits once more.
        PrefixIndex(dtype=descriptor.dtype, checksum=False).decode(payload, out=target)
    except CodecError as error:
        raise ShardCorruptError(key, where, wanted, str(error)) from error
    found = digest(target)
    if found != wanted:
        raise ShardCorruptError(key, where, wanted, found)
