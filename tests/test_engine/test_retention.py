"""What stays: properties of the decision, and removal that can be cut short anywhere."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastcheck_dask.config import settings
from fastcheck_dask.engine.chains import ChainPolicy, chain_of
from fastcheck_dask.engine.retention import Retention, retire
from fastcheck_dask.errors import ConfigError, TierError
from fastcheck_dask.tiers.commit_marker import CommitMarker


def marker(generation, *, base=None, hours=0.0, **noted):
    return CommitMarker(
        "run", generation, f"t{generation}", f"token{generation}", "0" * 64, 1, hours * 3600,
        None if base is None else base.link, **noted,
    )  # fmt: skip


@st.composite
def histories(draw):
    """Return markers with chains, flags and metrics; now and then one is missing."""
    found = []
    for generation in range(1, draw(st.integers(1, 14)) + 1):
        against = found[-1] if found and draw(st.booleans()) else None
        metrics = draw(st.dictionaries(st.just("loss"), st.floats(allow_nan=True), max_size=1))
        flags = draw(st.sampled_from([(), (), ("nonfinite",)]))
        refs = draw(st.lists(st.sampled_from(found), max_size=2, unique_by=id)) if found else []
        one = marker(generation, base=against, hours=generation, metrics=metrics, flags=flags)
        found.append(replace(one, refs=tuple(ref.link for ref in refs)))
    gone = draw(st.sets(st.sampled_from(found[:-1]), max_size=1)) if len(found) > 1 else set()
    return [m for m in found if m not in gone]


RULES = st.builds(
    Retention,
    last=st.none() | st.integers(1, 20),
    every=st.none() | st.integers(1, 6),
    hours=st.none() | st.floats(0.5, 20),
    best=st.none() | st.tuples(st.just("loss"), st.sampled_from(["min", "max"]), st.integers(1, 4)),
)


@given(histories(), RULES, st.none() | st.integers(0, 15))
def test_removable_never_takes_what_is_needed(history, rules, proven):
    removed = rules.removable(history, proven=proven)
    left = [m for m in history if m not in removed]
    assert history[-1] in left
    healthy = [m for m in history if not m.flags]
    assert not healthy or healthy[-1] in left
    here, there = ({m.directory: m for m in markers} for markers in (history, left))
    for one in left:
        # What could be read still can: a chain that was unbroken still is.
        assert chain_of(one, here) == chain_of(one, there)
        assert {link.directory for link in one.needs.links} & here.keys() <= there.keys()
    if rules.last:
        assert set(map(id, history[-rules.last :])) <= set(map(id, left))
    if rules.every:
        assert all(m in left for m in history if m.generation % rules.every == 0)
    if rules.hours:
        assert all(m in left for m in history if history[-1].generation - m.generation <= rules.hours)
    if proven is not None:
        assert all(m in left for m in history if m.generation >= proven)
    # Once is enough, and without a rule nothing goes.
    assert rules.removable(left, proven=proven) == []
    assert removed == [] or not rules.keeps_all


@given(histories(), st.integers(1, 5))
def test_removable_of_whole_healthy_ones_is_all_but_the_last(history, last):
    plain = [replace(m, base=None, refs=(), flags=(), metrics={}) for m in history]
    assert Retention(last=last).removable(plain) == plain[:-last]


def test_best_ones_stay_by_their_metric_and_nan_is_not_good():
    losses = [3.0, 1.0, float("nan"), 2.0, 9.0]
    markers = [marker(n, metrics={"loss": loss}) for n, loss in enumerate(losses, 1)]

    def stay(*best):
        removed = Retention(best=best).removable(markers)
        return [m.generation for m in markers if m not in removed]

    assert stay("loss", "min", 1) == [2, 5]
    assert stay("loss", "min", 2) == [2, 4, 5]
    assert stay("loss", "max", 2) == [1, 5]
    assert stay("accuracy", "max", 2) == [5]


def test_of_settings_none_and_minus_one_keep_everything():
    assert Retention.of(settings()).keeps_all
    for name in ("keep_last", "keep_every", "keep_hours"):
        assert Retention.of(settings(**{name: -1})).keeps_all
        assert Retention.of(settings(**{name: -1, "keep_best": ("loss", "min", 1)})).keeps_all
    assert Retention.of(settings(keep_last=10**9)) == Retention(last=10**9)
    assert Retention.of(settings(keep_best=["loss", "min", 3])).best == ("loss", "min", 3)
    assert Retention.of(settings(keep_hours=0.5, keep_every=7)) == Retention(every=7, hours=0.5)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(
            (name, value)
            for name in ("keep_last", "keep_every", "keep_hours")
            for value in (0, -2, "x", True)
        ),
        ("keep_last", 1.5),
        ("keep_hours", float("nan")),
        *(("keep_best", value) for value in ("loss", ("loss", "min"), ("loss", "least", 1), ("", "min", 1))),
        ("keep_best", ("loss", "max", 0)),
        ("persist", "delta"),
        ("max_deltas", -1),
    ],
)
def test_of_settings_that_cannot_be_are_refused(name, value):
    with pytest.raises(ConfigError, match=name):
        settings(**{name: value})


def test_retire_removes_deltas_before_their_bases_and_can_be_cut_short(rig, states):
    # Three deltas follow each whole one.
    run = rig(nodes=0, chains=ChainPolicy(3))
    for step in range(6):
        run.save_to_objects(states.of(1, step=step), f"s{step}")
    store, removed = run.folder.store, []

    class Failing:
        location = store.location

        def __getattr__(self, name):
            method = getattr(store, name)

            def call(path, *arguments):
                if name == "delete" and "commits" in path:
                    if len(removed) == 2:
                        raise TierError("cut short")
                    removed.append(path)
                return method(path, *arguments)

            return call

    folder = type(run.folder)(Failing())
    with pytest.raises(TierError, match="cut short"):
        retire(folder, Retention(last=1))
    assert [path.split("/")[-1] for path in removed] == ["00000004-s3.json", "00000003-s2.json"]
    assert [m.generation for m in run.folder.committed()] == [1, 2, 5, 6]
    for generation in (1, 2, 5, 6):
        assert states.same(run.read(generation), states.of(1, step=generation - 1))
    retire(run.folder, Retention(last=1))
    # The newest is a delta: its base stays.
    assert [m.generation for m in run.folder.committed()] == [5, 6]
    assert not store.list(".fastcheck/removals")
    assert {path.split("/")[0] for path in store.list("")} == {".fastcheck", "00000005-s4", "00000006-s5"}


def test_retire_finishes_what_was_cut_short_after_the_marker_was_gone(rig, states):
    run = rig(nodes=0)
    for step in range(2):
        run.save_to_objects(states.of(1, step=step), f"s{step}")
    store = run.folder.store
    store.write(".fastcheck/removals/00000001-s0", b"")
    store.write(".fastcheck/removals/00000002-s1", b"")
    store.delete(".fastcheck/commits/00000001-s0.json")
    retire(run.folder, Retention(last=5))
    assert not [path for path in store.list("") if "s0" in path]
    assert states.same(run.read(2), states.of(1, step=1))


def test_retire_removes_nothing_while_a_marker_cannot_be_read(rig, states, caplog):
    run = rig(nodes=0)
    for step in range(3):
        run.save_to_objects(states.of(1, step=step), f"s{step}")
    run.folder.store.write(".fastcheck/commits/00000009-x.json", b"newer")
    with caplog.at_level(logging.WARNING):
        assert retire(run.folder, Retention(last=1)) == []
    assert "00000009-x" in caplog.text


@given(
    last=st.none() | st.integers(1, 9),
    every=st.none() | st.integers(1, 9),
    hours=st.none() | st.floats(0.1, 99.0),
    best=st.none() | st.tuples(st.text(), st.sampled_from(["min", "max"]), st.integers(1, 9)),
)
def test_rules_as_text_come_back(last, every, hours, best):
    rules = Retention(last, every, hours, best)
    assert Retention.from_text(rules.to_text()) == rules


@pytest.mark.parametrize("text", ["{", "[]", "1", '{"first": 1}', '{"best": [1]}', '{"best": 7}'])
def test_rules_that_cannot_be_read_keep_everything(text):
    assert Retention.from_text(text).keeps_all
