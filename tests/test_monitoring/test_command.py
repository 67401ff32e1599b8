"""``fastcheck status`` with a real cluster: what is well, what died, when and why."""

from __future__ import annotations

import contextlib
import io
import threading
import time
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from fastcheck_dask import cli
from fastcheck_dask.coordination import connect
from fastcheck_dask.coordination.delays import forget_delay, note_delay
from fastcheck_dask.monitoring import command
from fastcheck_dask.testing.faults import wait_until


def test_status_all_redundant_is_0_and_tells_nodes_and_run(seen: Any) -> None:
    result = seen.status()
    assert result.exit_code == 0, result.output
    for text in ("n0", "r3", "available", "training 1", "step1", "64.00 MiB", "redundant: all nodes have it"):
        assert text in result.stdout, result.stdout
    assert "nodes that ended" not in result.stdout
    told = seen.told()
    assert told["level"] == "redundant"
    (run,) = told["runs"]
    assert (run["name"], run["recoverable"], run["owner"]) == ("training", 1, None)
    assert 0 < run["lease_seconds"] <= 3600
    assert [node["name"] for node in told["nodes"]] == ["n0", "n1", "n2", "n3"]
    assert all(node["report"]["commits"] == 1 and node["started_unix"] > 0 for node in told["nodes"])


def test_status_asks_the_scheduler_for_the_coordinator(seen: Any) -> None:
    result = CliRunner().invoke(cli.main, ["status", "--scheduler", seen.cluster.scheduler])
    assert result.exit_code == 0, result.output


def test_watch_shows_again_until_it_is_stopped(seen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Twice(threading.Event):
        looks = 0

        def wait(self, timeout: float | None = None) -> bool:
            assert timeout == command.WATCH_SECONDS
            Twice.looks += 1
            return Twice.looks == 2

    out = io.StringIO()
    console = Console(file=out, width=200, force_terminal=True)
    arguments: dict[str, Any] = {"coordinator": seen.cluster.coordinator, "scheduler": None}
    assert command.run_status(console, **arguments, watch=True, stop=Twice()) == 0
    assert (Twice.looks, out.getvalue().count("storage nodes: 4")) == (2, 3)


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        ([], 2),
        (["--coordination"], 2),
        (["--coordinator", "sqlite:////nowhere/c.db"], 2),
        (["--coordinator", "sqlite:////nowhere/c.db", "--json", "--watch"], 2),
        (["--coordinator", "nonsense"], 2),
        (["--coordination", "--coordinator", "sqlite:////nowhere/c.db"], 1),
    ],
)
def test_status_that_cannot_be_told(arguments: list[str], status: int) -> None:
    result = CliRunner().invoke(cli.main, ["status", *arguments])
    assert (result.exit_code, result.stderr.count("\n")) == (status, 1), result.output


def test_why_a_run_is_not_persisted_is_shown(seen: Any) -> None:
    with contextlib.closing(connect(seen.cluster.coordinator)) as coordinator:
        note_delay(coordinator.entries, "training", 1, "step1", "s3://b: 503", now_unix=3600.0)
        stdout = " ".join(seen.status().stdout.split())
        forget_delay(coordinator.entries, "training")
    assert (
        "training: generation 1 (step1) is not in the object tier since 1970-01-01 01:00:00 UTC: s3://b: 503"
    ) in stdout
    assert "is not in the object tier" not in seen.status().stdout


def test_node_killed_is_shown_with_time_and_reason_and_a_second_one_loses_the_run(seen: Any) -> None:
    """Comes last: the cluster is not the same after it."""
    began = time.time()
    holders = seen.told()["runs"][0]["latest"]["nodes"]
    master = seen.told()["master"]["name"]
    victim = next(name for name in holders if name != master)
    seen.cluster.kill(victim)
    wait_until(lambda: any(one["end"] for one in seen.told()["gone"]), "the end to be noted")
    (gone,) = seen.told()["gone"]
    assert (gone["name"], gone["end"]["cause"]) == (victim, "killed")
    assert began <= gone["end"]["unix"] <= time.time()
    assert "SIGKILL" in gone["end"]["why"]
    result = seen.status()
    assert result.exit_code == 1
    assert f"from parity: {victim} is missing" in result.stdout
    assert gone["end"]["why"] in " ".join(result.stdout.split())

    seen.cluster.kill(master)
    result = seen.status()
    assert result.exit_code == 2
    assert "no older one either" in result.stdout

    seen.cluster.start_node(victim, rack="r9")
    assert seen.status().exit_code == 2, "it is back, and empty"
    ends = [one["end"]["cause"] for one in seen.told()["gone"] if one["name"] == victim and one["end"]]
    assert ends == ["killed"]
