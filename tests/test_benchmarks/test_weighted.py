"""Saves over links of which one is slow: real nodes, each in a network namespace of its own."""

import pytest

from benchmarks import shaped, weighted


@pytest.mark.slow
def test_weighted_save_over_unequal_links_spares_the_slow_node():
    if (missing := shaped.why_not()) is not None:
        pytest.skip(missing)
    # 8, 8, 8 and 2 MB/s at most: also a busy machine can send so much faster than the slow node takes.
    saves = weighted.measured(8, stripes="weighted", nbytes=3_900_000, count=8)
    first, last = (stats["node_bytes"] for stats in (saves[0], saves[-1]))
    assert all(stats["degraded"] is None for stats in saves)
    # Nothing is known at first: each has a third of the data, the parity node as much.
    assert max(first.values()) < 1.1 * min(first.values())
    *others, slow = (last[f"n{number}"] for number in range(1, 5))
    assert slow < 0.5 * min(others)
    assert max(others) < 0.55 * sum(first.values()) * 3 / 4
    # Once: what it was moved for has not changed.
    dealt = [tuple(sorted(stats["node_bytes"].items())) for stats in saves]
    assert len(set(dealt)) == 2
