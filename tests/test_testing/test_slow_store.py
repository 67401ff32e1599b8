import numpy as np
import pytest

from fastcheck_dask.testing.slow_store import SlowStore, Throttle
from fastcheck_dask.tiers.object_store import open_store


def test_throttle_lets_bytes_pass_one_after_the_other():
    now, waits = [0.0], []
    throttle = Throttle(100.0, clock=lambda: now[0], sleep=waits.append)
    throttle.take(50)
    throttle.take(100)
    now[0] = 10.0
    throttle.take(10)
    assert waits == pytest.approx([0.5, 1.5, 0.1])
    assert throttle.passed == 160


def test_store_counts_what_is_written_and_read(tmp_path):
    waits = []
    throttle = Throttle(1.0, clock=lambda: 0.0, sleep=waits.append)
    store = SlowStore(open_store(str(tmp_path / "x")), throttle)
    store.write("a", (b"ab", b"c"))
    store.write("b", b"1234")
    assert throttle.passed == 7
    assert store.read("a") == b"abc"
    part = np.zeros(4, np.uint8)
    assert store.read_into("b", (part,)) is None
    assert store.read_into("a", (part,)) == b"abc"
    assert part.tobytes() == b"1234"
    assert throttle.passed == 17
    assert store.list("") == ("a", "b")
