"""Checkpoints made whole: cut short anywhere, by Dask workers, and while somebody removes them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from distributed import LocalCluster

from fastcheck_dask.engine import compact as module
from fastcheck_dask.engine.chains import ChainPolicy
from fastcheck_dask.engine.compact import compact
from fastcheck_dask.errors import CorruptDataError, ShardUnavailableError, TierError
from fastcheck_dask.tiers.checkpoint_folder import CheckpointFolder
from fastcheck_dask.tiers.commit_marker import Needs


@pytest.fixture
def chain(rig, states):
    """Return a run with a whole checkpoint and two deltas."""
    run = rig(nodes=0, chains=ChainPolicy())
    for step in range(3):
        run.save_to_objects(states.of(1, step=step), f"s{step}")
    return SimpleNamespace(
        run=run,
        location=run.folder.store.location,
        intact=lambda: all(states.same(run.read(n), states.of(1, step=n - 1)) for n in (1, 2, 3)),
    )


def test_compact_cut_short_at_every_write_can_be_repeated(chain, monkeypatch):
    real, calls = module.open_store, 0

    class Failing:
        def __init__(self, location):
            self._store, self.location = real(location), location

        def __getattr__(self, name):
            method = getattr(self._store, name)

            def call(*arguments):
                nonlocal calls
                calls += name == "write"
                if name == "write" and calls == fail_at:
                    raise TierError("cut short")
                return method(*arguments)

            return call

    monkeypatch.setattr(module, "open_store", Failing)
    monkeypatch.setattr(module, "_THREADS", 1)
    fail_at = 0
    while True:
        fail_at, calls = fail_at + 1, 0
        try:
            list(compact(chain.location, tag="s2"))
        except TierError:
            assert chain.intact()
        else:
            break
    # Each attempt goes on where the one before was cut short.
    assert fail_at > 5
    assert [m.base is None for m in chain.run.folder.committed()] == [True, False, True]
    assert chain.intact()


@pytest.mark.slow
def test_compact_by_dask_workers(chain):
    with LocalCluster(n_workers=2, processes=False, dashboard_address=":0") as cluster:
        done = list(compact(chain.location, tag=None, scheduler=cluster.scheduler_address))
    assert [one.chunks > 0 for one in done] == [False, True, True]
    assert all(m.base is None for m in chain.run.folder.committed())
    assert chain.intact()


def test_compact_of_a_damaged_chain_leaves_it_as_it_was(chain):
    store, path = chain.run.folder.store, "00000001-s0/w0/c/0"
    data = bytearray(store.read(path))
    data[len(data) // 2] ^= 1
    store.write(path, data)
    with pytest.raises(CorruptDataError, match="00000001-s0"):
        list(compact(chain.location, tag="s2"))
    assert chain.run.folder.committed()[-1].base is not None


def test_compact_does_not_bring_back_what_was_removed_meanwhile(chain, monkeypatch):
    whole = CheckpointFolder._write_root

    def removed_now(self, manifest, base):
        whole(self, manifest, base)
        self.remove("00000003-s2")

    monkeypatch.setattr(CheckpointFolder, "_write_root", removed_now)
    with pytest.raises(ShardUnavailableError, match="not in"):
        list(compact(chain.location, tag="s2"))
    assert [m.generation for m in chain.run.folder.committed()] == [1, 2]


def test_compact_describes_anew_what_another_author_described_as_a_delta(chain):
    list(compact(chain.location, tag="s2"))
    marker = chain.run.folder.committed()[-1]
    manifest = chain.run.folder.load_manifest(marker)
    needs = Needs(chain.run.folder.committed()[1].link)
    chain.run.folder._write_root(manifest, needs)
    assert not chain.run.folder.is_shown_whole(marker, manifest)
    assert [one.chunks for one in compact(chain.location, tag="s2")] == [0]
    assert chain.run.folder.is_shown_whole(marker, manifest)
