from __future__ import annotations

import pytest

from fastcheck_dask.demo.results import Attempt, Outcome, Recovery
from fastcheck_dask.demo.scenario import scenario

pytest.importorskip("matplotlib")

from fastcheck_dask.demo.plot import draw


def test_draw_outcome_without_a_committed_save_is_a_png(tmp_path):
    attempts = []
    for first, last in ((1, 5), (5, 9), (8, 14)):
        attempt = Attempt(losses={step: 3 / step for step in range(first, last + 1)})
        attempt.take({"event": "saved", "tag": "step0004", "level": "local", "stats": {"stall_seconds": 0.1}})
        attempts.append(attempt)
    whole = [3 / step for step in range(1, 15)]
    reference = Attempt(all_losses=whole, losses=dict(enumerate(whole, 1)))
    recoveries = [
        Recovery(("trainer", "n1"), 5, wanted_source="peers+parity", source="peers+parity", step=4),
        Recovery(("trainer", "n2", "n3"), 9, wanted_source="object", source="object", step=7),
    ]
    draw(tmp_path / "plot.png", [Outcome(scenario("gpt", quick=True), reference, attempts, recoveries)])
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
