"""Write a checkpoint into one file that other programs read: safetensors, or what torch.save makes."""

from __future__ import annotations

import fnmatch
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from fastcheck_dask.errors import ConfigError, LayoutError, TierError
from fastcheck_dask.inspection.checkpoint import Checkpoint, LazyArray
from fastcheck_dask.inspection.chunks import in_order
from fastcheck_dask.inspection.safetensors import Tensor, header
from fastcheck_dask.layout.leaves import require_torch
from fastcheck_dask.layout.state import select, unflatten

SUFFIXES = (".safetensors", ".pt", ".pth")
#: Bytes that are in memory at once for each reader.
_PIECE_BYTES = 8 * 2**20

Advance = Callable[[int], None]


@dataclass(frozen=True)
class Exported:
    """What was written."""

    file: str
    tensors: int
    nbytes: int
    #: Plain values of the state that the format cannot hold.
    left_out: tuple[str, ...]


def export(
    checkpoint: Checkpoint,
    file: Path,
    *,
    include: str | None = None,
    strip: str = "",
    force: bool = False,
    advance: Advance = lambda _: None,
) -> Exported:
    """Write a checkpoint into a file.

    Parameters
    ----------
    checkpoint : Checkpoint
        Opened.
    file : Path
        Its suffix says what it becomes: ``.safetensors``, or ``.pt`` and ``.pth`` for torch.save.
    include : str, optional
        Pattern of leaf paths, as for ``load(include=)``.
    strip : str
        For safetensors: a beginning of the paths that the names in the file do without.
    force : bool
        Replace a file that is there.
    advance : callable
        Is called with the bytes that were verified and written.

    Returns
    -------
    Exported

    Raises
    ------
    ConfigError
        If the suffix is another one, the file is there, or torch is needed and missing.
    LayoutError
        If nothing matches, or the format lacks a dtype.
    ShardUnavailableError, ShardCorruptError
        If a chunk is missing or damaged; the file is then not made.
    TierError
        If the file cannot be written.

    Notes
    -----
    The file appears all at once, under its name. safetensors are streamed, a few chunks in memory at once;
    torch.save needs the whole state in memory.
    """
    if file.suffix not in SUFFIXES:
        raise ConfigError(f"{file}: the suffix says what is written; wanted one of {', '.join(SUFFIXES)}")
    if strip and file.suffix != ".safetensors":
        raise ConfigError(f"{file}: the names inside a state cannot be stripped; wanted .safetensors")
    if file.exists() and not force:
        raise ConfigError(f"{file} is there already; --force replaces it")
    if file.suffix == ".safetensors":
        return _export_safetensors(checkpoint, file, include, strip, force, advance)
    return _export_torch(checkpoint, file, include, force, advance)


def _export_safetensors(
    checkpoint: Checkpoint, file: Path, include: str | None, strip: str, force: bool, advance: Advance
) -> Exported:
    chosen = _chosen(checkpoint, include)
    if not chosen:
        raise LayoutError(f"no tensor of {checkpoint.tag} matches {include!r}")
    names = [array.path.removeprefix(strip) for array in chosen]
    tensors = [Tensor(n, a.dtype, a.shape) for n, a in zip(names, chosen, strict=True)]
    described = {"format": "pt", "fastcheck.tag": checkpoint.tag, "fastcheck.run": checkpoint.run}
    start = header(tensors, described)
    with _whole_file(file, force) as target:
        target.write(start)
        for array in chosen:
            for piece in in_order(_spans(array), array.read_bytes, nbytes=lambda span: span[1] - span[0]):
                target.write(piece)
                advance(len(piece))
    left_out = tuple(
        path for path in checkpoint.tree if include is None or fnmatch.fnmatchcase(path, include)
    )
    return Exported(str(file), len(chosen), sum(t.nbytes for t in tensors), left_out)


def _spans(array: LazyArray) -> list[tuple[int, int]]:
    return [(at, min(array.nbytes, at + _PIECE_BYTES)) for at in range(0, array.nbytes, _PIECE_BYTES)]


def _export_torch(
    checkpoint: Checkpoint, file: Path, include: str | None, force: bool, advance: Advance
) -> Exported:
    torch = require_torch()
    manifest = checkpoint.manifest
    paths, tree = (None, manifest.tree) if include is None else select(manifest.tree, include)
    arrays = [spec for spec in manifest.arrays if paths is None or spec.path in paths]

    def get(spec: Any) -> Any:
        bits = checkpoint.reader.read_range(spec, 0, spec.nbytes)
        advance(spec.nbytes)
        return bits

    state = unflatten(tree, get, arrays=arrays)
    with _whole_file(file, force) as target:
        torch.save(state, target)
    chosen = _chosen(checkpoint, include)
    return Exported(str(file), len(chosen), sum(array.nbytes for array in chosen), ())


def _chosen(checkpoint: Checkpoint, include: str | None) -> list[LazyArray]:
    """Return the tensors that are wanted, small ones as well."""
    return [
        array for array in checkpoint.values() if include is None or fnmatch.fnmatchcase(array.path, include)
    ]


@contextmanager
def _whole_file(file: Path, force: bool) -> Iterator[BinaryIO]:
    """Open a file beside the wanted one, and give it its name when everything was written."""
    temporary = file.with_name(f".tmp-{secrets.token_hex(8)}-{file.name}"[:255])
    try:
        with open(temporary, "xb") as target:
            yield target
            target.flush()
            os.fsync(target.fileno())
        if force:
            os.replace(temporary, file)
        else:
            # Somebody else may have made it meanwhile.
            os.link(temporary, file)
    except FileExistsError as error:
        raise ConfigError(f"{file} is there already; --force replaces it") from error
    except OSError as error:
        raise TierError(f"{file} cannot be written: {error.strerror or error}") from error
    finally:
        with suppress(FileNotFoundError, NotADirectoryError):
            temporary.unlink()
