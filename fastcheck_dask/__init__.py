"""FastCheck: checkpoints of large training runs in three tiers.

The names below are imported when they are first used: `fastcheck --help` and the encoder processes have no
use for the network libraries that a manager needs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fastcheck_dask.version import __version__

if TYPE_CHECKING:
    from fastcheck_dask.config import Group
    from fastcheck_dask.inspection import Checkpoint, LazyArray, open_checkpoint
    from fastcheck_dask.integrations.incremental import IncrementalCheckpointer
    from fastcheck_dask.manager import FastCheckManager, LoadReport, SaveHandle

__all__ = [
    "Checkpoint",
    "FastCheckManager",
    "Group",
    "IncrementalCheckpointer",
    "LazyArray",
    "LoadReport",
    "SaveHandle",
    "__version__",
    "open_checkpoint",
]
#: Where a name comes from, unless from the package `manager`.
_ELSEWHERE = {
    "Group": "config",
    "IncrementalCheckpointer": "integrations.incremental",
    **dict.fromkeys(("Checkpoint", "LazyArray", "open_checkpoint"), "inspection"),
}


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module(f"fastcheck_dask.{_ELSEWHERE.get(name, 'manager')}"), name)
    raise AttributeError(f"module 'fastcheck_dask' has no attribute {name!r}")
