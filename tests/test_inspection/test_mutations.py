"""Whatever becomes of one stored object: verification and load name it, and nothing wrong is ever returned.

The number of mutations can be set: ``FASTCHECK_MUTATIONS=2000``.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fastcheck_dask import open_checkpoint
from fastcheck_dask.engine.recover import Recovery
from fastcheck_dask.errors import FastCheckError
from fastcheck_dask.inspection.verification import verify, verify_rest
from fastcheck_dask.tiers.checkpoint_folder import CheckpointFolder
from fastcheck_dask.tiers.local import LocalTier
from fastcheck_dask.tiers.object_store import open_store

MUTATIONS = int(os.environ.get("FASTCHECK_MUTATIONS", "330"))
BLOCK = 30
#: Of each block of mutations: where, and the seed. Every tenth is in S3.
BLOCKS = [("folder" if seed % 10 else "s3", seed) for seed in range(-(-MUTATIONS // BLOCK))]


class _Bomb:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self._path,)


def truncate(data: bytes, rng: random.Random, _other: bytes, _bomb: bytes) -> bytes:
    return data[: rng.randrange(len(data))] if data else b"x"


def flip(data: bytes, rng: random.Random, _other: bytes, _bomb: bytes) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]


def overwrite(data: bytes, rng: random.Random, _other: bytes, _bomb: bytes) -> bytes:
    at, length = rng.randrange(len(data)), rng.randrange(1, 64)
    return data[:at] + rng.randbytes(length) + data[at + length :]


def lengthen(data: bytes, rng: random.Random, _other: bytes, _bomb: bytes) -> bytes:
    return data + rng.choice([b" ", b"\0", rng.randbytes(9)])


def replace_by_another(_data: bytes, _rng: random.Random, other: bytes, _bomb: bytes) -> bytes:
    return other


def replace_by_pickle(_data: bytes, _rng: random.Random, _other: bytes, bomb: bytes) -> bytes:
    return bomb


def double_a_name(data: bytes, _rng: random.Random, _other: bytes, _bomb: bytes) -> bytes:
    if not data.startswith(b"{"):
        return data[::-1]
    # The last of two equal names wins with a careless parser.
    return data[:-1] + b"," + data[1:]


MUTATE: list[Callable[..., bytes]] = [
    truncate,
    flip,
    flip,
    overwrite,
    lengthen,
    replace_by_another,
    replace_by_pickle,
    double_a_name,
]


def load(folder: CheckpointFolder, local: LocalTier) -> Any:
    """Load the newest as a manager on a fresh host does."""

    def no_client(name: str, address: str) -> Any:
        raise AssertionError("there are no storage nodes")

    return asyncio.run(Recovery(local, folder, no_client).load(()))


def check_load(
    folder: CheckpointFolder, local: LocalTier, *, same: Callable[[Any], bool], names: set[str]
) -> str | None:
    """Load and compare; see that what is damaged is named and mended. Return why it was refused, if so."""
    try:
        recovered = load(folder, local)
    except FastCheckError as error:
        return " ".join([str(error), *getattr(error, "causes", ())])
    assert same(recovered.state)
    if names:
        (damaged,) = recovered.report.damaged
        assert any(name in damaged for name in names), (damaged, names)
        assert "written anew" in damaged
        assert named(folder, strict=False) == set()
    else:
        assert recovered.report.damaged == []
    return None


def opened(location: str) -> dict[str, Any]:
    found = open_checkpoint(location)
    return dict(found.tree) | {path: array.numpy() for path, array in found.items()}


def named(folder: CheckpointFolder, *, strict: bool = True) -> set[str]:
    """Return the names of everything that verification complains of."""
    problems = list(verify_rest(folder))
    for marker in folder.committed():
        problems += verify(folder, marker, strict=strict).problems
    return {problem.name for problem in problems}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "seed"), BLOCKS)
def test_any_mutation_of_one_object_is_named_and_nothing_wrong_returned(
    request, tmp_path, kind, seed, checkpoints
):
    location = request.getfixturevalue("folder" if kind == "folder" else "s3_location")
    checkpoints.save(location, "t1")
    folder = CheckpointFolder(open_store(location))
    store = folder.store
    names = store.list("")
    whole = {name: store.read(name) for name in names}
    state, plain = checkpoints.state(1), opened(location)
    trap = tmp_path / "executed"
    bomb = pickle.dumps(_Bomb(trap))
    rng = random.Random(seed)
    # Without the fsyncs of the store.
    write = store.write if kind == "s3" else lambda name, data: (Path(location) / name).write_bytes(data)
    refused = exact = 0
    assert named(folder) == set()
    with LocalTier("run", tmp_path / "shm") as local:
        for number in range(BLOCK):
            name = rng.choice(names)
            mutate = rng.choice([*MUTATE, None])
            other = whole[rng.choice(names)]
            harmed = None if mutate is None else mutate(whole[name], rng, other, bomb)
            if harmed == whole[name]:
                continue
            if harmed is None:
                store.delete(name)
            else:
                write(name, harmed)
            told = f"mutation {number} of seed {seed}: {getattr(mutate, '__name__', 'delete')} of {name}"
            plainly = named(folder, strict=False)
            found = plainly or named(folder)
            assert found, told
            # A manifest and its marker accuse each other: the one is named by the other's digest.
            both = {name} if "/commits/" not in name else {name, name.replace("/commits/", "/manifests/")}
            assert found & both, told
            words = [""]
            try:
                got = opened(location)
            except FastCheckError as error:
                words.append(str(error))
            else:
                assert checkpoints.same(got, plain), told
            loaded = check_load(
                folder, local, same=lambda s: checkpoints.same(s, state), names=both if plainly else set()
            )
            exact, refused = exact + (loaded is None), refused + (loaded is not None)
            short = [n.removeprefix("00000001-t1/") for n in both]
            for said in filter(None, (*words, loaded)):
                assert plainly, told
                assert any(n in said for n in [*short, "commit marker", "committed"]), told
            write(name, whole[name])
    assert named(folder) == set()
    assert not trap.exists()
    # Both ways have to occur: some objects are for other readers only.
    assert refused
    assert exact


def test_swapped_chunks_are_both_named(location, checkpoints):
    checkpoints.save(location)
    folder = CheckpointFolder(open_store(location))
    first, second = "00000001-t1/model/w/c/0/0", "00000001-t1/model/w/c/2/0"
    one, two = folder.store.read(first), folder.store.read(second)
    folder.store.write(first, two)
    folder.store.write(second, one)
    assert named(folder) == {first, second}
