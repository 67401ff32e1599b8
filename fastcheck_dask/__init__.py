"""FastCheck: checkpoints of large training runs in three tiers."""

from fastcheck_dask.manager import FastCheckManager, LoadReport, SaveHandle
from fastcheck_dask.version import __version__

__all__ = ["FastCheckManager", "LoadReport", "SaveHandle", "__version__"]
