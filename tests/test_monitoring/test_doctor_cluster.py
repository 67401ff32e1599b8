"""What the doctor finds in a cluster: judged from what nodes say, and looked at in a real one."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner, Result

from fastcheck_dask import cli
from fastcheck_dask.coordination.base import Health, NodeInfo
from fastcheck_dask.coordination.status import CoordinationStatus
from fastcheck_dask.monitoring import doctor_cluster
from fastcheck_dask.monitoring.cluster import Cluster, NodeView
from fastcheck_dask.version import __version__


def node(name: str, *, rack: str = "", damaged: int = 0, down: bool = False, **report: Any) -> NodeView:
    info = NodeInfo(name, "fcs://h:1", rack or f"rack-{name}", "h", 1)
    if down:
        return NodeView(info, "silent", None, f"{name} is down")
    lost = {"generation": 1, "token": "t", "count": damaged, "keys": []}
    told = {"runs": {"run": {"damaged": [lost]}}, "unix": 100.0, "version": __version__, **report}
    return NodeView(info, "available", told)


def judged(*nodes: NodeView, parity: int = 1) -> dict[str, str]:
    coordination = CoordinationStatus(Health("connected", 0.0, "h", "s"), 1, None, (), ())
    found = doctor_cluster.nodes(Cluster(coordination, nodes, (), (), 100.0), 3, parity=parity)
    return {finding.what: finding.level for finding in found}


FOUR = [node(f"n{i}") for i in range(4)]


def test_enough_nodes_in_several_racks_are_well() -> None:
    assert judged(*FOUR) == {"storage nodes": "ok"}


@pytest.mark.parametrize(("count", "level"), [(0, "problem"), (1, "advice"), (3, "advice")])
def test_few_nodes_are_told(count: int, level: str) -> None:
    assert judged(*FOUR[:count]) == {"storage nodes": level}


@pytest.mark.parametrize(("parity", "levels"), [(0, "aaoo"), (1, "aaao"), (2, "aaaa")])
def test_nodes_are_few_by_the_number_of_parity_shards(parity: int, levels: str) -> None:
    found = [judged(*FOUR[: count + 1], parity=parity)["storage nodes"][0] for count in range(4)]
    assert "".join(found) == levels
    assert judged(*FOUR, node("n4"), parity=parity) == {"storage nodes": "ok"}


def test_silent_and_damaged_nodes_are_problems() -> None:
    found = judged(*FOUR, node("n4", down=True), node("n5", damaged=2))
    assert found == {"storage nodes": "ok", "node n4": "problem", "node n5": "problem"}


def test_one_rack_for_all_is_worth_a_word() -> None:
    assert judged(*(node(f"n{i}", rack="default") for i in range(4)))["racks"] == "advice"


def test_clocks_that_differ_are_told_by_node() -> None:
    (well,) = doctor_cluster.clocks(FOUR, 101.0)
    assert well.level == "ok"
    (off,) = doctor_cluster.clocks([*FOUR, node("n4", unix=161.0), node("n5", down=True)], 101.0)
    assert (off.level, off.found) == ("advice", "differ from here: n4 +60 s")


def test_versions_that_differ_are_told() -> None:
    assert doctor_cluster.versions([*FOUR, node("n5", down=True)]) == []
    (found,) = doctor_cluster.versions([*FOUR, node("n4", version="9.9")])
    assert "n4 9.9" in found.found


@pytest.mark.parametrize(
    ("rates", "level", "says"),
    [
        ({"n0": 100e6, "n1": 110e6, "n2": 90e6}, "ok", ""),
        ({"n0": 100e6, "n1": 110e6, "n2": 40e6}, "advice", "n2"),
        ({"n0": 100e6, "n1": 110e6, "n2": 5e6}, "problem", "n2"),
        ({"n0": 5e6}, "problem", "n0"),
    ],
)
def test_links(rates: dict[str, float], level: str, says: str) -> None:
    (found,) = doctor_cluster.links(rates, 300e6, 10e6)
    assert (found.level, says in found.advice) == (level, True)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.main, ["doctor", *arguments], env={"COLUMNS": "200"})


def test_doctor_sees_a_real_cluster(seen: Any, tmp_path: Any) -> None:
    result = run(str(tmp_path), "--scheduler", seen.cluster.scheduler, "--json")
    found = {finding["what"]: finding for finding in json.loads(result.stdout)}
    # How fast the links are it measures: on a busy machine that may be too slow.
    assert {what for what, one in found.items() if one["level"] == "problem"} <= {"links"}, result.output
    for what in ("scheduler", "coordinator", "storage nodes", "clocks", "checkpoint dir"):
        assert found[what]["level"] == "ok", found[what]
    assert "n3" in found["links"]["found"]
    assert "versions" not in found


def test_doctor_without_its_cluster_has_problems_and_goes_on(tmp_path: Any) -> None:
    result = run("--coordinator", f"sqlite:///{tmp_path}/c.db", "--scheduler", "tcp://127.0.0.1:1")
    assert result.exit_code == 1
    assert "2 problems" in result.stdout
    assert "no coordinator file" in " ".join(result.stdout.split())


def test_doctor_without_a_cluster_looks_at_the_machine() -> None:
    result = run()
    assert (result.exit_code, "codec kernels" in result.stdout) == (0, True), result.output
