"""The port at which a manager serves its numbers, if it was asked to."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from fastcheck_dask.config import Settings
from fastcheck_dask.errors import TierError
from fastcheck_dask.metrics.families import Read
from fastcheck_dask.metrics.optional import check_installed, serve_metrics

if TYPE_CHECKING:
    from fastcheck_dask.metrics.exposition import MetricsServer

log = logging.getLogger(__name__)


class MetricsPort:
    """Serves the numbers of one process in a thread of its own, or does nothing.

    Raises
    ------
    ConfigError
        If there is to be a port, and ``prometheus_client`` is not installed.
    """

    def __init__(self, read: Read, settings: Settings) -> None:
        self._read, self._host, self._port = read, settings.metrics_host, settings.metrics_port
        self._server: MetricsServer | None = None
        if self._port is not None:
            check_installed("metrics_port (fastcheck.metrics.port)")

    @property
    def url(self) -> str | None:
        """Where the numbers are; None if nowhere."""
        return None if self._server is None else self._server.url

    def open(self) -> None:
        """Begin to serve. A port that cannot be had is told in the log: no reason not to train."""
        if self._port is None:
            return
        try:
            self._server = serve_metrics(self._read, self._host, self._port)
        except TierError as error:
            log.warning("%s", error)

    def close(self) -> None:
        """End. Idempotent."""
        if self._server is not None:
            self._server.close()
