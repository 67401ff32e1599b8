from __future__ import annotations

import sys

from fastcheck_dask.cli.output import moment, plain, progress
from fastcheck_dask.inspection.verification import Fault, Problem, Verified


def test_plain_of_a_result_has_its_properties():
    found = plain(Verified(1, "t", "d", 3, 10, (Problem("x", Fault.MISSING, "gone", fatal=True),)))
    assert found["problems"] == [{"name": "x", "fault": "missing", "detail": "gone", "fatal": True}]
    assert (found["intact"], found["restorable"]) == (False, False)
    assert plain({1: b"x", "inf": float("inf")}) == {"1": "b'x'", "inf": "inf"}


def test_moment_of_any_number_is_text():
    assert moment(0.0) == "1970-01-01 00:00:00"
    assert moment(1e30).endswith("s")


def test_progress_is_silent_but_on_a_terminal(capsys, monkeypatch):
    with progress("x", 3) as advance:
        advance(3)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress("verifying", 3) as advance:
        advance(3)
    assert "verifying" in capsys.readouterr().err
