"""Checkpoints that real storage nodes wrote: verified, disagreed about, and repaired from their memory."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner

from fastcheck_dask import cli, open_checkpoint
from fastcheck_dask.testing.training import TrainingHost, assert_is_state, state_at


@pytest.fixture
def command() -> Callable[..., Any]:
    """Return a function that runs a command and returns its JSON."""

    def run(*arguments: object, status: int = 0) -> Any:
        result = CliRunner().invoke(cli.main, [*map(str, arguments), "--json"], catch_exceptions=False)
        assert result.exit_code == status, result.output
        return json.loads(result.stdout)

    return run


def test_object_tier_is_repaired_from_the_memory_of_the_nodes(
    on_cluster: Callable[..., TrainingHost], command: Callable[..., Any]
) -> None:
    host = on_cluster()
    manager = host.manager()
    host.save(manager, 1, level="object")
    host.save(manager, 2, level="object")
    manager.close()
    found = command("verify", host.objects, "--all", "--strict")
    assert all(one["intact"] for one in found["checkpoints"])
    # The nodes hold the newest.
    chunk = next((host.objects / "00000002-step2/model/w3/c").iterdir())
    chunk.write_bytes(chunk.read_bytes()[:-9])
    (host.objects / "00000002-step2/all/c/0").unlink()
    (host.objects / ".fastcheck/manifests/00000002-step2.json").unlink()
    assert not command("verify", host.objects, status=1)["checkpoints"][0]["restorable"]
    found = command("verify", host.objects, "--repair", "--coordinator", host.coordinator)
    assert sum("from the storage nodes" in line for line in found["repaired"]) >= 1
    command("verify", host.objects, "--all", "--strict")
    opened = open_checkpoint(str(host.objects))
    wanted = state_at(2)
    assert all(opened[f"model/{n}"].numpy().tobytes() == w.tobytes() for n, w in wanted["model"].items())


def test_marker_removed_by_hand_is_a_disagreement_that_is_told_with_both_sides(
    on_cluster: Callable[..., TrainingHost], command: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    host = on_cluster()
    manager = host.manager()
    host.save(manager, 1, level="object")
    host.save(manager, 2, level="object")
    manager.close()
    (host.objects / ".fastcheck/commits/00000002-step2.json").unlink()
    with caplog.at_level(logging.WARNING):
        state, report = host.load_elsewhere()
    assert_is_state(state, 2)
    assert report.source == "peers"
    assert any(
        "persisted to the coordinator" in r.getMessage() and "step2" in r.getMessage() for r in caplog.records
    )
    listed = command("ls", host.objects)
    assert [c["tag"] for c in listed["checkpoints"]] == ["step1"]
    assert [(f["kind"], f["name"]) for f in listed["leftovers"]] == [("unmarked", "00000002-step2")]
    (problem,) = command("verify", host.objects, "--all", status=1)["problems"]
    assert (problem["fault"], problem["name"]) == ("unmarked", ".fastcheck/commits/00000002-step2.json")
    # Only one is there to be collected, and it is not: its marker may come back.
    assert command("gc", host.objects)["removed"] == []
