from __future__ import annotations

import json
from typing import Any

import pytest

from fastcheck_dask.demo.results import Attempt, Outcome, Recovery, Save, moved, tier_row
from fastcheck_dask.demo.scenario import scenario

DIGESTS = {"weights": "a", "optimizer": "b", "losses": "c"}


def finished(curve: list[float], **changed: str) -> Attempt:
    attempt = Attempt()
    for step, loss in enumerate(curve, 1):
        attempt.take({"event": "step", "step": step, "loss": loss, "seconds": 0.1})
    attempt.take({"event": "done", "digests": DIGESTS | changed, "losses": curve})
    return attempt


def recovery(source: str) -> Recovery:
    found = Recovery(("trainer", "n1"), 2, wanted_source="peers+parity")
    loaded = {"source": source, "step": 1, "raw_bytes": {"peers": 5}, "received_bytes": 3}
    found.note(loaded | {"rebuilt": 1, "skipped": [], "seconds": 0.5})
    return found


def outcome(**changed: Any) -> Outcome:
    attempt = changed.get("attempt", finished([2.0, 1.0]))
    source = changed.get("source", "peers+parity")
    reference = changed.get("reference", finished([2.0, 1.0]))
    return Outcome(scenario("vgg", quick=True), reference, [attempt], [recovery(source)])


def test_faults_same_everything_are_none():
    assert outcome().faults() == []
    json.dumps(outcome().to_dict())


@pytest.mark.parametrize("what", list(DIGESTS))
def test_faults_one_other_digest_is_named(what):
    (fault,) = outcome(attempt=finished([2.0, 1.0], **{what: "x"})).faults()
    assert what in fault


def test_faults_loss_of_one_step_differs_in_last_bit_is_named():
    (fault,) = outcome(attempt=finished([2.0, 1.0 + 2**-52])).faults()
    assert "step 2" in fault


def test_faults_recovery_from_elsewhere_is_named():
    (fault,) = outcome(source="local").faults()
    assert "came from local" in fault


def test_faults_run_that_did_not_finish_are_named():
    killed = Attempt()
    killed.take({"event": "step", "step": 1, "loss": 2.0, "seconds": 0.1})
    assert len(outcome(attempt=killed).faults()) == len(DIGESTS)
    # Nothing on either side is no agreement.
    assert len(outcome(attempt=killed, reference=killed).faults()) == len(DIGESTS) + 1


def test_faults_loss_that_rises_is_named():
    (fault,) = outcome(attempt=finished([1.0, 2.0]), reference=finished([1.0, 2.0])).faults()
    assert "did not fall" in fault


def test_attempt_levels_of_a_save_accumulate():
    attempt = Attempt()
    for level in ("local", "peers"):
        attempt.take({"event": "saved", "tag": "step2", "level": level, "stats": {"at": level}})
    assert attempt.saves["step2"] == Save("step2", ("local", "peers"), {"at": "peers"})
    assert attempt.reached("object") == []
    assert [save.tag for save in attempt.reached("peers")] == ["step2"]


def save(tag: str, *levels: str, **stats: Any) -> Save:
    return Save(tag, levels, {"stall_seconds": 1.0, **stats})


def test_tier_row_takes_medians_of_saves_that_reached_the_tier():
    known = {"raw_bytes": 10, "nodes": ["n1"]}
    saves = [save(f"s{n}", "local", "peers", **known, sent_bytes=n, save_seconds=n / 10) for n in (1, 3, 8)]
    lost = save("lost", "local")
    row = tier_row([*saves, lost], "peers")
    assert row == {"saves": 3, "raw_bytes": 10, "sent_bytes": 3, "seconds": 0.3}
    assert tier_row(saves, "object") is None


def test_moved_save_without_nodes_counts_for_the_object_tier_alone():
    stats = {"raw_bytes": 10, "sent_bytes": 7, "save_seconds": 0.5}
    alone = save("s", "local", "object", **stats, nodes=[])
    assert moved(alone, "peers") is None
    assert moved(alone, "object") == (7, 0.5)
    persisted = save(
        "s", "local", "peers", "object", **stats, nodes=["n1"], persisted_bytes=6, persist_seconds=2.0
    )
    assert moved(persisted, "peers") == (7, 0.5)
    assert moved(persisted, "object") == (6, 2.0)
    assert moved(persisted, "local") == (10, 1.0)


def test_faults_shard_that_was_rebuilt_before_the_load_is_none():
    assert outcome(source="peers").faults() == []
