"""Sessions and watches of the entries of every coordinator; the same tests for each."""

from __future__ import annotations

import contextlib
import os
import threading

import pytest

from fastcheck_dask.coordination.entries import (
    Create,
    Delete,
    Entry,
    Write,
)
from fastcheck_dask.errors import ClosedError

#: For what needs other processes.
real = pytest.mark.parametrize(
    "kind", ["embedded", pytest.param("zookeeper", marks=pytest.mark.zookeeper)], indirect=True
)


@pytest.fixture
def url(entries_url):
    return entries_url


@pytest.fixture
def coordinator(holder):
    return holder


# Sessions


def test_ephemeral_names_its_session_and_goes_with_it(opened, entries):
    first, second = opened(), opened()
    first.entries.apply(Create("live/a", b"x", ephemeral=True))
    second.entries.apply(Create("live/b", b"", ephemeral=True))
    names = first.entries.session, second.entries.session
    assert [entry.session for entry in entries.get_many("live/a", "live/b")] == list(names)
    assert len({*names, entries.session, ""}) == 4
    second.entries.apply(Write("live/a", b"y", 0))
    assert entries.get("live/a") == Entry(b"y", 1, names[0])
    first.close()
    assert entries.names("live") == ("b",)
    entries.apply(Create("live/a", b"new"))
    assert entries.get("live/a") == Entry(b"new", 0)


def test_session_ended_ephemerals_go_and_the_next_one_has_another_name(
    coordinator, entries, others, expire, eventually
):
    entries.apply(Create("live/a", b"", ephemeral=True), Create("stays", b""))
    before = entries.session
    watch, elsewhere = entries.watch("unrelated"), others.watch("live")
    expire(coordinator)
    assert elsewhere.wait(20.0)
    assert others.names("live") == ()
    assert watch.wait(20.0)
    eventually(lambda: entries.connected and entries.session != before)
    entries.apply(Create("live/a", b"again", ephemeral=True))
    assert others.get_many("live/a", "stays") == [Entry(b"again", 0, entries.session), Entry(b"", 0)]
    watch.close()
    elsewhere.close()


@real
def test_process_killed_its_ephemerals_go_and_watchers_are_told(url, entries, actor_of):
    actor = actor_of(url)
    session = actor.ask("make", "live/a")
    watch = entries.watch("live")
    assert entries.get("live/a") == Entry(b"", 0, session)
    actor.kill()
    while entries.names("live"):
        assert watch.wait(20.0)
    watch.close()


@real
def test_process_paused_loses_its_session_and_knows_when_it_wakes(
    url, coordinator, entries, actor_of, eventually
):
    actor = actor_of(url)
    session = actor.ask("make", "live/a")
    assert actor.ask("standing") == [True, session]
    actor.pause(coordinator)
    watch = entries.watch("live/a")
    assert entries.get("live/a") == Entry(b"", 0, session)
    while entries.get("live/a") is not None:
        assert watch.wait(20.0)
    watch.close()
    # Asked before it wakes: this is the first thing that it does.
    actor.tell("standing")
    actor.resume()
    assert actor.answer() != [True, session]
    eventually(lambda: actor.ask("standing")[0])
    assert actor.ask("make", "live/a") not in (session, "EntryConflictError")
    assert entries.get("live/a").session == actor.ask("standing")[1]


def test_close_then_use_says_closed_and_wakes_those_who_wait(coordinator, entries, others):
    watch = entries.watch("a")
    told = []
    waiter = threading.Thread(target=lambda: told.append(watch.wait(None)), daemon=True)
    waiter.start()
    coordinator.close()
    waiter.join(20.0)
    assert told == [True]
    assert watch.wait(None) is True
    watch.close()
    assert not entries.connected
    for call in (
        lambda: entries.get("a"),
        lambda: entries.get("a", fresh=False),
        lambda: entries.get_many("a"),
        lambda: entries.names("a"),
        lambda: entries.apply(Create("a", b"")),
        lambda: entries.watch("a"),
    ):
        with pytest.raises(ClosedError):
            call()
    assert others.get("a") is None


@real
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_fork_child_is_refused_and_harms_nothing(coordinator, entries, others):
    entries.apply(Create("a", b"", ephemeral=True))
    watch = entries.watch("a")
    child = os.fork()
    if not child:
        refused = 0
        for call in (
            lambda: entries.get("a"),
            lambda: entries.names("a"),
            lambda: entries.apply(Create("b", b"")),
            lambda: entries.watch("a"),
            lambda: watch.wait(5.0),
        ):
            try:
                call()
            except ClosedError:
                refused += 1
        with contextlib.suppress(BaseException):
            watch.close()
            coordinator.close()
            refused += not entries.connected
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 6
    assert others.get_many("a", "b") == [Entry(b"", 0, entries.session), None]
    assert entries.connected
    others.apply(Write("a", b"x", 0))
    assert watch.wait(20.0)


# Watches


@pytest.mark.parametrize(
    "change",
    [
        Create("a/new", b""),
        Create("a/b/new", b""),
        Create("a/deep/er", b""),
        Write("a", b"x", None),
        Delete("a/b", 0),
    ],
)
def test_watch_change_of_value_or_names_is_told_once(entries, others, change):
    entries.apply(Create("a/b", b""))
    watched = "a/b" if change.path.startswith("a/b") else "a"
    watch, second = entries.watch(watched), entries.watch(watched)
    assert not watch.wait(0.0)
    others.apply(change)
    assert watch.wait(20.0)
    assert second.wait(20.0)
    watch.close()
    assert watch.wait(20.0) is False
    watch.close()
    others.apply(Create(f"{watched}/more", b"") if entries.get(watched) else Create(watched, b""))
    assert second.wait(20.0)
    second.close()


def test_watch_what_is_not_there_its_coming_and_names_are_told(entries, others):
    watch = entries.watch("a/b")
    for change in (
        Create("a/b", b""),
        Create("a/b/c", b""),
        Delete("a/b/c", None),
        Delete("a/b", None),
        Create("a/b", b""),
    ):
        others.apply(change)
        assert watch.wait(20.0)
    watch.close()


def test_watch_closed_by_another_thread_returns(entries):
    watch = entries.watch("a")
    told = []
    waiter = threading.Thread(target=lambda: told.append(watch.wait(None)), daemon=True)
    waiter.start()
    watch.close()
    waiter.join(20.0)
    assert told == [False]


def test_watch_never_misses_the_last_change(entries, others):
    rounds = 50
    entries.apply(Create("count", b"0"))
    watch, seen = entries.watch("count"), []

    def follow():
        while not seen or seen[-1] < rounds:
            seen.append(int(entries.get("count").value))
            if seen[-1] < rounds and not watch.wait(20.0):
                return

    follower = threading.Thread(target=follow)
    follower.start()
    for number in range(1, rounds + 1):
        others.apply(Write("count", str(number).encode(), None))
        # Now and then the last change for a while: a missed one would not be made good by the next.
        if number % 10 == 0:
            while number not in seen and follower.is_alive():
                follower.join(0.001)
    follower.join(60.0)
    watch.close()
    assert seen[-1] == rounds
    assert seen == sorted(seen)
