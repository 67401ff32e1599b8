from __future__ import annotations

import pytest

from fastcheck_dask.errors import TierError
from fastcheck_dask.testing.dying_store import Death, DyingStore
from fastcheck_dask.tiers.object_store import open_store


@pytest.mark.parametrize(("after", "there"), [(False, ["a"]), (True, ["a", "b"])])
def test_store_dies_before_or_after_the_change_and_stays_dead(tmp_path, after, there):
    store = open_store(str(tmp_path / "store"))
    dying = DyingStore(store, Death(2, after=after))
    assert dying.location == store.location
    dying.write("a", b"1")
    with pytest.raises(TierError, match="it dies"):
        dying.write("b", b"2")
    assert (sorted(store.list("")), dying.read("a")) == (there, b"1")
    with pytest.raises(TierError):
        dying.delete("a")
    assert store.exists("a") is not after


def test_store_dies_in_the_middle_of_many_changes(tmp_path):
    store = open_store(str(tmp_path / "store"))
    with pytest.raises(TierError):
        DyingStore(store, Death(5, after=False)).write_all((f"{n}", b"x") for n in range(9))
    assert len(store.list("")) == 4


def test_stores_of_one_process_die_together(tmp_path):
    death = Death(2, after=False)
    stores = [DyingStore(open_store(str(tmp_path / name)), death) for name in ("one", "other")]
    stores[0].write("a", b"1")
    for store in stores:
        with pytest.raises(TierError):
            store.write("b", b"2")
