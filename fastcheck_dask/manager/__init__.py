"""What training code talks to."""

from fastcheck_dask.engine.load_report import LoadReport
from fastcheck_dask.manager.handle import SaveHandle
from fastcheck_dask.manager.manager import FastCheckManager

__all__ = ["FastCheckManager", "LoadReport", "SaveHandle"]
