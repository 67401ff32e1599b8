"""The page of a real scheduler, and the metrics of a real worker, by HTTP."""

from __future__ import annotations

import logging
import sys
import urllib.request
from typing import Any

import pytest
from distributed import Client

from fastcheck_dask.testing.faults import wait_until


def fetched(url: str) -> str:
    with urllib.request.urlopen(url, timeout=20) as reply:
        text: str = reply.read().decode()
        return text


def test_page_shows_nodes_shards_and_saves(seen: Any) -> None:
    pytest.importorskip("bokeh")
    from bokeh.client import pull_session

    assert "docs_json" in fetched(f"{seen.dashboard}/fastcheck")
    assert "individual-fastcheck" in fetched(f"{seen.dashboard}/status")

    def rows(name: str) -> dict[str, Any]:
        # A visitor of its own each time: the client drops what the server sends while it waits for a reply.
        session = pull_session(url=f"{seen.dashboard}/fastcheck")
        try:
            return dict(session.document.get_model_by_name(name).data)
        finally:
            session.close()

    wait_until(lambda: len(rows("fastcheck_saves")["node"]) == 4, "the saves of four nodes")
    nodes = rows("fastcheck_nodes")
    assert list(nodes["name"]) == ["n0", "n1", "n2", "n3"]
    assert set(nodes["health"]) == {"well"}
    assert sorted(nodes["master"]) == ["", "", "", "yes"]
    assert all(0 < share < 1 for share in nodes["used"])
    shards = rows("fastcheck_shards")
    assert set(zip(shards["run"], shards["generation"], strict=True)) == {("training", 1)}
    assert all(seconds < 0 for seconds in rows("fastcheck_saves")["seconds"])
    assert "Traceback" not in seen.cluster.log("scheduler")


def test_worker_serves_the_numbers_of_its_node_at_its_http_port(seen: Any) -> None:
    pytest.importorskip("prometheus_client")
    from prometheus_client.parser import text_string_to_metric_families

    with Client(seen.cluster.scheduler) as client:
        workers = client.scheduler_info(n_workers=-1)["workers"].values()
        places = {str(one["name"]): (one["host"], one["services"]["dashboard"]) for one in workers}
    assert sorted(places) == ["n0", "n1", "n2", "n3"]
    masters = 0.0
    for name, (host, port) in places.items():
        assert host == "127.0.0.1"
        found = {
            (sample.name, sample.labels.get("run")): sample.value
            for family in text_string_to_metric_families(fetched(f"http://{host}:{port}/metrics"))
            for sample in family.samples
            if sample.labels.get("node") == name
        }
        assert found["fastcheck_node_generation", "training"] == 1
        assert found["fastcheck_node_limit_bytes", None] == 64 * 2**20
        assert found["fastcheck_node_commits_total", None] == 1
        masters += found["fastcheck_node_master", None]
    assert masters == 1


def test_without_bokeh_there_is_no_page_and_one_line_says_so(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = "fastcheck_dask.monitoring.dashboard_page"
    for module in ("fastcheck_dask.monitoring.dashboard", page):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, "bokeh.layouts", None)
    with caplog.at_level(logging.INFO, "distributed"):
        import fastcheck_dask.monitoring.dashboard  # noqa: F401
    (line,) = [one for one in caplog.records if "FastCheck" in one.message]
    assert (line.levelname, "fastcheck-dask[dashboard]" in line.message) == ("INFO", True)
