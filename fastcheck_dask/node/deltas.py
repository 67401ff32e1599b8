"""Chunks for the object tier as deltas against a checkpoint that is there already."""

from __future__ import annotations

import logging
import threading

from fastcheck_codecs import CodecError, PrefixIndex, XorDelta, delta_is_smaller

from fastcheck_dask.errors import FastCheckError, TierError
from fastcheck_dask.tiers.checkpoint_folder import CheckpointFolder
from fastcheck_dask.tiers.commit_marker import BaseLink
from fastcheck_dask.tiers.store import ObjectStore
from fastcheck_dask.tiers.stored_checkpoint import StoredCheckpoint
from fastcheck_dask.tiers.wire import Bits

logger = logging.getLogger(__name__)


def link_from_wire(value: object) -> BaseLink:
    """Read how a message names a base; `TierError` for anything else."""
    try:
        return BaseLink.from_document(value)
    except (KeyError, TypeError, ValueError) as error:
        raise TierError(f"{value!r:.200} does not name a checkpoint ({error})") from error


class Bases:
    """Opens the bases that saves are persisted against. Any thread may call; methods block."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: The last one: all messages of a save name the same.
        self._last: tuple[tuple[str, BaseLink], StoredCheckpoint] | None = None

    def open(self, store: ObjectStore, link: BaseLink) -> StoredCheckpoint | None:
        """Return a base; None, and the log says why, if it cannot be had: then chunks go whole."""
        key = (store.location, link)
        with self._lock:
            if self._last is None or self._last[0] != key:
                folder = CheckpointFolder(store)
                try:
                    marker = folder.marker(link.directory)
                    if marker is None or marker.link != link:
                        raise TierError(f"{link.directory} is gone, or another one")
                    self._last = key, StoredCheckpoint(folder, marker)
                except FastCheckError as error:
                    logger.warning("chunks go whole to %s: %s", store.location, error)
                    return None
            return self._last[1]


def smaller(payload: Bits, dtype: str, *, key: str, base: StoredCheckpoint) -> Bits:
    """Return a whole payload, or in its place the delta against the base if that is smaller.

    Notes
    -----
    Source: FastCheck, "incremental compression". Holds up to three times the raw chunk, and reads the base
    from the object tier.
    """
    if key not in base.manifest.chunks:
        return payload
    try:
        before, _ = base.read(key)
        now = PrefixIndex(dtype=dtype, checksum=False).decode(payload)
        if before.size != now.size or not delta_is_smaller(now, before, dtype=dtype):
            return payload
        delta = XorDelta(base=before, dtype=dtype).encode(now)
    except (FastCheckError, CodecError) as error:
        logger.warning("chunk %s goes whole: %s", key, error)
        return payload
    return delta if delta.nbytes < payload.nbytes else payload
