"""Preload of a Dask scheduler: a page on its dashboard, where there is one.

``dask scheduler --preload fastcheck_dask.monitoring.dashboard``
"""

from __future__ import annotations

import logging

# Dask shows what its own loggers say, and those beneath them.
logger = logging.getLogger(f"distributed.{__name__}")

# A preload is imported before the dashboard is made, and called after: it has to be done now.
try:
    from fastcheck_dask.monitoring.dashboard_page import install
except ImportError as error:
    logger.info("no FastCheck page on the dashboard (pip install 'fastcheck-dask[dashboard]'): %s", error)
else:
    install()
    logger.info("the dashboard has a FastCheck page at /fastcheck")
