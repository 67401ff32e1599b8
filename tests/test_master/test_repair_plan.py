"""What is repaired, in which order, and on which node."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastcheck_dask.coordination.base import CommitRecord, NodeInfo
from fastcheck_dask.master.repair_plan import RepairPlan, repair_plan
from fastcheck_dask.master.survey import Survey

GIB = 2**30
NAMES = ("n0", "n1", "n2", "n3")
RECORD = CommitRecord(
    "run",
    5,
    "tag",
    "token",
    "ab" * 32,
    NAMES[:3],
    ("fcs://n0:1", "fcs://n1:1", "fcs://n2:1"),
    2,
    True,
    9,
    1.0,
)


def report(**fields: Any) -> dict[str, Any]:
    """Return what a node says that holds the generation, whole."""
    run = {
        "committed": [5, "token"],
        "staged": [],
        "pins": [],
        "ring": [],
        "bytes": 1000,
        "damaged": [],
        **fields,
    }
    return {"limit_bytes": GIB, "used_bytes": 1000, "reserved_bytes": 0, "runs": {"run": run}}


IDLE = {"limit_bytes": GIB, "used_bytes": 0, "reserved_bytes": 0, "runs": {}}
DAMAGED = report(damaged=[{"generation": 5, "token": "token", "count": 2, "keys": ["a", "b"]}])


def node(name: str, **fields: Any) -> NodeInfo:
    return NodeInfo(
        **{
            "name": name,
            "address": f"fcs://{name}:1",
            "rack": name,
            "host": name,
            "capacity_bytes": GIB,
            **fields,
        }
    )


def surveyed(**changes: Any) -> Survey:
    """Return a survey of three nodes that are whole and one that is idle, but for the changes.

    A change is None for a node that is not there, "silent", or its report; or a pair of node and report.
    """
    nodes = {name: node(name) for name in NAMES}
    reports: dict[str, Any] = {**{name: report() for name in NAMES[:3]}, "n3": IDLE}
    for name, change in changes.items():
        if isinstance(change, tuple):
            nodes[name], reports[name] = change
        elif change is None:
            del nodes[name], reports[name]
        elif change == "silent":
            del reports[name]
        else:
            reports[name] = change
    return Survey(nodes, reports)


def planned(found: Survey, record: CommitRecord = RECORD, **options: Any) -> RepairPlan:
    shards = found.shards(record)
    assert shards is not None
    return repair_plan(record, shards, found, **options)


def told(plan: RepairPlan) -> list[tuple[int, str, tuple[int, ...]]]:
    return [(order.shard, order.node, order.gone) for order in plan.orders]


@pytest.mark.parametrize(
    ("changes", "condition"),
    [
        ({}, "whole"),
        ({"n1": None}, "gone"),
        ({"n1": "silent"}, "silent"),
        ({"n1": IDLE}, "gone"),
        ({"n1": report(committed=[4, "token"])}, "gone"),
        ({"n1": report(committed=[5, "other"])}, "gone"),
        ({"n1": report(committed=None, pins=[[5, "token"]])}, "whole"),
        (
            {
                "n1": report(
                    committed=[4, "t"], staged=[{"generation": 5, "token": "token", "prepared": True}]
                )
            },
            "whole",
        ),
        (
            {
                "n1": report(
                    committed=[4, "t"], staged=[{"generation": 5, "token": "token", "prepared": False}]
                )
            },
            "gone",
        ),
        ({"n1": DAMAGED}, "damaged"),
        ({"n1": (node("n1", state="draining"), report())}, "leaving"),
        ({"n1": (node("n1", address="fcs://n1:2"), report())}, "gone"),
    ],
)
def test_condition_of_a_shard(changes: dict[str, Any], condition: str) -> None:
    shards = surveyed(**changes).shards(RECORD)
    assert shards is not None
    assert [s.condition for s in shards] == ["whole", condition, "whole"]


def test_node_with_a_newer_generation_makes_it_moot() -> None:
    assert surveyed(n1=report(committed=[6, "next"])).shards(RECORD) is None


def test_nothing_wrong_nothing_planned() -> None:
    assert planned(surveyed()) == RepairPlan()


def test_lost_shard_goes_to_the_idle_node_with_what_it_will_take() -> None:
    plan = planned(surveyed(n1=None))
    assert told(plan) == [(1, "n3", (1,))]
    assert plan.orders[0].reserve_bytes == 1000
    assert plan.orders[0].moved.nodes == ("n0", "n3", "n2")


def test_node_that_came_back_empty_takes_its_shard_again_under_its_new_address() -> None:
    plan = planned(surveyed(n1=(node("n1", address="fcs://n1:2"), IDLE)))
    assert told(plan) == [(1, "n1", (1,))]
    assert plan.orders[0].moved.addresses == ("fcs://n0:1", "fcs://n1:2", "fcs://n2:1")


def test_silent_node_is_lost_only_when_it_is_given_up() -> None:
    found = surveyed(n1="silent")
    assert planned(found) == RepairPlan()
    assert told(planned(found, given_up={"n1"})) == [(1, "n3", (1,))]


def test_damage_is_repaired_in_place_after_what_is_lost() -> None:
    assert told(planned(surveyed(n0=DAMAGED))) == [(0, "n0", (0,))]
    assert told(planned(surveyed(n0=DAMAGED, n1=None))) == [(1, "n3", (1,)), (0, "n0", (0,))]


def test_leaving_node_is_emptied_or_stranded() -> None:
    leaving = (node("n1", state="draining"), report())
    assert told(planned(surveyed(n1=leaving))) == [(1, "n3", ())]
    plan = planned(surveyed(n1=leaving, n3=None))
    assert (plan.orders, plan.stranded, plan.hopeless) == ((), ("n1",), "")


def test_nobody_takes_the_place_says_so() -> None:
    assert "take the place of n1" in planned(surveyed(n1=None, n3=None)).hopeless


def test_two_lost_need_the_object_tier() -> None:
    found = surveyed(n0=None, n1=None)
    assert "has lost 2 shards" in planned(found).hopeless
    plan = planned(found, location="/objects")
    assert told(plan) == [(0, "n3", (0, 1))]
    assert plan.orders[0].location == "/objects"
    assert "take the place of n1" in plan.hopeless


def test_two_lost_of_a_checkpoint_with_two_parity_shards_are_rebuilt_one_after_the_other() -> None:
    record = replace(RECORD, nodes=NAMES, addresses=tuple(f"fcs://{name}:1" for name in NAMES), parity=2)
    extra = {name: (node(name), IDLE) for name in ("n4", "n5")}
    plan = planned(surveyed(n0=None, n3=None, **extra), record)
    assert told(plan) == [(0, "n4", (0, 3)), (3, "n5", (3,))]
    assert (plan.orders[1].record, plan.hopeless) == (plan.orders[0].moved, "")
    assert "has lost 3 shards" in planned(surveyed(n0=None, n1=None, n3=None, **extra), record).hopeless


def test_full_node_is_the_last_choice() -> None:
    extra = {"n4": (node("n4"), {**IDLE, "used_bytes": GIB})}
    nodes = surveyed(n1=None, n3=None, **extra)
    assert told(planned(nodes)) == [(1, "n4", (1,))]
    assert told(planned(surveyed(n1=None, **extra))) == [(1, "n3", (1,))]


CHANGES = st.sampled_from([None, "silent", IDLE, DAMAGED, "same", "leaving"])


@given(st.tuples(*[CHANGES] * 4), st.booleans())
def test_plan_never_puts_two_shards_on_one_node_nor_reads_what_is_gone(changes: Any, persisted: bool) -> None:
    found = surveyed(
        **{
            name: (node(name, state="draining"), report()) if change == "leaving" else change
            for name, change in zip(NAMES, changes, strict=True)
            if change != "same"
        }
    )
    plan = planned(found, location="/x" if persisted else None, given_up=set(NAMES))
    record, lost = RECORD, {s.shard for s in found.shards(RECORD) or () if s.condition in ("gone", "silent")}
    for order in plan.orders:
        assert order.record == record
        record = order.moved
        assert len(set(record.nodes)) == 3
        assert found.nodes[order.node].state == "available" or order.node == order.record.nodes[order.shard]
        assert order.node in found.reports
        assert lost <= set(order.gone)
        lost.discard(order.shard)
    assert replace(record, nodes=RECORD.nodes, addresses=RECORD.addresses) == RECORD


def test_plan_limits_repairs_and_not_what_leaves_a_node_that_ends():
    leaving = (node("n2", state="draining"), report())
    plan = planned(surveyed(n0=IDLE, n1=DAMAGED, n2=leaving), location="/objects", bytes_per_second=1e6)
    found = {order.shard: order.bytes_per_second for order in plan.orders}
    assert found == {0: 1e6, 1: 1e6, 2: None}
