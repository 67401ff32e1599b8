"""Whatever becomes of one object of any layout: verification names it, and a load is exact or names it.

What is done to each object is drawn; the share can be set, up to everything: ``FASTCHECK_MUTATION_SHARE=1``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from fastcheck_dask import cli
from fastcheck_dask.config import Group
from fastcheck_dask.coordination.joint import Rank
from fastcheck_dask.engine.chains import ChainPolicy
from fastcheck_dask.engine.compression import CompressionPolicy
from fastcheck_dask.engine.recover import Recovery
from fastcheck_dask.errors import FastCheckError, UnrecoverableError
from fastcheck_dask.manager.ranks import Known, Place
from fastcheck_dask.testing.checkpoints import write_joint
from fastcheck_dask.tiers.checkpoint_folder import CheckpointFolder
from fastcheck_dask.tiers.local import LocalTier
from fastcheck_dask.tiers.object_store import open_store

SHARE = float(os.environ.get("FASTCHECK_MUTATION_SHARE", "0.1"))

#: What no committed checkpoint is restored from, each with the reason why its damage does no harm.
WITHOUT_MEANING = {
    r"\.fastcheck/plans/.*": "how it is going to lie there: the marker, once it is there, says it itself",
    r"\.fastcheck/identity": "a random text, by which new folders at roots are named",
}

Mutation = Callable[[bytes, random.Random], bytes | None]


def flipped(data: bytes, at: int, rng: random.Random) -> bytes:
    return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]


MUTATIONS: dict[str, Mutation] = {
    "deleted": lambda data, rng: None,
    "emptied": lambda data, rng: b"",
    "one byte shorter": lambda data, rng: data[:-1],
    "one byte longer": lambda data, rng: data + rng.randbytes(1),
    "first byte flipped": lambda data, rng: flipped(data, 0, rng),
    "middle byte flipped": lambda data, rng: flipped(data, len(data) // 2, rng),
    "last byte flipped": lambda data, rng: flipped(data, len(data) - 1, rng),
    "some byte flipped": lambda data, rng: flipped(data, rng.randrange(len(data)), rng),
    "another byte flipped": lambda data, rng: flipped(data, rng.randrange(len(data)), rng),
}


def no_client(name: str, address: str) -> Any:
    raise AssertionError("there are no storage nodes")


@dataclass
class Stored:
    """A location in which several checkpoints lie, and what has to come back of each."""

    location: str
    local: LocalTier
    #: By tag, as the object tier has it; of several ranks a list.
    states: dict[str, Any]
    ranks: int = 0
    root: str | None = None

    def load(self, tag: str | None) -> dict[str, Any]:
        """Load as hosts do that know nothing but the location; return the state by its tag."""
        if not self.ranks:
            return self._recover(self.location, tag)
        places = [Place(Rank(rank, self.ranks), "run", self.location) for rank in range(self.ranks)]
        chosen = [Known(place, {"joint": [], "alone": None}).choose(tag) for place in places]
        parts = [
            self._recover(place.location, joint.tag, token=joint.tokens[place.me.rank])
            for place, joint in zip(places, chosen, strict=True)
            if joint is not None
        ]
        return {tag: [part[tag] for part in parts] for part in parts for tag in part}

    def _recover(self, location: str, tag: str | None, **options: Any) -> dict[str, Any]:
        recovery = Recovery(self.local, CheckpointFolder(open_store(location)), no_client)
        found = asyncio.run(recovery.load((), tag=tag, older=None, **options))
        return {} if found is None else {found.report.tag: found.state}

    def verify(self, *options: str) -> set[str]:
        """Return the names of what is wrong, after comparing the exit status."""
        ran = CliRunner().invoke(cli.main, ["verify", self.location, "--all", "--json", *options])
        found = json.loads(ran.stdout)
        problems = [*found["problems"], *(p for one in found["checkpoints"] for p in one["problems"])]
        assert ran.exit_code == bool(problems)
        return {problem["name"] for problem in problems}

    def objects(self) -> dict[Path, bytes]:
        """Return everything that is stored."""
        folders = [Path(found) for found in (self.location, self.root) if found is not None]
        return {
            path: path.read_bytes() for top in folders for path in sorted(top.rglob("*")) if path.is_file()
        }

    def restore(self, objects: dict[Path, bytes]) -> None:
        """Have everything again as it was: a load writes anew what it can."""
        now = self.objects()
        for path in now.keys() - objects.keys():
            path.unlink()
        for path, data in objects.items():
            if now.get(path) != data:
                path.write_bytes(data)


def state_of(step: int) -> dict[str, Any]:
    """Return a state with whatever lies apart in the object tier: chunks, inline arrays, plain values."""
    weights = np.random.default_rng(1).normal(size=1500).astype(np.float32)
    drift = np.random.default_rng([1, step]).integers(0, 2, weights.size, np.uint32)
    return {
        "step": step,
        "model": {"w": (weights.view(np.uint32) ^ drift).view(np.float32)},
        "frozen": np.arange(700, dtype=np.float32),
        "rare": np.random.default_rng([2, step]).normal(size=300).astype(np.float32),
        "scale": np.float32([0.5, step]),
    }


def same(left: Any, right: Any) -> bool:
    """Say whether two states have the same bits."""
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    return np.asarray(left).tobytes() == np.asarray(right).tobytes()


LAYOUTS: dict[str, dict[str, Any]] = {
    "full": {"steps": 2},
    "raw": {"steps": 2, "compression": CompressionPolicy("never", 1)},
    "deltas": {"chains": ChainPolicy(2)},
    "references": {"chains": ChainPolicy(0, max_references=4)},
    "older groups": {"chains": ChainPolicy(0, max_references=4), "every": 2},
    "root": {"chains": ChainPolicy(1, max_references=4), "root": True},
    "ranks": {"ranks": 2},
}
GENERATION = re.compile(r"\d{8}-s\d+")


@pytest.fixture
def stored(rig, tmp_path) -> Callable[[str], Stored]:
    """Return what writes a location of a layout."""

    def write(layout: str) -> Stored:
        options = dict(LAYOUTS[layout])
        steps, ranks, every = options.pop("steps", 3), options.pop("ranks", 0), options.pop("every", 1)
        compression = options.pop("compression", None)
        root = str(tmp_path / "root") if options.pop("root", False) else None
        if every > 1 or root is not None:
            options["groups"] = (Group("rare", "rare", every, root=root),)
        run = rig(nodes=0, **options)
        location = run.folder.store.location
        if ranks:
            states = {f"s{n}": [state_of(10 * n + rank) for rank in range(ranks)] for n in range(1, 3)}
            for number, (tag, parts) in enumerate(states.items(), 1):
                write_joint(location, parts, tag, number=number)
            return Stored(location, run.local, states, ranks)
        for step in range(steps):
            run.save_to_objects(state_of(step), f"s{step}", compression=compression)
        run.forget_local()
        older = {step: step - step % every for step in range(steps)}
        states = {f"s{n}": state_of(n) | {"rare": state_of(of)["rare"]} for n, of in older.items()}
        return Stored(location, run.local, states, root=root)

    return write


def other_of(path: Path, objects: dict[Path, bytes]) -> bytes | None:
    """Return an object of the same kind of another generation."""
    kind = GENERATION.sub("", str(path))
    for other, data in objects.items():
        if other != path and GENERATION.sub("", str(other)) == kind and data != objects[path]:
            return data
    return None


def mutations(objects: dict[Path, bytes], rng: random.Random) -> Iterator[tuple[Path, str, bytes | None]]:
    """Yield what is done to which object: each object is harmed, and each harm done to some."""
    for path, data in objects.items():
        done = {name: mutate(data, rng) for name, mutate in MUTATIONS.items() if data}
        if (other := other_of(path, objects)) is not None:
            done["replaced by that of another generation"] = other
        names = [name for name, harmed in done.items() if harmed != data]
        for name in rng.sample(names, max(1, round(SHARE * len(names)))):
            yield path, name, done[name]


def names_of(path: Path, stored: Stored) -> set[str]:
    """Return how an object may be called: by its name, or as marker and manifest accuse each other."""
    name = str(path).removeprefix(f"{stored.location}/")
    return {name, name.replace("/commits/", "/manifests/"), name.replace("/manifests/", "/commits/")}


def words_for(path: Path) -> tuple[str, ...]:
    """Return words of which a load that is refused says one: the chunk, the directory, the tag."""
    directory = next(part.removesuffix(".json") for part in path.parts if GENERATION.match(part))
    return str(path).partition(f"/{directory}/")[2] or directory, directory, f"'{directory[9:]}'"


def loads(stored: Stored, path: Path) -> bool:
    """Load all there is; return whether everything could be had. What cannot is refused by name."""
    everything = True
    for tag in stored.states:
        try:
            found = stored.load(tag)
        except FastCheckError as error:
            said = " ".join([str(error), *getattr(error, "causes", ())])
            assert any(word in said for word in words_for(path)), said
            everything = False
        else:
            assert same(found, {tag: stored.states[tag]})
    if not everything:
        with contextlib.suppress(UnrecoverableError):
            ((tag, state),) = stored.load(None).items()
            assert same(state, stored.states[tag])
    return everything


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_object_harmed_is_named_and_nothing_wrong_returned(stored, layout):
    found = stored(layout)
    objects = found.objects()
    assert found.verify() == found.verify("--strict") == set()
    outcomes = set()
    for path, harm, harmed in mutations(objects, random.Random(layout)):
        path.unlink() if harmed is None else path.write_bytes(harmed)
        told = f"{path}: {harm}"
        try:
            named = found.verify()
            exact = loads(found, path)
            found.restore(objects)
            if any(re.search(pattern, str(path)) for pattern in WITHOUT_MEANING):
                assert exact
                continue
            if not named and "/c/" in str(path):
                # Bits of a chunk that do not matter.
                assert exact
                path.write_bytes(harmed)
                named = found.verify("--strict")
                path.write_bytes(objects[path])
            assert named & names_of(path, found), named
        except BaseException as error:
            error.add_note(told)
            raise
        outcomes.add(exact)
    # Both occur: some objects are for other readers only.
    assert outcomes == {True, False}
