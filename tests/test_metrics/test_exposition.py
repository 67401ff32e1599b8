"""What Prometheus reads is what was counted."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from contextlib import closing

import pytest

from fastcheck_dask.errors import TierError
from fastcheck_dask.metrics.families import Family

prometheus_client = pytest.importorskip("prometheus_client")

from prometheus_client.parser import text_string_to_metric_families  # noqa: E402

from fastcheck_dask.metrics.exposition import MetricsServer, Registered  # noqa: E402


def numbers() -> Iterator[Family]:
    saves = Family("fastcheck_saves", "counter", "Saves.", ("run", "level"))
    saves.add(3, "run-1", "peers")
    yield saves
    seconds = Family("fastcheck_save_seconds", "summary", "How long.", ("run",))
    seconds.add(1.5, 'odd"\n\\', count=2)
    yield seconds
    used = Family("fastcheck_node_used_bytes", "gauge", "Used.", ())
    used.add(2**40)
    yield used


WANTED = {
    ("fastcheck_saves_total", (("level", "peers"), ("run", "run-1"))): 3.0,
    ("fastcheck_save_seconds_sum", (("run", 'odd"\n\\'),)): 1.5,
    ("fastcheck_save_seconds_count", (("run", 'odd"\n\\'),)): 2.0,
    ("fastcheck_node_used_bytes", ()): float(2**40),
}


def parsed(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as reply:
        text: str = reply.read().decode()
        return text


def test_server_serves_what_is_counted_and_nothing_else() -> None:
    with closing(MetricsServer(numbers, "127.0.0.1", 0)) as server:
        assert parsed(read(server.url)) == WANTED
        with pytest.raises(TierError, match=r"cannot be served at 127\.0\.0\.1"):
            MetricsServer(numbers, "127.0.0.1", int(server.url.split(":")[2].split("/")[0]))
    server.close()
    with pytest.raises(OSError):
        read(server.url)


def test_registered_numbers_are_among_those_of_the_process_until_closed() -> None:
    def own() -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        found = parsed(prometheus_client.generate_latest().decode())
        return {key: value for key, value in found.items() if key[0].startswith("fastcheck")}

    registered = Registered(numbers)
    assert own() == WANTED
    registered.close()
    registered.close()
    assert own() == {}
