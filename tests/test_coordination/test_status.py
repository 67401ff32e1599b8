from __future__ import annotations

import json
import socket
from dataclasses import replace

import dask
import pytest
from click.testing import CliRunner

from fastcheck_dask import cli
from fastcheck_dask.coordination.candidacy import Candidate
from fastcheck_dask.coordination.delays import note_delay
from fastcheck_dask.coordination.entries import Create, Write
from fastcheck_dask.coordination.status import MasterStatus, gather, lines
from fastcheck_dask.testing.fakes import FakeCoordinator


@pytest.fixture(params=["embedded", pytest.param("zookeeper", marks=pytest.mark.zookeeper)])
def url(request, tmp_path):
    if request.param == "zookeeper":
        return request.getfixturevalue("zookeeper_url")
    return f"sqlite://{tmp_path}/coordinator/c.db"


def run(*arguments):
    return CliRunner().invoke(cli.main, ["status", "--coordination", *arguments])


def test_status_command_tells_nodes_and_runs(url, open_coordinator, node, record):
    coordinator = open_coordinator(url)
    coordinator.register(node("a"))
    claim = coordinator.claim("run-1", "pid 1 on h")
    coordinator.commit(record(), claim)
    coordinator.mark_persisted("run-1", 1, record().token)
    coordinator.claim("run-2", "pid 2 on h").close()
    note_delay(coordinator.entries, "run-2", 3, "epoch3", "the disk is full", now_unix=3600.0)
    result = run("--coordinator", url)
    assert result.exit_code == 0, result.output
    first, *rest = result.output.splitlines()
    assert first.startswith("connected with ")
    assert rest == [
        "storage nodes: 1",
        "  a  available  fcs://h:1  rack r1  1.0 GiB",
        "runs: 2",
        "  run-1  generation 1 (epoch1), persisted on n0, n1; owned by pid 1 on h",
        "  run-2  nothing committed; no owner",
        "    generation 3 (epoch3) is not in the object tier since 1970-01-01 01:00:00 UTC: the disk is full",
    ]
    told = json.loads(run("--coordinator", url, "--json").stdout)
    assert told["connection"]["state"] == "connected"
    assert told["layout_version"] == coordinator.layout_version
    assert [one["name"] for one in told["nodes"]] == ["a"]
    assert told["runs"][0]["latest"] == {
        "generation": 1,
        "tag": "epoch1",
        "persisted": True,
        "created_unix": 1.5,
        "raw_bytes": 12,
        "nodes": ["n0", "n1"],
    }
    assert told["runs"][0]["delay"] is None
    delay = {"generation": 3, "tag": "epoch3", "since_unix": 3600.0, "reason": "the disk is full"}
    assert told["runs"][1] == {"name": "run-2", "owner": None, "latest": None, "delay": delay}


def test_status_command_nothing_there_yet(url, open_coordinator):
    open_coordinator(url)
    result = run("--coordinator", url)
    assert (result.exit_code, result.output.splitlines()[1:]) == (0, ["storage nodes: none", "runs: none"])


def test_status_command_coordinator_away_is_status_1_and_wrong_value_2(tmp_path):
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        arguments = ["--coordinator", f"zk://127.0.0.1:{nobody.getsockname()[1]}/root"]
        with dask.config.set({"fastcheck.coordinator.timeout": "300 ms"}):
            result = run(*arguments)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (1, "", 1)
    assert "refused" in result.stderr
    missing = run("--coordinator", f"sqlite://{tmp_path}/c.db")
    assert (missing.exit_code, "no coordinator file" in missing.stderr) == (1, True)
    assert list(tmp_path.iterdir()) == []
    assert run("--coordinator", "zk://x:99999").exit_code == 2
    assert run().exit_code == 2


def test_status_master_is_told_where_there_was_an_election():
    coordinator = FakeCoordinator()
    entries = coordinator.entries
    assert gather(coordinator).master is None
    entries.apply(Create("epoch", b"{}"))
    assert gather(coordinator).master == MasterStatus(0, "", "", ())
    entries.apply(Write("epoch", Candidate("n1", "tcp://h:1", "x").to_bytes(0), 0))
    entries.apply(Create("candidates", b""), Create("candidates/n1", b"", ephemeral=True))
    found = gather(coordinator)
    assert found.master == MasterStatus(1, "n1", "tcp://h:1", ("n1",))
    assert "master: n1 at tcp://h:1, epoch 1, 1 candidates" in list(lines(found))
    gone = replace(found, master=replace(found.master, candidates=()))
    assert "master: n1 at tcp://h:1 (gone), epoch 1, 0 candidates" in list(lines(gone))
    entries.apply(Write("epoch", b"\xff", 1))
    assert gather(coordinator).master == MasterStatus(2, "", "", ("n1",))
