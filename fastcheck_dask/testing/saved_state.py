"""A state taken apart and encoded: what a persist has to write."""

from __future__ import annotations

from typing import Any

import numpy as np
from fastcheck_codecs import PrefixIndex

from fastcheck_dask.ids import directory_name
from fastcheck_dask.layout.dtypes import codec_dtype
from fastcheck_dask.layout.leaves import copy_bits
from fastcheck_dask.layout.manifest import Manifest
from fastcheck_dask.layout.state import flatten
from fastcheck_dask.tiers.checkpoint_folder import CheckpointFolder
from fastcheck_dask.tiers.commit_marker import CommitMarker


class SavedState:
    """Chunks of at most 256 bytes, and a manifest in which their digests are none."""

    def __init__(
        self,
        state: Any,
        *,
        generation: int = 1,
        tag: str = "t",
        token: str = "author",  # noqa: S107 (of a save)
    ) -> None:
        self.state = state
        flat = flatten(state, chunk_bytes=256)
        self.payloads, self.bits, digests = {}, {}, {}
        for spec, source in zip(flat.arrays, flat.sources, strict=True):
            bits = np.empty(spec.nbytes, np.uint8)
            copy_bits(source, bits)
            self.bits[spec.path] = bits
            codec = PrefixIndex(dtype=codec_dtype(spec.dtype))
            for chunk in spec.chunks:
                self.payloads[chunk.key] = codec.encode(bits[chunk.offset : chunk.offset + chunk.nbytes])
                digests[chunk.key] = "0" * 8
        self.manifest = Manifest("run", generation, tag, token, 1.5, flat.tree, flat.arrays, digests)
        self.directory = directory_name(generation, tag)

    def persist(self, folder: CheckpointFolder) -> CommitMarker:
        """Do what the engine does, from the start, whatever an earlier attempt left."""
        if folder.marker(self.directory) is None:
            folder.clear_uncommitted(self.directory)
            self.write(folder)
        return folder.publish(self.manifest)

    def write(self, folder: CheckpointFolder) -> None:
        """Write everything but the root group and the marker."""
        for key, payload in self.payloads.items():
            folder.write_chunk(self.directory, key, payload)
        folder.write_metadata(self.manifest)

    def assert_complete(self, folder: CheckpointFolder, marker: CommitMarker) -> None:
        """Raise `AssertionError` unless every bit comes back."""
        manifest = folder.load_manifest(marker)
        assert manifest.to_bytes() == self.manifest.to_bytes()
        codec = PrefixIndex()
        for spec in manifest.arrays:
            got = [codec.decode(folder.read_chunk(marker.directory, chunk.key)) for chunk in spec.chunks]
            assert np.concatenate(got).tobytes() == self.bits[spec.path].tobytes()
