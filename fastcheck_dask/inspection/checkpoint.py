"""A committed checkpoint as a read-only mapping of named arrays that are read when they are looked at."""

from __future__ import annotations

import datetime
import difflib
import html
import logging
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from fastcheck_dask.inspection.chunks import ChunkReader
from fastcheck_dask.inspection.contents import ArrayEntry, entries, plain_values
from fastcheck_dask.inspection.indexing import span
from fastcheck_dask.inspection.location import open_part
from fastcheck_dask.layout.dtypes import TORCH_ONLY, numpy_dtype
from fastcheck_dask.layout.leaves import Bits, require_torch, revive
from fastcheck_dask.layout.manifest import Manifest
from fastcheck_dask.layout.notes import OlderGroup
from fastcheck_dask.tiers.checkpoint_folder import CheckpointFolder, CommitMarker

log = logging.getLogger(__name__)

#: Arrays that a representation names.
_SHOWN = 12


def open_checkpoint(url: str, tag: str | None = None, *, rank: int | None = None) -> Checkpoint:
    """Open a committed checkpoint to read it; nothing but its manifest is read before an array is asked for.

    Parameters
    ----------
    url : str
        A checkpoint directory (folder, ``file://`` or ``s3://``), or the directory of one checkpoint in it
        (``.../00000012-tag``).
    tag : str, optional
        Of the checkpoint, or the name of its directory; by default the newest.
    rank : int, optional
        Whose part is meant, in a location of several ranks.

    Returns
    -------
    Checkpoint
        A mapping of the arrays by their path.

    Raises
    ------
    ConfigError
        If there is no such folder or rank.
    CheckpointNotFoundError
        If no committed checkpoint has the tag; names those that there are.
    CorruptDataError, ShardUnavailableError
        If its manifest is damaged or missing.
    TierError
        If the store does not answer.

    Notes
    -----
    The run may be going on: what is committed does not change. No pickle is read and no code is run.
    """
    folder, _, marker = open_part(url, tag, rank=rank)
    return Checkpoint(folder, folder.load_manifest(marker), marker)


class LazyArray:
    """One array of a checkpoint; its values are read and verified each time they are asked for.

    `array[...]` takes what numpy takes, and reads only the chunks that whole numbers and a slice along the
    leading axes need. Values of dtypes that numpy lacks (bf16, fp8) come as unsigned integers of their width;
    `torch()` gives their own dtype.
    """

    def __init__(self, checkpoint: Checkpoint, entry: ArrayEntry) -> None:
        self._checkpoint, self._entry = checkpoint, entry
        #: Where it stands in the state.
        self.path = entry.path
        #: The true dtype: ``"bfloat16"``, or numpy's spelling (``">f4"``) where there is no common name.
        self.dtype = entry.spec.dtype
        self.shape = entry.shape
        #: Bytes of its elements.
        self.nbytes = entry.nbytes

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=object))

    @property
    def stored_nbytes(self) -> int:
        """Bytes that it takes in the object tier; 0 if it lies in the manifest, or is another's view."""
        return self._checkpoint.stored_nbytes_of(self._entry)

    @property
    def codec(self) -> str:
        """How it is stored: ``prefix_index``, ``raw``, ``inline``, ``delta``; ``shared`` for a view."""
        return self._entry.codec(self.stored_nbytes, is_whole=self._checkpoint.reader.stored is None)

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The dtype of what `numpy` returns."""
        if self.dtype in TORCH_ONLY:
            return np.dtype(f"uint{8 * self._entry.spec.itemsize}")
        return numpy_dtype(self.dtype)

    def numpy(self) -> npt.NDArray[Any]:
        """Return all values as a new array; one that repeats its elements is read-only.

        Raises
        ------
        ShardUnavailableError
            If a chunk is missing.
        ShardCorruptError
            If a chunk is damaged.
        TierError
            If the store does not answer.
        """
        stored = self._bits(0, self._entry.spec.nbytes).view(self.numpy_dtype).reshape(self._entry.spec.shape)
        return np.broadcast_to(stored, self.shape) if self._entry.expanded else stored

    def torch(self) -> Any:
        """Return all values as a tensor on the CPU; raises as `numpy`, and `ConfigError` without torch."""
        require_torch()
        spec = self._entry.spec
        tensor = revive("torch", self._bits(0, spec.nbytes), dtype=self.dtype, shape=spec.shape)
        return tensor.expand(self.shape) if self._entry.expanded else tensor

    def read_bytes(self, span: tuple[int, int]) -> memoryview:
        """Return a range of the bytes of its elements, in C order; it begins and ends between elements."""
        if self._entry.expanded:
            # The whole may be far larger than what is stored.
            first, last = (at // self._entry.spec.itemsize for at in span)
            return self.numpy().flat[first:last].view(np.uint8).data
        return self._bits(*span).data

    def __array__(
        self,
        dtype: npt.DTypeLike | None = None,
        copy: bool | None = None,
    ) -> npt.NDArray[Any]:
        """Return the values for numpy; there is never a memory that could be shared."""
        if copy is False:
            raise ValueError(f"{self.path} is stored: it cannot become an array without a copy")
        found = self.numpy()
        return found if dtype is None else found.astype(dtype)

    def __getitem__(self, key: Any) -> Any:
        if self._entry.expanded or not self.shape:
            return self.numpy()[key]
        wanted = span(self.shape, key)
        width = self._entry.spec.itemsize
        bits = self._bits(wanted.start * width, wanted.stop * width)
        return bits.view(self.numpy_dtype).reshape(wanted.block)[wanted.rest]

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError(f"{self.path} has no axes, and so no length")
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))

    def __bool__(self) -> bool:
        return True

    def _bits(self, start: int, stop: int) -> Bits:
        if self._entry.bits is not None:
            return np.frombuffer(bytearray(self._entry.bits), np.uint8)[start:stop]
        return self._checkpoint.reader.read_range(self._entry.spec, start, stop)

    def __repr__(self) -> str:
        return f"<LazyArray {self.path} {self.dtype} {self.shape}>"


class Checkpoint(Mapping[str, LazyArray]):
    """A committed checkpoint; see :func:`open_checkpoint`. The arrays come in the order of the state."""

    def __init__(
        self, folder: CheckpointFolder, manifest: Manifest, marker: CommitMarker | None = None
    ) -> None:
        self.manifest = manifest
        self.reader = ChunkReader(folder, manifest, marker)
        self._arrays = {entry.path: LazyArray(self, entry) for entry in entries(manifest)}
        if self.older:
            log.warning("%s is a state of several steps: %s", self.tag, older_in_words(self.older))

    @property
    def older(self) -> dict[str, OlderGroup]:
        """Groups of its leaves that are of an older step than the rest, by their names."""
        return dict(self.manifest.notes.older)

    @property
    def tag(self) -> str:
        """The user's name for it."""
        return self.manifest.tag

    @property
    def generation(self) -> int:
        """Its number among the commits of the run."""
        return self.manifest.generation

    @property
    def created_unix(self) -> float:
        """When it was saved, in seconds."""
        return self.manifest.created_unix

    @property
    def elsewhere(self) -> tuple[str, ...]:
        """Where parts of it lie outside of its location: groups at roots of their own."""
        refs = () if self.reader.stored is None else self.reader.stored.marker.refs
        return tuple(link.place for link in refs if link.location is not None)

    @property
    def run(self) -> str:
        """Name of the run."""
        return self.manifest.run

    @cached_property
    def tree(self) -> dict[str, Any]:
        """The plain values of the state by their path: numbers, text and all that is no array."""
        return plain_values(self.manifest)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Bytes of each of its objects, by key; listed once, when they are first asked for."""
        directory = self.reader.directory
        found = self.reader.folder.store.listing(directory)
        return {stored.path.removeprefix(f"{directory}/"): stored.nbytes for stored in found}

    @property
    def nbytes(self) -> int:
        """Raw bytes of all arrays."""
        return sum(array.nbytes for array in self.values() if array._entry.path == array._entry.spec.path)

    @property
    def stored_nbytes(self) -> int:
        """Bytes that it takes in the object tier, without its manifest."""
        return sum(self.sizes.values())

    def stored_nbytes_of(self, entry: ArrayEntry) -> int:
        """Return the bytes of an array's chunks in the object tier."""
        if entry.bits is not None or entry.shared_with is not None:
            return 0
        return sum(self.sizes.get(chunk.key, 0) for chunk in entry.spec.chunks)

    def __getitem__(self, path: str) -> LazyArray:
        try:
            return self._arrays[path]
        except KeyError:
            raise KeyError(
                f"{path!r} is not among the {len(self)} arrays of {self.tag}; {self._nearest(path)}"
            ) from None

    def _nearest(self, path: str) -> str:
        close = difflib.get_close_matches(str(path), self._arrays, n=3)
        return f"did you mean {', '.join(close)}?" if close else f"the first are {', '.join(list(self)[:3])}"

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __repr__(self) -> str:
        head = (
            f"<Checkpoint {self.tag} (generation {self.generation} of {self.run}, "
            f"{_moment(self.created_unix)}), {len(self)} arrays, {self.nbytes:,} bytes"
        )
        if self.older:
            head += f", of several steps: {older_in_words(self.older)}"
        lines = [f"  {a.path}: {a.dtype} {a.shape}" for a in list(self.values())[:_SHOWN]]
        more = [f"  ... and {len(self) - _SHOWN} more"] if len(self) > _SHOWN else []
        return "\n".join([f"{head}:" if lines else head, *lines, *more]) + ">"

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{html.escape(a.path)}</td><td>{html.escape(a.dtype)}</td><td>{a.shape}</td>"
            f"<td style='text-align:right'>{a.nbytes:,}</td></tr>"
            for a in list(self.values())[:_SHOWN]
        )
        more = f"<p>... and {len(self) - _SHOWN} more</p>" if len(self) > _SHOWN else ""
        return (
            f"<p><b>{html.escape(self.tag)}</b>: generation {self.generation} of {html.escape(self.run)}, "
            f"{_moment(self.created_unix)}, {len(self)} arrays, {self.nbytes:,} bytes</p>"
            "<table><thead><tr><th>path</th><th>dtype</th><th>shape</th><th>bytes</th></tr></thead>"
            f"<tbody>{rows}</tbody></table>{more}"
        )


def older_in_words(older: Mapping[str, OlderGroup]) -> str:
    """Say of which checkpoints the older groups are."""
    told = (f"group {name} is of generation {g.generation} ({g.tag})" for name, g in older.items())
    return ", ".join(told)


def _moment(unix: float) -> str:
    return f"{datetime.datetime.fromtimestamp(unix, datetime.UTC):%Y-%m-%d %H:%M:%S} UTC"
