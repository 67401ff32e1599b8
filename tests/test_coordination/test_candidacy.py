"""Elections in every order, and each of their checks switched off: then it has to be seen."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastcheck_dask.coordination import candidacy
from fastcheck_dask.coordination.candidacy import (
    EPOCH,
    Candidate,
    Standing,
    line,
    predecessor,
    standing,
)
from fastcheck_dask.coordination.entries import Check, Create, Delete, Entry, Write
from fastcheck_dask.coordination.steps import Apply, Get, Session, Wait
from fastcheck_dask.testing.election_world import ElectionBounds, ElectionRules, ElectionWorld
from fastcheck_dask.testing.exploring import explore, wander

BOUNDS = ElectionBounds()
names = st.text("abc", min_size=1, max_size=2)
candidates = st.builds(
    Standing, names, nonce=names, address=st.just(""), stood=st.integers(0, 3), session=names
)


@given(st.lists(candidates, unique_by=lambda one: one.name), candidates)
def test_line_master_first_then_who_stood_first(found, master):
    ordered = line(master, found)
    assert sorted(ordered, key=lambda one: one.name) == sorted(found, key=lambda one: one.name)
    holders = [one for one in found if (one.name, one.nonce) == (master.name, master.nonce)]
    assert ordered[: len(holders)] == holders
    turns = [(one.stood, one.name) for one in ordered[len(holders) :]]
    assert turns == sorted(turns)


@given(st.lists(candidates, min_size=1, unique_by=lambda one: one.name))
def test_predecessor_everybody_has_another_and_one_has_none(found):
    ordered = line(None, found)
    watched = [predecessor(Candidate(one.name, "", ""), ordered) for one in ordered]
    assert watched == [None, *ordered[:-1]]


def test_standing_reads_its_own_bytes():
    me = Candidate("a", "fcs://h:1", "n")
    assert standing(Entry(me.to_bytes(7), 3, "s")) == Standing("a", "n", "fcs://h:1", 7, "s")


@pytest.mark.parametrize(
    "value", [b"", b"{}", b"[]", b"\xff", b'{"name":1,"nonce":"","address":"","stood":1}']
)
def test_standing_of_nobody_is_none(value):
    assert standing(Entry(value, 0)) is None
    assert standing(None) is None


@pytest.mark.parametrize(
    ("bounds", "who"),
    [
        (replace(BOUNDS, resigned=0), "ab"),
        (replace(BOUNDS, expired=0), "ab"),
        (replace(BOUNDS, expired=0, resigned=0, unknown=1), "ab"),
        (replace(BOUNDS, expired=0, candidacies=1, acts=0), "abc"),
    ],
    ids=str,
)
def test_election_every_order_one_master_acts_and_somebody_can_lead(bounds, who):
    found = explore(ElectionWorld.start(bounds, candidates=who), seconds=110)
    assert not found.fault, str(found)
    assert found.complete, str(found)


def test_election_nobody_ends_somebody_always_leads():
    """While sessions last and nobody resigns, whatever happened before, somebody can come to lead."""
    bounds = ElectionBounds(acts=1, candidacies=1, expired=0, resigned=0, unknown=1)
    found = explore(ElectionWorld.start(bounds, candidates="ab"), goal=lambda world: world.led)
    assert not found.fault, str(found)
    assert found.complete, str(found)


@pytest.mark.parametrize("seed", range(3))
def test_election_five_candidates_and_everything_goes_wrong(seed, model_walks):
    bounds = ElectionBounds(acts=9, candidacies=4, expired=4, resigned=4, unknown=4)
    for number in range(model_walks // 5):
        start = ElectionWorld.start(bounds, candidates="abcde")
        found = wander(start, seed=1_000_000 * seed + number, steps=300)
        assert not found.fault, f"seed {1_000_000 * seed + number}: {found}"


# The checks


class Altered(ElectionRules):
    """Candidates whose changes are altered."""

    def take_office(self, me):
        steps = super().take_office(me)
        want = next(steps)
        try:
            while True:
                if isinstance(want, Apply):
                    want = Apply(tuple(one for one in map(self.alter, want.changes) if one is not None))
                try:
                    answer = yield want
                except Exception as error:
                    want = steps.throw(error)
                else:
                    want = steps.send(answer)
        except StopIteration as end:
            return end.value

    def alter(self, change):
        return change


class WithoutOwnCandidacy(Altered):
    def alter(self, change):
        return None if isinstance(change, Check) and change.path != EPOCH else change


class WithoutVersion(Altered):
    def alter(self, change):
        return replace(change, version=None) if isinstance(change, Write) and change.path == EPOCH else change


class StandsUnderAnyEpoch(Altered):
    def alter(self, change):
        return None if isinstance(change, Check) and change.path == EPOCH else change


class NotFenced(ElectionRules):
    def act(self, office):
        return super().act(office)[1:]


def nobody_in_office(monkeypatch):
    real = candidacy.line
    monkeypatch.setattr(candidacy, "line", lambda master, found: real(None, found))


@pytest.mark.parametrize(
    ("rules", "patch", "fault"),
    [
        (WithoutOwnCandidacy, None, "its candidacy had ended"),
        (WithoutVersion, None, "two masters|deposed|acted after"),
        (StandsUnderAnyEpoch, None, "overtakes"),
        (NotFenced, None, "acted after its successor"),
        (ElectionRules, nobody_in_office, "which still stood"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_check_switched_off_is_seen(rules, patch, fault, monkeypatch):
    if patch is not None:
        patch(monkeypatch)
    found = explore(ElectionWorld.start(BOUNDS, rules()))
    sys.stdout.write(f"{found}\n")
    assert any(part in found.fault for part in fault.split("|")), str(found)


@pytest.mark.parametrize("changed", ["nothing", "session", "mine", "before", "another before"])
def test_who_waits_looks_only_at_itself_and_whoever_is_before_it(changed):
    """A look of everybody at everybody would be the square of their number."""
    me, before = Candidate("b", "", "n"), Candidate("a", "", "m")
    mine, its = Entry(me.to_bytes(5), 0, "s"), Entry(before.to_bytes(5), 0, "t")
    steps = candidacy.take_office(me)
    assert next(steps) == Get((EPOCH,))
    steps.send([Entry(b"{}", 5)])
    steps.send("s")
    steps.send(("a", "b"))
    assert steps.send([mine, its, mine]) == Wait(before.path, candidacy.LOOK_SECONDS)
    for _ in range(2):
        assert steps.send(None) == Session()
        assert steps.send("s") == Get((me.path, before.path))
        assert steps.send([mine, its]) == Wait(before.path, candidacy.LOOK_SECONDS)
    steps.send(None)
    steps.send("u" if changed == "session" else "s")
    other = Entry(Candidate("a", "", "k").to_bytes(6), 0, "t")
    found = {"mine": [None, its], "before": [mine, None], "another before": [mine, other]}
    want = steps.send(found.get(changed, [mine, its]))
    assert isinstance(want, Wait if changed == "nothing" else Get)
    if changed != "nothing":
        assert want == Get((EPOCH,))


def test_resign_leaves_the_candidacy_of_another_process_of_the_name_alone():
    me, other = Candidate("a", "", "n"), Candidate("a", "", "m")
    for found in (None, Entry(other.to_bytes(5), 0, "s"), Entry(b"?", 0, "s")):
        steps = candidacy.resign(me)
        assert next(steps) == Get((me.path,))
        with pytest.raises(StopIteration):
            steps.send([found])
    steps = candidacy.resign(me)
    next(steps)
    assert steps.send([Entry(me.to_bytes(5), 3, "s")]) == Apply((Delete(me.path, 3),))


def test_creates_are_the_only_ephemeral_ones():
    me = Candidate("a", "", "n")
    steps = candidacy.take_office(me)
    next(steps)
    steps.send([Entry(b"{}", 5)])
    steps.send("s")
    steps.send(())
    assert steps.send([None]) == Apply((Check(EPOCH, 5), Create(me.path, me.to_bytes(5), ephemeral=True)))
