from __future__ import annotations

import socket
import time

import pytest

from fastcheck_dask.coordination import connect
from fastcheck_dask.coordination.connect import sqlite_path, zookeeper_place
from fastcheck_dask.coordination.embedded import EmbeddedCoordinator
from fastcheck_dask.errors import ConfigError, CoordinationError


@pytest.mark.parametrize(
    "url",
    [
        "",
        "redis://host",
        "/data/coord.db",
        "sqlite:",
        "sqlite:///",
        "sqlite:///data/",
        "sqlite://host/data.db",
        "zk:host:2181",
        "zk://",
        "zk:///root",
        "zk://host:99999/root",
        "zk://host:x/root",
        "zk://host,/root",
        "zk://user@host/root",
        "zk://host/root//deep",
        "zk://host/../root",
    ],
)
def test_connect_wrong_url_says_what_is_wanted(url):
    with pytest.raises(ConfigError, match=r"zk://host:port|made of names"):
        connect(url)


@pytest.mark.parametrize("setting", ["timeout_seconds", "session_seconds"])
@pytest.mark.parametrize("seconds", [0, -1, float("inf"), float("nan")])
def test_connect_senseless_time_is_refused(tmp_path, setting, seconds):
    with pytest.raises(ConfigError, match=setting):
        connect(f"sqlite://{tmp_path}/c.db", **{setting: seconds})


def test_connect_sqlite_creates_file_and_folder(tmp_path):
    coordinator = connect(f"sqlite://{tmp_path}/a b/100%?/c.db")
    assert isinstance(coordinator, EmbeddedCoordinator)
    assert coordinator.path == tmp_path / "a b" / "100%?" / "c.db"
    assert coordinator.path.exists()
    coordinator.close()


def test_connect_sqlite_relative_is_below_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    coordinator = connect("sqlite:sub/c.db")
    monkeypatch.chdir("/")
    assert coordinator.nodes() == ()
    assert (tmp_path / "sub" / "c.db").exists()
    coordinator.close()


def test_sqlite_path_spellings():
    assert [str(sqlite_path(f"sqlite:{rest}")) for rest in ("///a/b", "////a/b", "/a/b", "a/b")] == [
        "/a/b",
        "/a/b",
        "/a/b",
        "a/b",
    ]


def test_zookeeper_place_spellings():
    assert zookeeper_place("zk://h1:1,h2,[::1]:3/a/b/") == ("h1:1,h2:2181,[::1]:3", "/a/b")
    assert zookeeper_place("zk://h/") == ("h:2181", "/fastcheck")


def test_connect_zookeeper_down_fails_within_timeout():
    # Bound and not listening: nobody else gets the port, and every connection is refused.
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        host = f"127.0.0.1:{nobody.getsockname()[1]}"
        begin = time.monotonic()
        with pytest.raises(CoordinationError, match=rf"ZooKeeper at {host} did not answer within 0\.5 s"):
            connect(f"zk://{host}/root", timeout_seconds=0.5)
    assert 0.5 <= time.monotonic() - begin < 8.0
