"""What Prometheus reads. The only module that needs ``prometheus_client``; `ImportError` without it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily

from fastcheck_dask.errors import TierError
from fastcheck_dask.metrics.families import Family, Read

logger = logging.getLogger(__name__)

_CLASSES = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "summary": SummaryMetricFamily}


class Collector:
    """Gives the numbers that a function returns to a registry."""

    def __init__(self, read: Read) -> None:
        self._read = read

    def describe(self) -> list[Any]:
        """Return nothing: otherwise a registry would read all numbers to learn their names."""
        return []

    def collect(self) -> Iterator[Any]:
        """Yield the families as Prometheus' library has them."""
        for family in self._read():
            yield _converted(family)


def _converted(family: Family) -> Any:
    made = _CLASSES[family.kind](family.name, family.text, labels=family.labels)
    for sample in family.samples:
        values = [sample.labels[name] for name in family.labels]
        if family.kind == "summary":
            made.add_metric(values, count_value=sample.count, sum_value=sample.value)
        else:
            made.add_metric(values, sample.value)
    return made


class Registered:
    """Numbers in the registry of this process, which Dask's ``/metrics`` show; until closed."""

    def __init__(self, read: Read) -> None:
        self._collector = Collector(read)
        REGISTRY.register(self._collector)

    def close(self) -> None:
        """Take them out. Idempotent."""
        collector, self._collector = self._collector, None  # type: ignore[assignment]
        if collector is not None:
            REGISTRY.unregister(collector)


class MetricsServer:
    """Serves the numbers that a function returns, and no others, at ``http://host:port/metrics``.

    Parameters
    ----------
    read : callable
        Called for each request, in a thread of the server.
    host, port
        Where to listen; port 0 takes any.

    Raises
    ------
    TierError
        If the port cannot be had.
    """

    def __init__(self, read: Read, host: str, port: int) -> None:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(Collector(read))
        try:
            self._server, self._thread = start_http_server(port, addr=host, registry=registry)
        except OSError as error:
            raise TierError(
                f"the metrics cannot be served at {host}:{port}: {error}; give another port, or none"
            ) from error
        #: ``http://host:port/metrics``
        self.url = f"http://{host}:{self._server.server_port}/metrics"
        self._closing = threading.Lock()

    def close(self) -> None:
        """End the server. Idempotent."""
        with self._closing:
            if self._thread.is_alive():
                self._server.shutdown()
                self._server.server_close()
                self._thread.join()
