"""A run in one folder: chains of deltas, each member damaged once, and a saver killed at every store call."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest
import zarr
from fastcheck_codecs import CodecError

from fastcheck_dask.engine.chains import ChainPolicy
from fastcheck_dask.engine.compact import compact
from fastcheck_dask.engine.folder_run import FolderRun
from fastcheck_dask.engine.retention import Retention
from fastcheck_dask.errors import (
    CheckpointNotFoundError,
    ConfigError,
    CorruptDataError,
    RunInUseError,
    ShardUnavailableError,
    UnrecoverableError,
)
from fastcheck_dask.testing.dying_store import Death, DyingStore
from fastcheck_dask.tiers.checkpoint_folder import CheckpointFolder
from fastcheck_dask.tiers.folder_store import FolderStore
from fastcheck_dask.tiers.process_lock import ProcessLock


def make(path, *, store=None, max_deltas=3, max_references=0, **rules):
    path.mkdir(exist_ok=True)
    return FolderRun(
        CheckpointFolder(store or FolderStore(str(path))),
        run="run",
        policy=ChainPolicy(max_deltas, max_references=max_references),
        retention=Retention(**rules),
        chunk_bytes=4096,
    )


def state_of(step):
    """A frozen tensor, one that drifts, one that is new at each step, and one that comes late."""
    frozen = np.random.default_rng(1).normal(size=1500).astype(np.float32)
    weights = np.random.default_rng(2).normal(size=3000).astype(np.float32)
    drift = np.random.default_rng([2, step]).integers(0, 4, weights.size, np.uint32)
    state = {
        "step": step,
        "frozen": frozen,
        "weights": (weights.view(np.uint32) ^ drift).view(np.float32),
        "noise": np.random.default_rng([3, step]).normal(size=600),
        "tiny": np.float32([step, np.nan]),
    }
    if step > 1:
        state["late"] = np.full(300, step, np.int64)
    return state


def same(left, right):
    return left.keys() == right.keys() and all(
        np.asarray(left[k]).tobytes() == np.asarray(right[k]).tobytes() for k in left
    )


def directories(run):
    return [marker.directory for marker in run.folder.committed()]


def test_chain_of_deltas_loads_every_checkpoint_bit_for_bit(tmp_path):
    run = make(tmp_path)
    saves = [run.save(state_of(step), f"s{step}") for step in range(6)]
    assert [save.marker.base is None for save in saves] == [True, False, False, False, True, False]
    assert all(save.deltas and save.shared for save in saves if save.marker.base)
    assert max(save.written_bytes for save in (saves[1], saves[3])) < saves[0].written_bytes / 1.5
    for step in range(6):
        # By a process that has nothing in memory.
        state, marker = make(tmp_path).load(f"s{step}")
        assert same(state, state_of(step))
        assert marker == saves[step].marker
    assert same(make(tmp_path).load()[0], state_of(5))
    assert same(make(tmp_path).load(saves[2].marker.directory)[0], state_of(2))


def test_deltas_go_on_after_a_restart(tmp_path):
    make(tmp_path).save(state_of(0), "a")
    second = make(tmp_path).save(state_of(1), "b")
    assert second.marker.base.directory == "00000001-a"
    assert second.deltas
    assert same(make(tmp_path).load()[0], state_of(1))


def test_unchanged_tensors_take_no_room(tmp_path):
    run = make(tmp_path)
    run.save(state_of(0), "a")
    again = run.save(state_of(0), "b")
    assert (again.written_bytes, again.deltas) == (0, 0)
    assert again.marker.flags == ("unchanged",)
    # But for what stands in the manifest.
    assert {p.parent.parent.name for p in (tmp_path / again.marker.directory).rglob("c/*")} == {"tiny"}
    assert same(make(tmp_path).load("b")[0], state_of(0))


def test_whole_when_asked_and_as_the_policy_says(tmp_path):
    run = make(tmp_path, max_deltas=1)
    bases = [run.save(state_of(step), "t").marker.base for step in range(4)]
    assert [base is None for base in bases] == [True, False, True, False]
    assert run.save(state_of(9), "t", whole=True).marker.base is None
    assert make(tmp_path, max_deltas=0).save(state_of(9), "t").marker.base is None


def test_stock_zarr_refuses_deltas_and_says_what_to_do(tmp_path):
    run = make(tmp_path)
    run.save(state_of(0), "a")
    delta = run.save(state_of(1), "b").marker
    group = zarr.open_group(tmp_path / delta.directory, mode="r")
    for name in ("frozen", "weights", "noise"):
        with pytest.raises(CodecError, match=r"against the checkpoint 00000001-a.*compact"):
            group[name]
    with pytest.raises(CodecError, match="00000001-a"):
        zarr.open(tmp_path / delta.directory / "weights", mode="r")
    assert group["tiny"][0] == 1
    assert zarr.open_group(tmp_path / "00000001-a", mode="r")["weights"][0] == state_of(0)["weights"][0]


def test_compacted_checkpoints_are_whole_and_bases_can_go(tmp_path):
    run = make(tmp_path)
    for step in range(4):
        run.save(state_of(step), f"s{step}")
    done = list(compact(str(tmp_path), tag="s2"))
    assert [(one.generation, one.chunks > 0) for one in done] == [(3, True)]
    assert [one.chunks for one in compact(str(tmp_path), tag="s2")] == [0]
    for step in (2, 3):
        assert same(make(tmp_path).load(f"s{step}")[0], state_of(step))
    run.folder.remove("00000001-s0")
    run.folder.remove("00000002-s1")
    for step in (2, 3):
        assert same(make(tmp_path).load(f"s{step}")[0], state_of(step))
    group = zarr.open_group(tmp_path / "00000003-s2", mode="r")
    for name in ("frozen", "weights", "noise", "late"):
        assert group[name][...].tobytes() == state_of(2)[name].tobytes()
    assert [one.chunks > 0 for one in compact(str(tmp_path), tag=None)] == [False, True]
    assert all(marker.base is None for marker in run.folder.committed())
    with pytest.raises(CheckpointNotFoundError, match="the newest tags are: s3, s2"):
        list(compact(str(tmp_path), tag="s9"))


def dying(root, at, *, after):
    """Return a store that kills its process with SIGKILL before or after the n-th change."""
    return DyingStore(
        FolderStore(root), Death(at, after=after, die=lambda: os.kill(os.getpid(), signal.SIGKILL))
    )


def killed(action):
    """Run an action in a child; return whether it was killed."""
    pid = os.fork()
    if not pid:
        try:
            action()
        except BaseException:
            os._exit(3)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, status
    return os.WIFSIGNALED(status)


@pytest.mark.parametrize(
    ("after", "policy"), [(False, {}), (True, {}), (True, {"max_deltas": 0, "max_references": 1})]
)
def test_saver_killed_at_every_store_call_leaves_the_old_or_the_new_one(tmp_path, monkeypatch, after, policy):
    # Threads do not survive a fork: the chunks are written one after the other.
    monkeypatch.setattr("fastcheck_dask.engine.folder_run._THREADS", 1)
    small = {name: state_of(0)[name] for name in ("step", "frozen", "noise", "tiny")}
    steps = [small | {"step": step, "noise": state_of(step)["noise"]} for step in range(4)]
    calls = 0
    while True:
        calls += 1
        path = tmp_path / str(calls)
        run = make(path, last=1)
        for step in range(2):
            run.save(steps[step], f"s{step}", whole=True)
        before = directories(run)
        assert before == ["00000002-s1"]
        store = dying(str(path), calls, after=after)
        options = {"store": store, "last": 1} | policy
        if not killed(lambda path=path, options=options: make(path, **options).save(steps[2], "s2")):
            assert [m.refs != () for m in run.folder.committed()] == [False, "max_references" in policy]
            break
        state, marker = make(path).load()
        assert same(state, steps[marker.generation - 1])
        assert marker.generation in (2, 3)
        again = make(path, last=1)
        again.save(steps[3], "s3", whole=True)
        assert same(make(path).load()[0], steps[3])
        assert len(directories(again)) == 1
        left = {p.name for p in path.iterdir() if p.name != ".fastcheck"}
        # What never got a marker is not known to anybody, and is no checkpoint.
        assert left <= {*directories(again), "00000003-s2"}
    assert calls > 12


def damage(path, directory, name):
    """Flip a bit of one chunk, or of manifest or marker."""
    found = {
        "marker": path / f".fastcheck/commits/{directory}.json",
        "manifest": path / f".fastcheck/manifests/{directory}.json",
        "chunk": path / directory / "weights/c/0",
    }[name]
    data = bytearray(found.read_bytes())
    data[len(data) // 2] ^= 1
    found.write_bytes(data)


@pytest.mark.parametrize("member", range(4))
@pytest.mark.parametrize("what", ["chunk", "manifest", "marker", "gone"])
def test_every_member_of_a_chain_damaged_is_named_and_load_falls_back(tmp_path, member, what):
    run = make(tmp_path)
    for step in range(4):
        run.save(state_of(step), f"s{step}")
    victim = directories(run)[member]
    if what == "gone":
        run.folder.remove(victim)
    else:
        damage(tmp_path, victim, what)
    for step in range(4):
        if step < member:
            assert same(make(tmp_path).load(f"s{step}")[0], state_of(step))
            continue
        with pytest.raises((CorruptDataError, ShardUnavailableError), match=rf"s{member}"):
            make(tmp_path).load(f"s{step}")
    if member:
        assert same(make(tmp_path).load()[0], state_of(member - 1))
    else:
        with pytest.raises(UnrecoverableError, match="s3"):
            make(tmp_path).load()
    # And the next save does not build upon what is broken.
    saved = make(tmp_path).save(state_of(7), "new")
    assert same(make(tmp_path).load()[0], state_of(7))
    assert saved.marker.base is None or member == 3 or what == "chunk"


def test_flags_nan_where_there_was_none_until_it_is_gone(tmp_path, caplog):
    run = make(tmp_path)
    flags = []
    for step, poison in enumerate([False, True, True, False]):
        state = state_of(step)
        if poison:
            state["weights"][7] = np.inf
        flags.append(run.save(state, f"s{step}", metrics={"loss": step}).marker.flags)
    # `tiny` had a NaN from the beginning, and may.
    assert flags == [(), ("nonfinite",), ("nonfinite",), ()]
    assert "is flagged: NaN or infinity in weights" in caplog.text
    assert [marker.metrics for marker in run.folder.committed()] == [{"loss": n} for n in range(4)]


def test_metrics_that_are_not_finite_come_back(tmp_path):
    run = make(tmp_path)
    run.save(state_of(0), "a", metrics={"loss": float("nan"), "best": float("-inf")})
    state, marker = make(tmp_path).load()
    assert same(state, state_of(0))
    assert np.isnan(marker.metrics["loss"])
    assert marker.metrics["best"] == float("-inf")


def test_second_process_is_refused_and_nothing_was_saved_is_none(tmp_path):
    run = make(tmp_path)
    assert run.load() is None
    lock = ProcessLock(tmp_path / ".fastcheck/trainer.lock", role="trainer")
    (tmp_path / ".fastcheck").mkdir()
    assert lock.acquire()
    with pytest.raises(RunInUseError, match="is used by"):
        run.save(state_of(0), "a")
    lock.release()
    run.save(state_of(0), "a")
    with pytest.raises(ConfigError):
        run.save(state_of(0), "a/b")


@pytest.mark.parametrize("failing", range(1, 8))
def test_codec_that_fails_at_any_chunk_shows_nothing_and_shortens_nothing(tmp_path, monkeypatch, failing):
    run = make(tmp_path / "c")
    run.save(state_of(0), "s0", whole=True)
    encode, calls = run._encoder.encode, []

    def fails(*arguments, **options):
        calls.append(1)
        if len(calls) == failing:
            raise CodecError("half way through")
        return encode(*arguments, **options)

    monkeypatch.setattr(run._encoder, "encode", fails)
    with pytest.raises(CodecError, match="half way"):
        run.save(state_of(1), "s1", whole=True)
    monkeypatch.undo()
    assert [marker.tag for marker in run.folder.committed()] == ["s0"]
    written = {
        path.partition("/")[2]: run.folder.store.size(path) for path in run.folder.store.list("00000002-s1")
    }
    run.save(state_of(1), "s1", whole=True)
    assert all(run.folder.store.size(f"00000002-s1/{key}") == size for key, size in written.items())
    assert same(make(tmp_path / "c").load()[0], state_of(1))
