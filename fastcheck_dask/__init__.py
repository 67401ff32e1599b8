"""FastCheck: checkpoints of large training runs in three tiers.

The names below are imported when they are first used: `fastcheck --help` and the encoder processes have no
use for the network libraries that a manager needs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fastcheck_dask.version import __version__

if TYPE_CHECKING:
    from fastcheck_dask.manager import FastCheckManager, LoadReport, SaveHandle

__all__ = ["FastCheckManager", "LoadReport", "SaveHandle", "__version__"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("fastcheck_dask.manager"), name)
    raise AttributeError(f"module 'fastcheck_dask' has no attribute {name!r}")
