"""Read a state from files of other programs, without running what they hold."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np

from fastcheck_dask.errors import ConfigError, CorruptDataError, UnknownFormatError
from fastcheck_dask.inspection.dcp import is_dcp, read_dcp
from fastcheck_dask.inspection.safetensors import read_header
from fastcheck_dask.layout.leaves import require_torch, revive

_TRUST = "if you trust whoever made it as you trust a program, --trust runs it"


def read_foreign(source: Path, *, trust: bool = False) -> Any:
    """Return the state in a file or folder.

    Parameters
    ----------
    source : Path
        What torch.save made (``.pt``, ``.pth``, ``.bin``, ...), a safetensors file, a folder of safetensors
        files, or a folder of torch.distributed.checkpoint.
    trust : bool
        Let torch unpickle what it refuses otherwise: that runs code of whoever made the file.

    Returns
    -------
    object
        A state; safetensors give a dict of tensors by name.

    Raises
    ------
    ConfigError
        If there is no such file, or torch is missing.
    CorruptDataError
        If it is damaged, holds more than tensors and plain values, or names a tensor twice;
        `UnknownFormatError` if it is of no kind that is known.
    """
    require_torch()
    if source.is_dir():
        if is_dcp(source):
            return read_dcp(source, trust=trust)
        files = sorted(source.glob("*.safetensors"))
        if not files:
            raise UnknownFormatError(
                f"{source} has neither safetensors files nor the .metadata of torch.distributed.checkpoint"
            )
        return _read_safetensors(files)
    if not source.is_file():
        raise ConfigError(f"{source} does not exist; wanted a file of torch.save or safetensors, or a folder")
    if source.suffix == ".safetensors":
        return _read_safetensors([source])
    return _read_torch(source, trust=trust)


def _read_safetensors(files: list[Path]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path in files:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            contents = read_header(file, size, where=str(path))
            # Changes go to memory of this process: the tensors are writable, the file stays what it is.
            memory = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), np.uint8)
        for tensor, start in contents.tensors:
            if tensor.name in found:
                raise CorruptDataError(f"{path}: {tensor.name!r} stands in another file, too")
            bits = memory[start : start + tensor.nbytes]
            found[tensor.name] = revive("torch", bits, dtype=tensor.dtype, shape=tensor.shape)
    return found


def _read_torch(path: Path, *, trust: bool) -> Any:
    torch = require_torch()
    try:
        return torch.load(path, map_location="cpu", weights_only=not trust)
    except Exception as error:  # what torch raises for a damaged file has no common root
        reason = " ".join(str(error).split())[:300]
        if "weights_only" in reason or "Weights only" in reason or "WeightsUnpickler" in reason:
            raise CorruptDataError(
                f"{path} holds more than tensors and plain values, and is not unpickled ({reason}); {_TRUST}"
            ) from error
        raise CorruptDataError(f"{path} cannot be read by torch: {reason}") from error
