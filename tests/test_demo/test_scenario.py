from __future__ import annotations

import pytest

from fastcheck_dask.demo.scenario import MODELS, Scenario, scenario


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("model", MODELS)
def test_scenario_kills_come_between_saves(model, quick):
    plan = scenario(model, quick=quick)
    assert plan.peer_kill_step % plan.save_every
    assert plan.object_kill_step % plan.save_every
    # At least one save before the first kill, between the two, and after the second.
    first, second = plan.peer_kill_step // plan.save_every, plan.object_kill_step // plan.save_every
    assert 0 < first < second < plan.steps // plan.save_every


@pytest.mark.parametrize(("first", "second"), [(1, 8), (8, 8), (4, 10)])
def test_scenario_steps_out_of_order_are_refused(first, second):
    with pytest.raises(ValueError, match="in order"):
        Scenario("vgg", steps=10, save_every=2, peer_kill_step=first, object_kill_step=second)
