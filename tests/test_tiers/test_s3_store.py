"""The S3 store against a real server that is killed, stopped and made to fail."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from fastcheck_dask.errors import ConfigError, TierError, TierFullError
from fastcheck_dask.testing.s3 import BUCKET, S3Server, s3_environment
from fastcheck_dask.testing.s3_faults import S3Faults
from fastcheck_dask.tiers.object_store import open_store
from fastcheck_dask.tiers.s3_store import WINDOW, S3Store


@pytest.fixture
def faults(s3_server):
    with S3Faults(s3_server.port) as proxy:
        yield proxy


@pytest.fixture
def store(faults, s3_server, request):
    return S3Store(s3_server.url(f"faults/{request.node.name}", endpoint=faults.endpoint), retry_seconds=30.0)


def once(fate, *, method):
    """Return a rule that lets one request fail."""
    left = [fate]
    return lambda asked, _path: left.pop() if left and asked == method else "pass"


@pytest.mark.parametrize("fate", ["refuse", "cut", "lose"])
def test_write_fails_once_is_repeated(store, faults, fate):
    faults.rule = once(fate, method="PUT")
    store.write("a", b"x" * 1000)
    assert store.read("a") == b"x" * 1000
    assert [entry[2] for entry in faults.requests if entry[0] == "PUT"] == [fate, "pass"]


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_read_refused_for_now_is_repeated(store, faults, status):
    store.write("a", b"x")
    faults.status = status
    faults.rule = once("refuse", method="GET")
    assert store.read("a") == b"x"


@pytest.mark.parametrize("fate", ["refuse", "cut", "lose"])
def test_create_answer_lost_is_still_ours(store, faults, fate):
    faults.rule = once(fate, method="PUT")
    assert store.create("marker", b"ours") is True
    assert store.create("marker", b"theirs") is False
    assert store.read("marker") == b"ours"


def test_thirty_percent_refused_everything_arrives(store, faults):
    draw, lock = random.Random(7), threading.Lock()

    def rule(_method, _path):
        with lock:
            return draw.choices(["pass", "refuse", "cut", "lose"], [60, 30, 5, 5])[0]

    faults.rule = rule
    data = {f"c/{number}": bytes([number]) * 5000 for number in range(60)}
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda item: store.write(*item), data.items()))
        assert dict(zip(data, pool.map(store.read, data), strict=True)) == data
    assert sum(entry[2] != "pass" for entry in faults.requests) > 20


def test_store_away_for_good_raises_and_names_it(faults, s3_server):
    store = S3Store(s3_server.url("away", endpoint=faults.endpoint), retry_seconds=0.5)
    faults.rule = lambda _method, _path: "refuse"
    for call in (lambda: store.write("a", b"x"), lambda: store.read("a"), lambda: store.list("a")):
        with pytest.raises(TierError, match=r"s3://checkpoints/away.*is the store up"):
            call()
    faults.rule = lambda _method, _path: "pass"
    store.write("a", b"x")
    assert store.read("a") == b"x"


def test_many_large_writes_bytes_under_way_are_bounded(store, faults):
    data = np.zeros(12 * 2**20, np.uint8)
    with ThreadPoolExecutor(12) as pool:
        list(pool.map(lambda number: store.write(f"large/{number}", data), range(12)))
    assert 0 < faults.most_bytes <= WINDOW.limit_bytes
    assert WINDOW.used_bytes == 0


def test_no_room_is_told_as_such(store, faults):
    faults.status = 507
    store = S3Store(store.location, retry_seconds=0.2)
    faults.rule = lambda _method, _path: "refuse"
    with pytest.raises(TierFullError, match="5 bytes are needed"):
        store.write("a", b"12345")


def test_wrong_secret_is_refused_and_says_what_to_check(s3_server, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    store = S3Store(s3_server.url("secret"))
    for call in (
        lambda: store.write("a", b"x"),
        lambda: store.read("a"),
        lambda: store.list(""),
        lambda: store.create("a", b"x"),
        lambda: store.delete("a"),
    ):
        with pytest.raises(TierError, match="AWS_SECRET_ACCESS_KEY") as caught:
            call()
        assert "wrong" not in str(caught.value)


def test_server_killed_and_back_keeps_what_was_acknowledged(tmp_path):
    with S3Server(tmp_path) as server, s3_environment(server):
        store = S3Store(server.url("run"), retry_seconds=60.0)
        store.write("before", b"x" * 100_000)
        server.kill()
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(store.write, "meanwhile", b"y")
            server.start()
            waiting.result()
        assert store.read("before") == b"x" * 100_000
        assert store.read("meanwhile") == b"y"


def test_missing_client_library_says_what_to_install(monkeypatch, s3_server):
    monkeypatch.setitem(__import__("sys").modules, "fastcheck_dask.tiers.s3_store", None)
    with pytest.raises(ConfigError, match=r"pip install 'fastcheck-dask\[s3\]'"):
        open_store(s3_server.url("never-opened-before"))


def test_open_store_same_location_shares_connections(s3_server):
    assert open_store(s3_server.url("same")) is open_store(s3_server.url("same/"))
    assert open_store(s3_server.url("same")).location.startswith(f"s3://{BUCKET}/same?endpoint=http")
