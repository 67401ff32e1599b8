"""The chunks of one checkpoint in the object tier, whether they lie there whole or against another one."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import xxhash
from fastcheck_codecs import CodecError, PrefixIndex, RawRoom, XorDelta, is_delta

from fastcheck_dask.errors import CorruptDataError, RootAwayError, ShardCorruptError, TierError
from fastcheck_dask.ids import joined
from fastcheck_dask.layout.dtypes import codec_dtype
from fastcheck_dask.layout.manifest import Manifest
from fastcheck_dask.layout.sharing import keys_apart, left_to
from fastcheck_dask.tiers.checkpoint_folder import CheckpointFolder
from fastcheck_dask.tiers.commit_marker import BaseLink, CommitMarker

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
    location : str, optional
        That of `folder`, if it was come to from another location.

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
        self,
        folder: CheckpointFolder,
        marker: CommitMarker,
        manifest: Manifest | None = None,
        *,
        location: str | None = None,
    ) -> None:
        self.marker = marker
        self.manifest = folder.load_manifest(marker) if manifest is None else manifest
        self._folder, self._location = folder, location
        self._others: tuple[StoredCheckpoint, ...] | None = None
        #: Why they could not be opened: who reads chunk by chunk shall not wait for it each time.
        self._away: str | None = None
        self._opening = threading.Lock()

    @property
    def others(self) -> tuple[StoredCheckpoint, ...]:
        """The checkpoints that it needs, its base first; none if it is whole.

        Raises
        ------
        ShardUnavailableError, CorruptDataError
            If one is gone or damaged: the message names it.
        RootAwayError
            If one lies in another location, which does not answer.
        """
        with self._opening:
            if self._away is not None:
                raise RootAwayError(self._away)
            if self._others is None:
                try:
                    self._others = tuple(map(self._needed, self.marker.needs.links))
                except RootAwayError as error:
                    self._away = str(error)
                    raise
            return self._others

    def _needed(self, link: BaseLink) -> StoredCheckpoint:
        if None not in (self._location, link.location):
            # Only the checkpoints of a run refer to other locations; two of them could refer to each other.
            raise CorruptDataError(f"{self.link.place}, of another location, needs {link.place} of a third")
        return self.linked(self._folder, link, by=self.marker.called, location=self._location)

    @classmethod
    def linked(
        cls, folder: CheckpointFolder, link: BaseLink, *, by: str, location: str | None = None
    ) -> StoredCheckpoint:
        """Open a checkpoint that another one needs; raises as `others` does.

        Parameters
        ----------
        folder : CheckpointFolder
            Where the other one lies.
        link : BaseLink
            Of the checkpoint.
        by : str
            The other one, for messages.
        location : str, optional
            That of `folder`, if it was come to from another location.
        """
        there, marker = folder.linked(link, by=by)
        location = location if link.location is None else link.location
        try:
            return cls(there, marker, location=location)
        except TierError as error:
            if location is None:
                raise
            raise RootAwayError(f"{link.place} cannot be read: {error}") from error

    @property
    def link(self) -> BaseLink:
        """How another checkpoint names this one, from where it was come to."""
        return replace(self.marker.link, location=self._location)

    @property
    def base(self) -> StoredCheckpoint | None:
        """The checkpoint against which its deltas were made; None without one. Raises as `others` does."""
        return self.others[0] if self.marker.base is not None else None

    def open_all(self) -> None:
        """Open everything that it needs, also what is needed by that; raises as `others` does."""
        for other in self.others:
            other.open_all()

    @property
    def own_keys(self) -> list[str]:
        """The chunks that lie in its own directory; raises as `others` does."""
        return keys_apart(self.manifest, [other.manifest for other in self.others])

    def holder_of(self, key: str) -> StoredCheckpoint:
        """Return the checkpoint in whose own directory a chunk lies; raises as `others` does."""
        number = left_to(self.manifest, [other.manifest for other in self.others], key)
        return self if number is None else self.others[number].holder_of(key)

    def place_of(self, key: str) -> str:
        """Return where a chunk lies, relative to the location or in full; raises as `others` does."""
        return self.holder_of(key)._named(key)

    def _named(self, name: str) -> str:
        path = f"{self.marker.directory}/{name}"
        return path if self._location is None else joined(self._location, path)

    @property
    def _where(self) -> str:
        return f"the object tier ({self.link.place})"

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
        if (holder := self.holder_of(key)) is not self:
            return holder.read(key, out=out)
        where = self._where
        try:
            received = self._read_own(key, self.base, out)
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
        if self.holder_of(key) is not self:
            return False
        try:
            return not is_delta(self._folder.read_chunk(self.marker.directory, key))
        except CodecError as error:
            raise ShardCorruptError(key, self._where, self.manifest.digests[key], str(error)) from error

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
