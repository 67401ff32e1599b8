"""The port at which a manager serves its numbers, if it was asked to."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from fastcheck_dask.config import Settings
from fastcheck_dask.errors import ConfigError, TierError
from fastcheck_dask.metrics.families import Read

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
        if self._port is None:
            return
        try:
            # Imported here because few want it, and it need not be installed.
            from fastcheck_dask.metrics.exposition import MetricsServer
        except ImportError as error:
            raise ConfigError(
                f"metrics_port (fastcheck.metrics.port) needs prometheus_client ({error}): "
                "pip install 'fastcheck-dask[metrics]', or leave it at null"
            ) from error
        self._open = MetricsServer

    @property
    def url(self) -> str | None:
        """Where the numbers are; None if nowhere."""
        return None if self._server is None else self._server.url

    def open(self) -> None:
        """Begin to serve. A port that cannot be had is told in the log: no reason not to train."""
        if self._port is None:
            return
        try:
            self._server = self._open(self._read, self._host, self._port)
        except TierError as error:
            log.warning("%s", error)
        else:
            log.info("metrics are served at %s", self._server.url)

    def close(self) -> None:
        """End. Idempotent."""
        if self._server is not None:
            self._server.close()
