"""What every store of the object tier does; the same tests for each, against a real S3 server."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from fastcheck_dask.errors import ConfigError, ShardUnavailableError
from fastcheck_dask.tiers.object_store import open_store
from fastcheck_dask.tiers.s3_store import READ_BYTES

ODD_NAMES = [
    "model/layers.0.weight/c/0",
    "we ird/%41/#x?y",
    "ü/ß",
    "a:b/~c",
    ".fastcheck/x",
    "{a}/*",
    "a+b=c&d",
]


@pytest.fixture(params=["folder", "s3"])
def location(request, tmp_path):
    if request.param == "folder":
        return str(tmp_path / "ckpts")
    return request.getfixturevalue("s3_location")


@pytest.fixture
def store(location):
    return open_store(location)


@pytest.mark.parametrize(
    "data",
    [b"", b"x", bytearray(b"abc"), memoryview(b"abcdef")[1:4], np.arange(7, dtype=np.uint8)],
    ids=["empty", "bytes", "bytearray", "view", "array"],
)
def test_write_any_buffer_reads_back_equal(store, data):
    store.write("a/b", data)
    assert store.read("a/b") == bytes(data)
    assert store.size("a/b") == len(bytes(data))
    assert store.exists("a/b")


def test_write_over_existing_replaces_it(store):
    store.write("a", b"long one")
    store.write("a", b"short")
    assert store.read("a") == b"short"


def test_write_parts_are_one_object(store):
    store.write("a", (b"ab", memoryview(b""), np.arange(3, dtype=np.uint8)))
    assert store.read("a") == b"ab\0\1\2"


@pytest.mark.parametrize("sizes", [(5,), (2, 0, 3), (0, 5)])
def test_read_into_fills_parts_of_the_very_length(store, sizes):
    store.write("a", b"abcde")
    parts = tuple(np.zeros(size, np.uint8) for size in sizes)
    assert store.read_into("a", parts) is None
    assert b"".join(parts) == b"abcde"


@pytest.mark.parametrize("sizes", [(), (4,), (2, 4)])
def test_read_into_parts_of_another_length_returns_all_and_fills_none(store, sizes):
    store.write("a", b"abcde")
    parts = tuple(np.zeros(size, np.uint8) for size in sizes)
    assert store.read_into("a", parts) == b"abcde"
    assert not any(part.any() for part in parts)


def test_read_into_empty_object(store):
    store.write("a", b"")
    assert store.read_into("a", (np.zeros(0, np.uint8),)) is None
    assert store.read_into("a", (np.zeros(1, np.uint8),)) == b""


@pytest.mark.parametrize("more", [-1, 0, 1, READ_BYTES + 3])
def test_read_large_object_whole(store, more):
    data = np.random.default_rng(more + 2).integers(0, 256, READ_BYTES + more, np.uint8)
    store.write("large", data)
    assert store.size("large") == data.size
    assert store.read("large") == data.tobytes()


def test_create_second_time_returns_false_and_keeps_the_first(store):
    assert store.create("m", b"first") is True
    assert store.create("m", b"second") is False
    assert store.read("m") == b"first"


def test_create_raced_has_one_winner(location):
    barrier = threading.Barrier(8)

    def race(number):
        store = open_store(location)
        barrier.wait()
        return store.create("commits/x", str(number).encode() * 100)

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(race, range(8)))
    assert won.count(True) == 1
    assert open_store(location).read("commits/x") == str(won.index(True)).encode() * 100


def test_list_prefix_is_sorted_and_ends_at_the_folder(store):
    for name in ("b/2", "b/1", "b/c/3", "bb/4", "a"):
        store.write(name, b"x")
    assert store.list("b") == ("b/1", "b/2", "b/c/3")
    assert store.list("") == ("a", "b/1", "b/2", "b/c/3", "bb/4")
    assert store.list("nothing") == ()


def test_list_more_names_than_one_answer_holds(store):
    names = sorted(f"many/{number}" for number in range(1100))
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: store.write(name, b"x"), names))
    assert list(store.list("many")) == names
    store.delete_tree("many")
    assert store.list("many") == ()


def test_absent_name_raises_and_says_where(store):
    for call in (store.read, store.size, lambda path: store.read_into(path, (np.zeros(1, np.uint8),))):
        with pytest.raises(ShardUnavailableError, match="no/such is not in"):
            call("no/such")
    assert not store.exists("no/such")


def test_delete_is_idempotent_and_takes_nothing_else(store):
    store.write("a/b", b"x")
    store.write("a/bc", b"y")
    store.delete("a/b")
    store.delete("a/b")
    assert store.list("") == ("a/bc",)


def test_delete_tree_takes_all_below_and_nothing_beside(store):
    for name in ("t/a", "t/b/c", "tt", "u"):
        store.write(name, b"x")
    store.delete_tree("t")
    store.delete_tree("t")
    assert store.list("") == ("tt", "u")


@pytest.mark.parametrize("path", ["", "/a", "a/", "a//b", "../a", "a/../b", "a/./b", "a\0b"])
@pytest.mark.parametrize("method", ["write", "create", "read", "size", "delete"])
def test_name_that_leads_outside_is_refused(store, path, method):
    arguments = (b"x",) if method in ("write", "create") else ()
    with pytest.raises(ConfigError):
        getattr(store, method)(path, *arguments)


@pytest.mark.parametrize("name", ODD_NAMES)
def test_odd_names_are_literal(store, name):
    store.write(name, b"x")
    assert store.read(name) == b"x"
    assert store.list("") == (name,)


def test_sync_returns(store):
    store.write("a/b", b"x")
    store.sync("a")


def test_two_locations_do_not_mix(location, store):
    other = open_store(location.replace("ckpts", "others"))
    store.write("a", b"x")
    assert other.list("") == ()


def test_listing_says_sizes_and_times_of_what_list_names(store):
    for number, name in enumerate(ODD_NAMES):
        store.write(name, b"x" * number)
    found = store.listing("")
    assert [stored.path for stored in found] == list(store.list("")) == sorted(ODD_NAMES)
    assert {stored.path: stored.nbytes for stored in found} == {n: i for i, n in enumerate(ODD_NAMES)}
    assert all(abs(stored.modified_unix - time.time()) < 300 for stored in found)
    assert store.listing("nothing/here") == ()


def test_temporaries_of_finished_writes_there_are_none(store):
    store.write("a/b", b"x")
    assert store.temporaries() == ()
    assert store.remove_temporaries(older_than_seconds=0) == 0
    assert store.list("") == ("a/b",)
