"""Groups and frozen layers with a real agent and a real model: what is written, and what comes back."""

from __future__ import annotations

import shutil
from typing import Any

import numpy as np
import pytest

from fastcheck_dask import FastCheckManager, Group, open_checkpoint
from fastcheck_dask.errors import ConfigError, UnrecoverableError

torch = pytest.importorskip("torch")


def model_of() -> Any:
    """Return a model of which the backbone is frozen, and its optimizer."""
    torch.manual_seed(3)
    model = torch.nn.ModuleDict(
        {
            "backbone": torch.nn.Linear(300, 300),
            "embed": torch.nn.Embedding(400, 20),
            "head": torch.nn.Linear(300, 5),
        }
    )
    model["backbone"].requires_grad_(requires_grad=False)
    trained = [p for p in model.parameters() if p.requires_grad]
    return model, torch.optim.AdamW(trained, lr=1e-2)


def step_of(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    out = model["head"](model["backbone"](torch.randn(8, 300))).sum()
    (out + model["embed"](torch.randint(0, 400, (30,))).square().sum()).backward()
    optimizer.step()


def copy_of(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: copy_of(value) for key, value in state.items()}
    if isinstance(state, list):
        return [copy_of(value) for value in state]
    return state.clone() if torch.is_tensor(state) else state


def same(left: Any, right: Any) -> bool:
    if isinstance(right, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in right)
    if isinstance(right, list):
        return len(left) == len(right) and all(map(same, left, right))
    return torch.equal(left, right) if torch.is_tensor(right) else left == right


def test_frozen_backbone_is_written_once_and_every_step_comes_back(make: Any) -> None:
    model, optimizer = model_of()
    options: dict[str, Any] = {"persist": "incremental", "max_deltas": 0, "chunk_bytes": 2**16}
    manager, bare = make(**options), make("bare", local_dir=None, run_id="bare-groups", **options)
    frozen = sum(p.nbytes for p in model["backbone"].parameters())
    states = []
    for step in range(4):
        step_of(model, optimizer)
        trained = {name: t for name, t in model.state_dict().items() if not name.startswith("backbone")}
        states.append(
            copy_of({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step})
        )
        handle = manager.save_async(states[-1], f"s{step}").wait("object", timeout=60.0)
        without = bare.save_async(states[-1] | {"model": trained}, f"s{step}").wait("object", timeout=60.0)
        cost = handle.stats["sent_bytes"] - without.stats["sent_bytes"]
        assert cost > frozen / 2 if step == 0 else cost < frozen / 100
    manager.close()
    again = make(**options)
    for step, state in enumerate(states):
        assert same(again.load(f"s{step}"), state)
        assert again.last_load.older == {}


def test_group_with_an_interval_is_older_only_where_it_was_asked_for(make: Any, tmp_path: Any) -> None:
    options: dict[str, Any] = {"persist": "incremental", "chunk_bytes": 2**14}
    manager = make(groups=[Group("embeddings", match="model/embed*", persist_every=3)], **options)
    model, optimizer = model_of()
    states = []
    for step in range(3):
        step_of(model, optimizer)
        states.append(copy_of({"model": model.state_dict(), "step": step}))
        manager.save_async(states[-1], f"s{step}").wait("object", timeout=60.0)
    # Shared memory has the newest as it was, and keeps it.
    assert same(manager.load(), states[2])
    manager.close()
    manager = make(**options)
    assert same(manager.load(), states[2])
    assert manager.last_load.older == {}
    manager.close()
    shutil.rmtree(tmp_path / "shm", ignore_errors=True)
    mixed = {**states[2], "model": states[2]["model"] | {"embed.weight": states[0]["model"]["embed.weight"]}}

    again = make(groups=[{"name": "embeddings", "match": "model/embed*", "persist-every": 3}], **options)
    assert same(again.load(), mixed)
    assert again.last_load.older["embeddings"].tag == "s0"
    # The state that was loaded is the next one's beginning, and is saved as it is.
    step_of(model, optimizer)
    later = copy_of({"model": model.state_dict(), "step": 3})
    again.save_async(later, "s3").wait("object", timeout=60.0)
    again.close()
    shutil.rmtree(tmp_path / "shm", ignore_errors=True)

    plain = make(**options)
    assert same(plain.load(), later)
    with pytest.raises(UnrecoverableError, match=r"embeddings of generation 1 only.*older_groups=True"):
        plain.load("s2")
    assert same(plain.load("s2", older_groups=True), mixed)
    opened = open_checkpoint(plain.path("s2"))
    assert "group embeddings is of generation 1 (s0)" in repr(opened)
    assert np.array_equal(opened["model/embed.weight"][...], states[0]["model"]["embed.weight"].numpy())


def test_groups_need_incremental_persisting_and_names_of_their_own(tmp_path: Any) -> None:
    group = Group("a", "model/*", 3)
    for groups, options in [
        ([group], {}),
        ([group, group], {"persist": "incremental"}),
        ("model/*", {"persist": "incremental"}),
        ([{"name": "a"}], {"persist": "incremental"}),
        ([3], {"persist": "incremental"}),
        ([group], {"persist": "incremental", "rank": 0, "world_size": 2}),
        ([Group("a", "model/*", root=tmp_path / "objects")], {"persist": "incremental"}),
        ([Group("a", "model/*", root=tmp_path / "objects/a")], {"persist": "incremental"}),
        ([{"name": "a", "match": "*", "root": "gs://a/b"}], {"persist": "incremental"}),
    ]:
        with pytest.raises(ConfigError, match="groups"):
            FastCheckManager(tmp_path / "objects", groups=groups, **options)
    assert not (tmp_path / "objects").exists()
