"""The metrics where ``prometheus_client`` may be missing."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from fastcheck_dask.errors import ConfigError
from fastcheck_dask.metrics.families import Read

if TYPE_CHECKING:
    from fastcheck_dask.metrics.exposition import MetricsServer

logger = logging.getLogger(__name__)


def check_installed(what: str) -> None:
    """Raise `ConfigError` if ``prometheus_client``, which `what` needs, is not there."""
    try:
        import fastcheck_dask.metrics.exposition  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"{what} needs prometheus_client ({error}): pip install 'fastcheck-dask[metrics]'"
        ) from error


def serve_metrics(read: Read, host: str, port: int) -> MetricsServer:
    """Serve numbers; see `MetricsServer`. `ConfigError` without ``prometheus_client``."""
    check_installed("a port for metrics")
    from fastcheck_dask.metrics.exposition import MetricsServer

    server = MetricsServer(read, host, port)
    logger.info("metrics are served at %s", server.url)
    return server


def show_metrics(read: Read) -> Callable[[], None]:
    """Put numbers among those that Dask's ``/metrics`` show, if it can show any; return what ends that."""
    try:
        from fastcheck_dask.metrics.exposition import Registered
    except ImportError as error:
        logger.debug("no metrics for Prometheus: %s", error)
        return lambda: None
    return Registered(read).close
