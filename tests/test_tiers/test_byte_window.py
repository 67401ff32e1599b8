"""The bound on bytes under way."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastcheck_dask.tiers.byte_window import ByteWindow


@settings(max_examples=30, deadline=None)
@given(sizes=st.lists(st.integers(0, 150), min_size=1, max_size=12), limit=st.integers(1, 100))
def test_window_is_never_exceeded_and_everybody_gets_through(sizes, limit):
    window, seen, lock = ByteWindow(limit), [], threading.Lock()

    def go(nbytes):
        with window.room(nbytes), lock:
            seen.append(window.used_bytes)

    threads = [threading.Thread(target=go, args=(nbytes,)) for nbytes in sizes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(seen) == len(sizes)
    assert max(seen) <= limit
    assert window.used_bytes == 0


def test_window_gives_room_back_after_an_error():
    window = ByteWindow(10)
    with pytest.raises(KeyError), window.room(10):
        raise KeyError
    with window.room(10):
        assert window.used_bytes == 10


def test_window_small_request_does_not_overtake_a_large_one():
    window, order = ByteWindow(10), []
    entered = threading.Event()

    def go(nbytes, name):
        entered.set()
        with window.room(nbytes):
            order.append(name)

    with window.room(5):
        large = threading.Thread(target=go, args=(10, "large"))
        large.start()
        while not window._waiting:
            entered.wait(0.01)
        small = threading.Thread(target=go, args=(1, "small"))
        small.start()
        while len(window._waiting) < 2:
            entered.wait(0.01)
    large.join(30)
    small.join(30)
    assert order == ["large", "small"]
