from __future__ import annotations

import json
from dataclasses import replace

import pytest
from rich.console import Console

from fastcheck_dask.demo.report import show, write_summary
from fastcheck_dask.demo.results import Attempt, Outcome, Recovery
from fastcheck_dask.demo.scenario import scenario

STATS = {
    "stall_seconds": 0.123,
    "raw_bytes": 38_400_000,
    "sent_bytes": 39_000_000,
    "save_seconds": 1.25,
    "nodes": ["n10", "n9", "n8", "n7"],
    "persisted_bytes": 31_800_000,
    "persist_seconds": 12.5,
}


@pytest.fixture
def outcome() -> Outcome:
    attempt = Attempt()
    for level in ("local", "peers", "object"):
        attempt.take({"event": "saved", "tag": "step0006", "level": level, "stats": STATS})
    for step, loss in ((1, 4.0), (2, 3.0)):
        attempt.take({"event": "step", "step": step, "loss": loss, "seconds": 0.1})
    digests = {"weights": "a" * 64, "optimizer": "b" * 64, "losses": "c" * 64}
    attempt.take({"event": "done", "digests": digests, "losses": [4.0, 3.0]})
    recovery = Recovery(
        ("trainer", "n10"),
        111,
        wanted_source="peers+parity",
        source="peers+parity",
        step=100,
        raw_bytes={"peers": 125_600_000, "parity": 112_800_000},
        received_bytes=132_600_000,
        load_seconds=10.348,
        back_seconds=111.04,
    )
    return Outcome(scenario("gpt", quick=True), attempt, [attempt], [recovery])


def shown(outcome: Outcome) -> str:
    console = Console(width=80, record=True, quiet=False, force_terminal=False)
    with console.capture() as captured:
        show(console, [outcome])
    return captured.get()


def test_show_80_columns_cut_nothing(outcome):
    text = shown(outcome)
    assert "…" not in text
    for piece in (
        "38.4 MB",
        "39.0 MB",
        "102%",
        "123 ms",
        "12.50 s",
        "parity 112.8 MB",
        "11 of 111",
        "111.0 s",
    ):
        assert piece in text
    assert "bit for bit the same" in text


def test_show_and_summary_a_fault_is_told(outcome, tmp_path):
    assert write_summary(tmp_path / "good.json", [outcome], seed=1, quick=True, seconds=2.0)
    broken = replace(outcome, recoveries=[replace(outcome.recoveries[0], source="object")])
    text = shown(broken)
    assert "wrong: recovery after step 111 came from object" in text
    assert "bit for bit" not in text
    assert not write_summary(tmp_path / "bad.json", [broken], seed=1, quick=True, seconds=2.0)
    assert json.loads((tmp_path / "bad.json").read_text())["ok"] is False
    assert not write_summary(tmp_path / "none.json", [], seed=1, quick=True, seconds=2.0)
