"""Ranks that take turns in any order, one of them harmed at every step: no joint save is half done."""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastcheck_dask.coordination.base import CommitRecord
from fastcheck_dask.coordination.entries import OutcomeUnknownError
from fastcheck_dask.coordination.joint import Rank, run_of_rank
from fastcheck_dask.coordination.joint_saves import JointSaves
from fastcheck_dask.coordination.rank_coordinator import RankCoordinator
from fastcheck_dask.errors import (
    CommitConflictError,
    CoordinationError,
    FencedError,
    RunInUseError,
)
from fastcheck_dask.testing.clock import FakeClock
from fastcheck_dask.testing.fakes import FakeCoordinator

PATIENCE = 60.0
RECORD = CommitRecord("r", 1, "t", "k", "d", ("n0",), ("a",), 1, False, 1, 1.5)


class _Killed(BaseException):
    """How a rank dies."""


class Turns:
    """One thread runs at a time, and asks before each step."""

    def __init__(self) -> None:
        self.mine = _taken()
        self.theirs: dict[object, threading.Lock] = {}
        self.waiting: dict[object, str] = {}
        self.killed: set[object] = set()

    def start(self, who: object, thread: threading.Thread) -> None:
        """Let a thread come to its first step."""
        self.theirs[who] = _taken()
        thread.start()
        assert self.mine.acquire(timeout=30)

    def step(self, who: object, what: str) -> None:
        """Wait for the turn; called by the thread of `who`."""
        self.waiting[who] = what
        self.mine.release()
        assert self.theirs[who].acquire(timeout=300)
        if who in self.killed:
            raise _Killed

    def give(self, who: object) -> None:
        """Let `who` make one step; returns when it waits again or is over."""
        self.theirs[who].release()
        assert self.mine.acquire(timeout=30)


def _taken() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock


class Stepped:
    """Asks for the turn before each call of what it wraps."""

    def __init__(self, inner, life, calls):
        self._inner, self._life, self._calls = inner, life, calls

    def __getattr__(self, name):
        found = getattr(self._inner, name)
        if name not in self._calls:
            return found

        def call(*arguments, **options):
            self._life.turn(name)
            return found(*arguments, **options)

        return call


class SteppedEntries(Stepped):
    """Entries whose replies can be lost, and whose watches pass the turn on."""

    def apply(self, *changes):
        self._life.turn("apply")
        lost, self._life.lose = self._life.lose, None
        if lost is not False:
            self._inner.apply(*changes)
        if lost is not None:
            raise OutcomeUnknownError("the answer was lost")

    def watch(self, path):
        return _Watch(self._life)


class _Watch:
    def __init__(self, life):
        self._life = life

    def wait(self, seconds):
        late = self._life.world.clock.now() - self._life.began - PATIENCE
        assert late <= 0 or seconds == 0, "waits beyond the deadline"
        self._life.turn("wait")
        return True

    def close(self):
        pass


@dataclass
class Node:
    """What the nodes of one rank hold; they outlive its processes."""

    committed: str | None = None
    prepared: str | None = None
    dropped: list[str] = field(default_factory=list)
    order: int = 0

    def begin(self, token: str, base: str | None, order: int) -> None:
        if order < self.order:
            raise FencedError("a newer owner has begun")
        self.order = order
        self.commit(base)
        self.abort(self.prepared)
        self.prepared = token

    def commit(self, token: str | None) -> None:
        if token is not None and token == self.prepared:
            self.committed, self.prepared = token, None

    def abort(self, token: str | None) -> None:
        if token is not None and token == self.prepared:
            self.dropped.append(token)
            self.prepared = None


class Life:
    """One process of a rank: saves some tags, one after the other, as an agent does."""

    def __init__(self, world, rank, tags, takeover=False):
        self.world, self.rank, self.tags, self.takeover = world, rank, tags, takeover
        self.lose = None
        self.told: dict[str, str] = {}
        self.waited: list[float] = []
        self.began = world.clock.now()
        self.session = world.coordinator.another()
        inner = Stepped(self.session, self, {"claim", "owner", "commit", "abort", "newest_decided", "latest"})
        inner.entries = SteppedEntries(self.session.entries, self, {"get", "get_many", "names"})
        me = Rank(rank, world.size)
        self.coordinator = RankCoordinator(inner, run="r", me=me, commit_seconds=PATIENCE, clock=world.clock)
        self.alive = True
        self.thread = threading.Thread(target=self.main, daemon=True)
        world.turns.start(self, self.thread)

    def turn(self, what):
        self.world.turns.step(self, what)

    def main(self):
        try:
            self.turn("start")
            self.run()
        except _Killed:
            pass
        except (RunInUseError, FencedError) as error:
            self.told["start"] = str(error)
        except BaseException as error:
            self.world.errors.append(error)
        finally:
            self.alive = False
            self.session.close()
            self.world.turns.mine.release()

    def run(self):
        run = run_of_rank("r", self.rank)
        claim = self.coordinator.claim(run, f"rank {self.rank}", takeover=self.takeover)
        for tag in self.tags:
            try:
                self.save(run, tag, claim)
            except CommitConflictError as error:
                self.told[tag] = f"aborted: {error}"
            except CoordinationError as error:
                self.told[tag] = f"doubt: {error}"

    def save(self, run, tag, claim):
        node = self.world.nodes[self.rank]
        generation = self.coordinator.newest_decided(run) + 1
        latest = self.coordinator.latest(run)
        token = f"{tag}/{self.rank}/{next(self.world.count)}"
        node.begin(token, None if latest is None else latest.token, claim.order)
        record = replace(RECORD, run=run, generation=generation, tag=tag, token=token)
        self.began = self.world.clock.now()
        try:
            found = self.coordinator.commit(record, claim)
        except (CommitConflictError, FencedError):
            node.abort(token)
            raise
        finally:
            self.waited.append(self.world.clock.now() - self.began)
        assert found.token == token
        self.told[tag] = "committed"
        self.turn("announce")
        node.commit(token)


class World:
    def __init__(self, size, tags):
        self.size = size
        self.turns, self.clock, self.count = Turns(), FakeClock(), itertools.count()
        self.coordinator = FakeCoordinator()
        self.nodes = [Node() for _ in range(size)]
        self.errors: list[BaseException] = []
        self.lives: list[Life] = []
        for rank in range(size):
            self.start(rank, tags)

    def start(self, rank, tags, *, takeover=False):
        self.lives.append(Life(self, rank, tags, takeover))

    def present(self):
        return [life for life in self.lives if life.alive]

    def kill(self, life):
        """As SIGKILL does: the claim is over, and nothing more is done."""
        self.turns.killed.add(life)
        self.turns.give(life)
        life.thread.join(30)

    def finish(self):
        """Let everybody run to the end; time passes only when all wait."""
        for _ in range(20_000):
            present = self.present()
            if not present:
                return
            if all(self.turns.waiting[life] == "wait" for life in present):
                self.clock.advance(1.0)
            for life in present:
                self.turns.give(life)
        raise AssertionError("somebody waits for ever")

    def saves(self):
        saves = JointSaves(self.coordinator.entries, "r", Rank(0, self.size))
        return [saves.read(number) for number in saves.numbers()]

    def check(self):
        assert self.errors == []
        views = self.saves()
        committed = [view for view in views if view.outcome is not None and view.outcome.committed]
        for view in committed:
            assert not view.missing
            assert view.outcome.tokens == tuple(view.parts[r].record.token for r in range(self.size))
        safe = {token for view in committed for token in view.outcome.tokens}
        for node in self.nodes:
            assert not safe & set(node.dropped), "a node dropped a part of a committed checkpoint"
        if committed:
            for rank, node in enumerate(self.nodes):
                assert committed[-1].outcome.tokens[rank] in (node.committed, node.prepared)
        for life in self.lives:
            for tag, told in life.told.items():
                tokens = {t for t in safe if t.startswith(f"{tag}/{life.rank}/")}
                assert not (told == "committed" and not tokens)
        return committed


ACTIONS = st.one_of(
    st.tuples(st.just("step"), st.integers(0, 3)),
    st.tuples(st.just("run"), st.integers(0, 3)),
    st.tuples(st.sampled_from(["kill", "takeover"]), st.integers(0, 3)),
    st.tuples(st.just("lose"), st.integers(0, 3), st.booleans()),
    st.tuples(st.just("wait"), st.sampled_from([1.0, PATIENCE / 2, PATIENCE])),
)


@settings(max_examples=200, deadline=None)
@given(size=st.integers(2, 3), actions=st.lists(ACTIONS, max_size=60))
def test_ranks_interleaved_every_joint_save_is_all_or_nothing(size, actions):
    world = World(size, ["t1", "t2"])
    for action, *what in actions:
        present = world.present()
        if action == "wait":
            world.clock.advance(what[0])
        if not present or action == "wait":
            continue
        life = present[what[0] % len(present)]
        match action:
            case "step":
                world.turns.give(life)
            case "run":
                for _ in range(12):
                    if life.alive:
                        world.turns.give(life)
            case "lose":
                life.lose = what[1]
            case "kill":
                world.kill(life)
                world.start(life.rank, ["t2", "t3"])
            case "takeover":
                world.start(life.rank, ["t1", "t2"], takeover=True)
    world.finish()
    world.check()
    next_life(world)


@settings(max_examples=100, deadline=None)
@given(size=st.integers(2, 3), turns=st.lists(st.integers(0, 2), max_size=60))
def test_ranks_interleaved_undisturbed_each_tag_has_one_joint_save(size, turns):
    world = World(size, ["t1", "t2"])
    for turn in turns:
        present = world.present()
        world.turns.give(present[turn % len(present)])
    world.finish()
    assert [view.save.tag for view in world.saves()] == ["t1", "t2"]
    assert len(world.check()) == 2


def next_life(world):
    """All ranks are started anew: they find everything settled, and save."""
    for rank in range(world.size):
        world.start(rank, ["end"])
    world.finish()
    committed = world.check()
    assert committed[-1].save.tag == "end"
    assert all(life.told == {"end": "committed"} for life in world.lives[-world.size :])
    for rank in range(world.size):
        commits = world.coordinator.commits(run_of_rank("r", rank))
        assert [one.token for one in commits] == [view.outcome.tokens[rank] for view in committed]


@pytest.mark.parametrize("others", ["before", "after"])
@pytest.mark.parametrize("how", ["kill", "takeover", "lost", "lost but done"])
def test_rank_disturbed_at_every_step_its_next_life_loses_nothing(how, others):
    for steps in itertools.count():
        world = World(2, ["t1"])
        victim, other = world.lives
        while others == "before" and world.turns.waiting[other] != "wait":
            world.turns.give(other)
        for _ in range(steps):
            if victim.alive:
                world.turns.give(victim)
            if others == "after" and other.alive:
                world.turns.give(other)
        if not victim.alive:
            break
        match how:
            case "kill":
                world.kill(victim)
                world.start(0, ["t2"])
            case "takeover":
                world.start(0, ["t1"], takeover=True)
                # It joins while the one before sleeps, which then wakes up.
                while world.lives[-1].alive and world.turns.waiting[world.lives[-1]] != "wait":
                    world.turns.give(world.lives[-1])
            case _:
                victim.lose = how == "lost but done"
        world.finish()
        world.check()
        next_life(world)
    assert steps > 20


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_undisturbed_commit_every_tag_together(size):
    world = World(size, ["a", "b", "c"])
    world.finish()
    committed = world.check()
    assert [view.save.tag for view in committed] == ["a", "b", "c"]
    assert all(life.told == dict.fromkeys("abc", "committed") for life in world.lives)


def steps_of_a_save() -> int:
    """Return after how many steps a rank alone waits for the other one."""
    world = World(2, ["t1"])
    life, steps = world.lives[0], 0
    while world.turns.waiting[life] != "wait":
        world.turns.give(life)
        steps += 1
    world.finish()
    return steps


def test_rank_killed_at_every_step_the_others_are_told_which():
    for steps in range(steps_of_a_save() + 1):
        world = World(2, ["t1"])
        first, second = world.lives
        while world.turns.waiting[second] != "wait":
            world.turns.give(second)
        for _ in range(steps):
            if first.alive:
                world.turns.give(first)
        if first.alive:
            world.kill(first)
        world.finish()
        world.check()
        prepared = 0 in world.saves()[0].parts
        if prepared:
            assert second.told["t1"] == "committed"
        else:
            assert "rank 0" in second.told["t1"]


def test_rank_that_never_comes_is_named_after_the_deadline():
    world = World(2, ["t1"])
    world.kill(world.lives[0])
    world.finish()
    assert "rank 0 had not prepared 't1' within 60 s" in world.lives[1].told["t1"]
    assert PATIENCE <= world.lives[1].waited[0] <= PATIENCE + 2


def world_with_first_killed_after_it_was_seen():
    world = World(2, ["t1"])
    first, second = world.lives
    # It has claimed its run, and goes no further.
    while world.coordinator.owner("r.r00000") is None:
        world.turns.give(first)
    while world.turns.waiting[second] != "wait":
        world.turns.give(second)
    world.kill(first)
    return world, second


def test_rank_that_died_after_it_was_seen_is_noticed_at_once():
    world, second = world_with_first_killed_after_it_was_seen()
    world.finish()
    assert "rank 0 died" in second.told["t1"]
    assert second.waited[0] < 5


def test_rank_that_was_started_anew_after_it_was_seen_is_noticed_at_once():
    world, second = world_with_first_killed_after_it_was_seen()
    # Its next life owns the run before anybody has looked.
    world.lives[0] = next_life = Life(world, 0, [])
    while world.coordinator.owner("r.r00000") is None:
        world.turns.give(next_life)
    for _ in range(20):
        if second.alive:
            world.turns.give(second)
    assert "rank 0 died" in second.told["t1"]
    world.finish()
    assert second.waited[0] < 5


def test_ranks_with_different_tags_are_told_both():
    world = World(2, ["same"])
    world.finish()
    first, second = Life(world, 0, ["left", "same2"]), Life(world, 1, ["right", "same2"])
    world.lives += [first, second]
    world.finish()
    world.check()
    told = first.told | second.told
    assert "'right'" in told["left"] or "'left'" in told["right"]
    assert world.saves()[-1].save.tag == "same2"
    assert (first.told["same2"], second.told["same2"]) == ("committed", "committed")
