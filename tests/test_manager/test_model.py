"""The manager against a dict: random trees saved, loaded by tag, by pattern and after restarts."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from fastcheck_dask import FastCheckManager

DTYPES = ("float32", "float64", "int8", "uint16", "bool", "complex64")
arrays = st.builds(
    lambda dtype, size, seed: (
        np.random.default_rng(seed)
        .integers(0, 256, size * np.dtype(dtype).itemsize, dtype=np.uint8)
        .view(np.uint8 if dtype == "bool" else dtype)
    ),
    st.sampled_from(DTYPES),
    st.integers(0, 700),
    st.integers(0, 5),
)
scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=5))
leaves = st.one_of(arrays, scalars)
keys = st.one_of(st.sampled_from(["w", "b", "exp_avg"]), st.integers(0, 3))
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(keys, inner, max_size=3),
        st.tuples(inner, inner),
    ),
    max_leaves=6,
)
states = st.fixed_dictionaries({"model": trees, "step": st.integers()})
TAGS = st.sampled_from(["a", "b", "step_9", "step_10"])


def same(found: Any, wanted: Any) -> bool:
    """Compare two trees bit for bit, types included."""
    if type(found) is not type(wanted):
        return False
    if isinstance(wanted, dict):
        return list(found) == list(wanted) and all(
            type(a) is type(b) and same(found[a], wanted[b]) for a, b in zip(found, wanted, strict=True)
        )
    if isinstance(wanted, list | tuple):
        return len(found) == len(wanted) and all(map(same, found, wanted))
    if isinstance(wanted, np.ndarray):
        return (found.dtype, found.shape, found.tobytes()) == (wanted.dtype, wanted.shape, wanted.tobytes())
    return bool(found == wanted)


class ManagerModel(RuleBasedStateMachine):
    saved = Bundle("saved")

    @initialize()
    def start(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="fastcheck-model-"))
        self.history: list[tuple[str, Any]] = []
        self.manager = self.open()

    def open(self) -> FastCheckManager:
        return FastCheckManager(
            self.folder / "objects", local_dir=self.folder / "shm", encoders=1, chunk_bytes=512
        )

    @rule(target=saved, tag=TAGS, state=states)
    def save(self, tag: str, state: Any) -> str:
        handle = self.manager.save_async(state, tag)
        self.history.append((tag, state))
        handle.wait()
        assert handle.generation == len(self.history)
        return tag

    @rule(target=saved, tag=TAGS, state=states)
    def save_without_waiting(self, tag: str, state: Any) -> str:
        self.manager.save_async(state, tag)
        self.history.append((tag, state))
        return tag

    @rule()
    def load_newest(self) -> None:
        found = self.manager.load()
        if self.history:
            assert same(found, self.history[-1][1])
        else:
            assert found is None

    @rule(tag=saved)
    def load_tag(self, tag: str) -> None:
        wanted = next(state for name, state in reversed(self.history) if name == tag)
        assert same(self.manager.load(tag=tag), wanted)

    @rule(tag=saved)
    def load_part(self, tag: str) -> None:
        wanted = next(state for name, state in reversed(self.history) if name == tag)
        assert self.manager.load(tag=tag, include="step") == {"step": wanted["step"]}

    @rule(keep_local=st.booleans())
    def restart(self, keep_local: bool) -> None:
        self.manager.close(keep_local=keep_local)
        self.manager = self.open()

    @invariant()
    def lists_what_was_saved(self) -> None:
        if hasattr(self, "history"):
            self.manager.wait_until_finished(30.0)
            assert self.manager.tags() == [tag for tag, _ in self.history]

    def teardown(self) -> None:
        with contextlib.suppress(AttributeError):
            self.manager.close()
            shutil.rmtree(self.folder)


ManagerModel.TestCase.settings = settings(
    max_examples=4,
    stateful_step_count=12,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
test_manager_behaves_like_a_dict = ManagerModel.TestCase
