"""What a node that leads is made of."""

from __future__ import annotations

from typing import Any

import pytest

from fastcheck_dask.master import storage_node
from fastcheck_dask.master.storage_node import master_of_nodes
from fastcheck_dask.node.background import background
from fastcheck_dask.testing.fakes import FakeCoordinator


def test_master_works_as_often_and_as_fast_as_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(storage_node, "MasterService", lambda duties: made.append(duties))
    work = background(drill_every=50, drill_rate=2e6, repair_every=3, repair_rate=4e6, sweep_every=7)
    master_of_nodes(FakeCoordinator(), work=work)
    duties = {duty.name: duty for duty in made[0]()}
    assert duties["lease sweep"].interval_seconds == 7
    assert duties["repair"].interval_seconds == 3
    assert duties["repair"]._bytes_per_second == 4e6
    drill = duties["restore drill"]
    assert (drill._drill_seconds, drill._bytes_per_second) == (50, 2e6)
