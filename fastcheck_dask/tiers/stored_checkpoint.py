"""The chunks of one checkpoint in the object tier, whether they lie there whole or against another one."""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt
import xxhash
from fastcheck_codecs import CodecError, PrefixIndex, RawRoom, XorDelta, is_delta

from fastcheck_dask.errors import CorruptDataError, ShardCorruptError
from fastcheck_dask.layout.dtypes import codec_dtype
from fastcheck_dask.layout.manifest import Manifest
from fastcheck_dask.layout.sharing import is_shared, keys_apart
from fastcheck_dask.tiers.checkpoint_folder import CheckpointFolder
from fastcheck_dask.tiers.commit_marker import CommitMarker

Bits = npt.NDArray[np.uint8]


class StoredCheckpoint:
    """Reads chunks of a committed checkpoint, each verified by its digest at every link of the chain.

    Parameters
    ----------
    folder : CheckpointFolder
        Where it lies.
    marker : CommitMarker
        Its marker; names the base.
    manifest : Manifest, optional
        Its manifest, read if it is not given.

    Raises
    ------
    ShardUnavailableError, CorruptDataError
        If there is no intact manifest.

    Notes
    -----
    Methods block; any thread may call them. Manifests of bases are read when they are first needed. A chunk
    that is the last of n deltas takes up to n chunks of memory meanwhile.
    """

    def __init__(
        self, folder: CheckpointFolder, marker: CommitMarker, manifest: Manifest | None = None
    ) -> None:
        self.marker = marker
        self.manifest = folder.load_manifest(marker) if manifest is None else manifest
        self._folder = folder
        self._base: StoredCheckpoint | None = None
        self._opening = threading.Lock()

    @property
    def base(self) -> StoredCheckpoint | None:
        """The checkpoint against which this one is stored; None if it is whole.

        Raises
        ------
        ShardUnavailableError, CorruptDataError
            If it is gone or damaged: the message names it.
        """
        if self.marker.base is None:
            return None
        with self._opening:
            if self._base is None:
                marker = self._folder.base_of(self.marker, self.marker.base)
                self._base = StoredCheckpoint(self._folder, marker)
            return self._base

    @property
    def chain(self) -> list[StoredCheckpoint]:
        """The checkpoint itself, its base, the base of that, and so on down to the whole one."""
        found, at = [self], self.base
        while at is not None:
            found.append(at)
            at = at.base
        return found

    @property
    def own_keys(self) -> list[str]:
        """The chunks that lie in its own directory; raises as `base` does."""
        base = self.base
        return list(self.manifest.chunks) if base is None else keys_apart(self.manifest, base.manifest)

    def place_of(self, key: str) -> str:
        """Return where a chunk lies, relative to the location; raises as `base` does."""
        base = self.base
        if base is not None and is_shared(self.manifest, base.manifest, key):
            return base.place_of(key)
        return f"{self.marker.directory}/{key}"

    def read(self, key: str, *, out: Bits | None = None) -> tuple[Bits, int]:
        """Read one chunk.

        Parameters
        ----------
        key : str
            Its key.
        out : ndarray of uint8, shape (n,), optional
            Receives the raw bits; unspecified after an error.

        Returns
        -------
        bits : ndarray of uint8, shape (n,)
            `out` if it was given.
        received_bytes : int
            Encoded bytes that were read.

        Raises
        ------
        ShardUnavailableError, CorruptDataError
            If it cannot be had; the message names the checkpoint of the chain that is to blame.
        """
        nbytes = self.manifest.sizes[key]
        out = np.empty(nbytes, np.uint8) if out is None else out
        base = self.base
        if base is not None and is_shared(self.manifest, base.manifest, key):
            return base.read(key, out=out)
        where = f"the object tier ({self.marker.directory})"
        try:
            received = self._read_own(key, base, out)
        except CodecError as error:
            raise ShardCorruptError(key, where, self.manifest.digests[key], str(error)) from error
        if (got := xxhash.xxh3_128_hexdigest(out)) != (want := self.manifest.digests[key]):
            raise ShardCorruptError(key, where, want, got)
        return out, received

    def _read_own(self, key: str, base: StoredCheckpoint | None, out: Bits) -> int:
        """Read a chunk that lies in this directory, not verified yet; return how many bytes were read."""
        # What is stored raw is read to where it belongs; anything else is decoded.
        room = RawRoom(out, codec_dtype(self.manifest.chunks[key].dtype))
        payload = self._folder.read_chunk_into(self.marker.directory, key, parts=room.parts)
        if payload is None:
            if room.settle():
                return room.nbytes
            payload = room.payload()
        received = int(payload.nbytes)
        before: Bits | None = None
        if is_delta(payload):
            before, more = self._before(base, key)
            received += more
        self._decode(key, payload, before, out)
        return received

    def is_whole_here(self, key: str) -> bool:
        """Say whether a chunk lies in this checkpoint's own directory and needs no base; not verified."""
        base = self.base
        if base is not None and is_shared(self.manifest, base.manifest, key):
            return False
        try:
            return not is_delta(self._folder.read_chunk(self.marker.directory, key))
        except CodecError as error:
            where = f"the object tier ({self.marker.directory})"
            raise ShardCorruptError(key, where, self.manifest.digests[key], str(error)) from error

    def _before(self, base: StoredCheckpoint | None, key: str) -> tuple[Bits, int]:
        """Return the bits that a delta was made against."""
        if base is None or key not in base.manifest.chunks:
            raise CorruptDataError(
                f"chunk {key} of {self.marker.directory} is a delta, and there is no base that has the chunk"
            )
        return base.read(key)

    def _decode(self, key: str, payload: Bits, before: Bits | None, out: Bits) -> None:
        # The digest is the stronger check; the codec's own would read the bits once more.
        if before is not None:
            XorDelta(base=before, checksum=False).decode(payload, out=out)
        else:
            dtype = codec_dtype(self.manifest.chunks[key].dtype)
            PrefixIndex(dtype=dtype, checksum=False).decode(payload, out=out)
