"""What can be had, by which nodes have what: compared with trying every stripe."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastcheck_dask.coordination.base import CommitRecord
from fastcheck_dask.layout.stripes import Layout, assign
from fastcheck_dask.monitoring.redundancy import (
    ABSENT,
    Holding,
    Verdict,
    holding_in,
    judge,
    needs_layout,
)

NODES = ("n0", "n1", "n2", "n3")
RECORD = CommitRecord("run", 3, "t", "tok", "0" * 64, NODES, ("fcs://h:1",) * 4, 3, True, 1, 1.0)
WHOLE = Holding(True)
LAYOUT = assign({f"c{i}": 100 for i in range(9)}, shards=3)
TWO = replace(RECORD, nodes=(*NODES, "n4"), addresses=("fcs://h:1",) * 5, parity=2)
LAYOUT_OF_TWO = assign({f"c{i}": 100 for i in range(9)}, shards=3, parity=2)


def holdings(**changed: Holding) -> dict[str, Holding]:
    return dict.fromkeys(NODES, WHOLE) | changed


def test_all_nodes_have_it_is_redundant() -> None:
    assert judge(RECORD, holdings()).level == "redundant"


@pytest.mark.parametrize("lost", NODES)
def test_one_node_gone_or_damaged_is_degraded_and_two_are_lost_unless_persisted(lost: str) -> None:
    gone = holdings(**{lost: ABSENT})
    assert judge(RECORD, gone) == Verdict("degraded", f"from parity: {lost} is missing", (lost,))
    hurt = judge(RECORD, holdings(**{lost: Holding(True, frozenset({"c1", "c2"}))}))
    assert (hurt.level, hurt.why) == ("degraded", f"from parity: {lost} has 2 damaged chunks")
    other = NODES[NODES.index(lost) - 1]
    both = gone | {other: ABSENT}
    assert judge(RECORD, both, LAYOUT).level == "lost"
    assert judge(RECORD.as_persisted(), both).level == "degraded"


def test_without_parity_one_node_gone_is_lost_unless_persisted() -> None:
    single = replace(RECORD, nodes=("n0",), addresses=("fcs://h:1",), shards=1, parity=False)
    assert judge(single, {"n0": WHOLE}).level == "degraded"
    assert judge(single.as_persisted(), {"n0": WHOLE}).level == "redundant"
    assert judge(single, {"n0": ABSENT}).level == "lost"


def test_without_nodes_the_object_tier_is_all_that_was_wanted() -> None:
    alone = replace(RECORD, nodes=(), addresses=(), shards=0, parity=False)
    assert judge(alone.as_persisted(), {}).level == "redundant"
    assert judge(alone, {}).level == "lost"


def test_damaged_chunks_of_different_stripes_can_be_rebuilt_and_those_of_one_cannot() -> None:
    first, second = LAYOUT.stripes[:2]
    apart = holdings(
        n0=Holding(True, frozenset({first.members[0]})), n1=Holding(True, frozenset({second.members[1]}))
    )
    together = holdings(
        n0=Holding(True, frozenset({first.members[0]})), n3=Holding(True, frozenset({first.parity_key}))
    )
    assert needs_layout(RECORD, apart)
    assert judge(RECORD, apart, LAYOUT).level == "degraded"
    assert judge(RECORD, apart).level == "lost", "without the stripes the worst is supposed"
    assert judge(RECORD, together, LAYOUT).level == "lost"


@st.composite
def any_holding(draw: st.DrawFn, layout: Layout, shard: int) -> Holding:
    if draw(st.integers(0, 3)) == 0:
        return ABSENT
    keys = draw(st.sets(st.sampled_from(layout.keys_of(shard)), max_size=2))
    return Holding(True, frozenset(keys), draw(st.integers(0, 5)) > 0 or not keys)


@given(st.sampled_from([(RECORD, LAYOUT), (TWO, LAYOUT_OF_TWO)]), st.booleans(), st.data())
def test_level_is_what_each_stripe_says(
    saved: tuple[CommitRecord, Layout], persisted: bool, data: st.DataObject
) -> None:
    record, layout = saved
    held = [data.draw(any_holding(layout, shard)) for shard in range(len(record.nodes))]
    lost: set[str] = set()
    for shard, holding in enumerate(held):
        whole = not holding.there or not holding.complete
        lost |= set(layout.keys_of(shard)) if whole else holding.damaged
    stripes = [(*stripe.members, *stripe.parity_keys(layout.parity)) for stripe in layout.stripes]
    most = max(sum(key in lost for key in stripe) for stripe in stripes)
    record = replace(record, persisted=persisted)
    wanted = "redundant" if not lost else "degraded" if most <= record.parity or persisted else "lost"
    found = judge(record, dict(zip(record.nodes, held, strict=True)), layout)
    assert found.level == wanted
    assert found.may_die <= record.parity - most if most <= record.parity else found.may_die == 0


@pytest.mark.parametrize("pair", list(itertools.combinations_with_replacement(TWO.nodes, 2)), ids="".join)
def test_two_parity_shards_bear_the_loss_of_any_two_nodes_and_say_how_many_may_still_die(
    pair: tuple[str, str],
) -> None:
    whole = dict.fromkeys(TWO.nodes, WHOLE)
    assert judge(TWO, whole) == Verdict("redundant", "all nodes have it", may_die=2)
    found = judge(TWO, whole | dict.fromkeys(pair, ABSENT))
    assert (found.level, found.may_die) == ("degraded", 2 - len(set(pair)))
    third = next(name for name in TWO.nodes if name not in pair)
    hurt = whole | dict.fromkeys(pair, ABSENT) | {third: ABSENT}
    assert judge(TWO, hurt, LAYOUT_OF_TWO).level == ("lost" if len(set(pair)) == 2 else "degraded")


def test_holding_is_read_from_the_report_of_a_node() -> None:
    run = {"committed": [4, "new"], "pins": [], "ring": [[3, "tok"]], "damaged": []}
    assert holding_in({"runs": {"run": run}}, RECORD) == WHOLE
    assert holding_in({"runs": {"run": run}}, replace(RECORD, token="other")) == ABSENT
    assert holding_in({"runs": {}}, RECORD) == ABSENT
    lost = {"generation": 3, "token": "tok", "count": 7, "keys": ["a", "b"]}
    found = holding_in({"runs": {"run": run | {"damaged": [lost]}}}, RECORD)
    assert found == Holding(True, frozenset({"a", "b"}), complete=False)
