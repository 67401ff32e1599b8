"""Watches of a SQLite file: what they look at, and that they miss nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import closing

import pytest

from fastcheck_dask.coordination import sqlite_entries
from fastcheck_dask.coordination.embedded import EmbeddedCoordinator
from fastcheck_dask.coordination.entries import Create, Write
from fastcheck_dask.coordination.sqlite_file import SqliteFile


@pytest.fixture
def ends(tmp_path):
    """Return two coordinators of one file."""
    path = tmp_path / "c.db"
    with closing(EmbeddedCoordinator(path)) as one, closing(EmbeddedCoordinator(path)) as other:
        yield one, other


@pytest.fixture
def looks(monkeypatch):
    """Return a list that grows with each transaction that only reads."""
    found = []
    transaction = SqliteFile.transaction

    def counted(self, *, write):
        if not write:
            found.append(write)
        return transaction(self, write=write)

    monkeypatch.setattr(SqliteFile, "transaction", counted)
    return found


def write(coordinator, value):
    coordinator.entries.apply(Write("a", value, coordinator.entries.get("a").version))


def test_watch_does_not_open_a_file_that_is_as_it_was(ends, looks, monkeypatch):
    monkeypatch.setattr(sqlite_entries, "_LOOK_SECONDS", 3600.0)
    one, other = ends
    one.entries.apply(Create("a", b"1"))
    watch = other.entries.watch("a")
    # Making it had the log written back and removed, which is a change of the files.
    watch.wait(0.1)
    looks.clear()
    assert watch.wait(0.3) is False
    assert looks == []
    for value in (b"2", b"3", b"4"):
        write(one, value)
        assert watch.wait(10.0) is True


def test_watch_looks_again_after_a_while_whatever_the_file_is_like(ends, looks, monkeypatch):
    monkeypatch.setattr(sqlite_entries, "_LOOK_SECONDS", 0.0)
    watch = ends[1].entries.watch("a")
    looks.clear()
    assert watch.wait(0.1) is False
    assert looks


def test_watch_many_changes_within_one_tick_are_told(ends):
    one, other = ends
    one.entries.apply(Create("a", b""))
    watch = other.entries.watch("a")
    for number in range(50):
        write(one, b"%d" % number)
        write(one, b"%d" % -number)
        assert watch.wait(10.0) is True
    assert other.entries.get("a").value == b"-49"


def test_watch_dead_process_is_told_though_the_file_is_as_it_was(ends, tmp_path):
    code = (
        "import sys; from fastcheck_dask.coordination.embedded import EmbeddedCoordinator as E; "
        "from fastcheck_dask.coordination.entries import Create; e = E(sys.argv[1]); "
        "e.entries.apply(Create('gone', b'', ephemeral=True)); print('there', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "c.db")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=dict(os.environ),
    ) as process:
        assert process.stdout.readline() == b"there\n"
        watch = ends[0].entries.watch("gone")
        while watch.wait(0.1):
            pass
        process.kill()
        process.wait()
    assert watch.wait(10.0) is True
    assert ends[0].entries.get("gone") is None
