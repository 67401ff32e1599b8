"""Numbers of a real manager, as Prometheus reads them."""

from __future__ import annotations

import logging
import sys
import urllib.request
from typing import Any

import numpy as np
import pytest

from fastcheck_dask.errors import ConfigError


def scraped(url: str) -> dict[tuple[str, str], float]:
    """Return the samples by name and level (empty for those that have none)."""
    from prometheus_client.parser import text_string_to_metric_families

    with urllib.request.urlopen(url, timeout=10) as reply:
        text = reply.read().decode()
    return {
        (sample.name, sample.labels.get("level", "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_of_a_manager_tell_its_saves_until_it_is_closed(make: Any) -> None:
    pytest.importorskip("prometheus_client")
    manager = make(metrics_port=0)
    url = manager.metrics_url
    assert url.startswith("http://127.0.0.1:")
    assert scraped(url)["fastcheck_saves_total", "object"] == 0
    handle = manager.save_async({"w": np.arange(5000.0)}, "t").wait("object")
    found = scraped(url)
    assert found["fastcheck_saves_total", "object"] == 1
    assert found["fastcheck_generation", ""] == handle.generation
    assert found["fastcheck_save_raw_bytes_total", ""] == 40_000
    assert found["fastcheck_save_sent_bytes_total", ""] == handle.stats["sent_bytes"]
    assert found["fastcheck_save_stall_seconds_sum", ""] == handle.stats["stall_seconds"]
    manager.close()
    with pytest.raises(OSError):
        scraped(url)


def test_metrics_port_taken_is_told_and_the_manager_works(
    make: Any, caplog: pytest.LogCaptureFixture, tmp_path: Any
) -> None:
    pytest.importorskip("prometheus_client")
    first = make(metrics_port=0)
    port = int(first.metrics_url.split(":")[2].split("/")[0])
    with caplog.at_level(logging.WARNING, "fastcheck_dask"):
        second = make(tmp_path / "other", metrics_port=port)
    assert second.metrics_url is None
    assert f"127.0.0.1:{port}" in caplog.text
    second.save_async({"w": np.arange(10.0)}, "t").wait("object")


def test_metrics_port_without_prometheus_says_what_to_install(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.delitem(sys.modules, "fastcheck_dask.metrics.exposition", raising=False)
    with pytest.raises(ConfigError, match=r"pip install 'fastcheck-dask\[metrics\]'"):
        make(metrics_port=0)
    assert make().metrics_url is None
