"""The states protocol in every order, and each of its defences switched off: then it has to be seen."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from fastcheck_dask.coordination.entries import Check, Write
from fastcheck_dask.coordination.states import protocol
from fastcheck_dask.coordination.states.bits import StateBits
from fastcheck_dask.coordination.states.value import state_path, version_path
from fastcheck_dask.coordination.steps import Apply, Get
from fastcheck_dask.testing.exploring import explore, wander
from fastcheck_dask.testing.state_world import NODE, Bounds, Rules, StateWorld

QUIET = Bounds(updates=1, operations=2, reads=1, elections=0, lost=0, crashed=0)
EVERYTHING = Bounds(
    updates=4, operations=9, reads=4, elections=3, lost=2, repeated=2, unknown=2, expired=2, crashed=1
)


def reader_is_answered(world):
    return world.reader is None


@pytest.mark.parametrize(
    "bounds",
    [
        replace(QUIET, updates=2, operations=3),
        replace(QUIET, reads=2, elections=1),
        replace(QUIET, elections=2),
        replace(QUIET, crashed=1, elections=1),
        replace(QUIET, lost=1, elections=1),
        replace(QUIET, unknown=1, crashed=1),
        replace(QUIET, unknown=1, lost=1),
        replace(QUIET, expired=1),
        replace(QUIET, repeated=2),
    ],
    ids=str,
)
def test_read_every_order_is_never_old_and_never_waits_for_ever(bounds):
    found = explore(StateWorld.start(bounds), goal=reader_is_answered, seconds=110)
    assert not found.fault, str(found)
    assert found.complete, str(found)


@pytest.mark.parametrize("seed", range(3))
def test_read_everything_goes_wrong_is_never_old(seed, model_walks):
    for number in range(model_walks):
        found = wander(StateWorld.start(EVERYTHING), seed=1_000_000 * seed + number, steps=400)
        assert not found.fault, f"seed {1_000_000 * seed + number}: {found}"


# The defences


class WrittenUnderAnyMaster(Rules):
    def update(self, value, number):
        return altered(super().update(value, number), lambda want: without_checks(want))


class VersionReadAfterBegin(Rules):
    def update(self, value, number):
        steps = super().update(value, number)
        want = next(steps)
        try:
            while True:
                if isinstance(want, Apply):
                    paths = (version_path(NODE), state_path(NODE))
                    version, state = yield Get(paths)
                    want = Apply(
                        tuple(
                            anew(change, dict(zip(paths, (version, state), strict=True)))
                            for change in want.changes
                        )
                    )
                want = yield from passed_on(steps, want)
        except StopIteration as end:
            return end.value


class LateOnesNotRuledOut(Rules):
    def rule_out(self, operation, fencing_token):
        (entry,) = yield Get((version_path(operation.node),))
        return -1 if entry is None else entry.version


class NoLeases(Rules):
    def sweeps(self):
        return False


class AnyEndClears(Rules):
    class bits(StateBits):
        def end(self, operation, fencing_token, version):
            for begun in [one for one, _ in self.bits.values() if one.node == operation.node]:
                self.ruled_out(begun, version)
            return {}


class OldReads(Rules):
    fresh = False


def passed_on(steps, want):
    try:
        answer = yield want
    except Exception as error:
        return steps.throw(error)
    return steps.send(answer)


def altered(steps, change):
    want = next(steps)
    try:
        while True:
            want = yield from passed_on(steps, change(want))
    except StopIteration as end:
        return end.value


def without_checks(want):
    if not isinstance(want, Apply):
        return want
    return Apply(tuple(change for change in want.changes if not isinstance(change, Check)))


def anew(change, found):
    """Return a change made for what is there now."""
    entry = found.get(change.path)
    if isinstance(change, Check) or entry is None:
        return change
    return Write(change.path, change.value, entry.version)


def confirmed_by_nobody(monkeypatch):
    monkeypatch.setattr(protocol, "is_confirmed", lambda epoch, office: True)


def never_read_again(monkeypatch):
    monkeypatch.setattr(protocol, "is_current", lambda known, version, nonce: known is not None)


@pytest.mark.parametrize(
    ("rules", "bounds", "patch", "fault"),
    [
        (WrittenUnderAnyMaster, replace(QUIET, elections=1), None, "was begun before its call"),
        (Rules, replace(QUIET, elections=2), confirmed_by_nobody, "was begun before its call"),
        (VersionReadAfterBegin, QUIET, None, "was begun before its call"),
        (LateOnesNotRuledOut, QUIET, None, "was begun before its call"),
        (NoLeases, replace(QUIET, crashed=1), None, "waits for ever"),
        (AnyEndClears, replace(QUIET, updates=2, operations=3, unknown=1, repeated=1), None, "took effect"),
        (OldReads, replace(QUIET, updates=2), None, "older than"),
        (Rules, replace(QUIET, reads=2, updates=2), never_read_again, "older than"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_defence_switched_off_is_seen(rules, bounds, patch, fault, monkeypatch):
    if patch is not None:
        patch(monkeypatch)
    found = explore(StateWorld.start(bounds, rules()), goal=reader_is_answered)
    sys.stdout.write(f"{found}\n")
    assert fault in found.fault, str(found)
    assert found.trace
