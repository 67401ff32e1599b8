"""One run with everything that the engine works with, in this process."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastcheck_codecs import checksum

from fastcheck_dask.config import Group
from fastcheck_dask.coordination.base import Coordinator, NodeInfo
from fastcheck_dask.coordination.connect import connect
from fastcheck_dask.engine import save
from fastcheck_dask.engine.chains import ChainPolicy
from fastcheck_dask.engine.compression import CompressionPolicy
from fastcheck_dask.engine.derive import derive
from fastcheck_dask.engine.encode import digest
from fastcheck_dask.engine.load import ChunkLoader
from fastcheck_dask.engine.load_report import LoadReport
from fastcheck_dask.engine.persist import Persister
from fastcheck_dask.engine.recover import Recovered, Recovery
from fastcheck_dask.engine.roots import locations
from fastcheck_dask.engine.save import Base, PeerSaver, Saved, Snapshot
from fastcheck_dask.engine.save_objects import save_to_objects
from fastcheck_dask.engine.snapshot import as_base, describe, parse
from fastcheck_dask.layout.chunks import place
from fastcheck_dask.layout.leaves import copy_bits
from fastcheck_dask.layout.state import flatten, unflatten
from fastcheck_dask.node.entries import accept
from fastcheck_dask.placement.policy import Choice, choose, replacement
from fastcheck_dask.testing.cluster import StorageCluster
from fastcheck_dask.testing.encoder import InlineEncoder
from fastcheck_dask.testing.fakes import FakeCoordinator, FakeNodes
from fastcheck_dask.testing.training import quick_client
from fastcheck_dask.tiers.checkpoint_folder import CheckpointFolder
from fastcheck_dask.tiers.commit_marker import CommitMarker
from fastcheck_dask.tiers.local import LocalTier
from fastcheck_dask.tiers.object_store import open_store
from fastcheck_dask.tiers.peer import PeerClient
from fastcheck_dask.tiers.stored_checkpoint import StoredCheckpoint

RUN = "run-1"


class RealNodes:
    """Storage nodes in processes of their own, by the interface of `FakeNodes` that a `Rig` uses."""

    def __init__(self, cluster: StorageCluster, coordinator: Coordinator) -> None:
        self.cluster, self._coordinator = cluster, coordinator
        #: Nodes that this host does not reach.
        self.cut_off: set[str] = set()

    @property
    def infos(self) -> Sequence[NodeInfo]:
        return sorted(self._coordinator.nodes(), key=lambda node: node.name)

    def client(self, name: str, address: str) -> PeerClient:
        # Nobody listens on port 1.
        return quick_client(name, "fcs://127.0.0.1:1" if name in self.cut_off else address)

    def close(self) -> None:
        self._coordinator.close()


class Rig:
    """Saves and loads as the agent and the manager do, step by step."""

    def __init__(self, folder: Path, *, nodes: int = 4, chunk_bytes: int = 4096, **options: Any) -> None:
        policy, encoder = options.pop("policy", None), options.pop("encoder", None)
        spares = options.pop("spares", False)
        chains, retention = options.pop("chains", None), options.pop("retention", None)
        groups, cluster = options.pop("groups", ()), options.pop("cluster", None)
        self.coordinator: Any = FakeCoordinator() if cluster is None else connect(cluster.coordinator)
        self.nodes: Any = (
            FakeNodes(nodes, **options) if cluster is None else RealNodes(cluster, self.coordinator)
        )
        self.claim = self.coordinator.claim(RUN, "test")
        self.local = LocalTier(RUN, folder / "shm")
        self.folder = CheckpointFolder(open_store(str(folder / "objects")))
        self.encoder = encoder or InlineEncoder()
        self.saver = PeerSaver(
            RUN,
            self.coordinator,
            self.claim,
            self.encoder,
            self.nodes.client,
            compression=policy,
            substitute=self.substitute if spares else None,
        )
        self.persister = Persister(
            str(folder / "objects"),
            self.folder,
            self.encoder,
            self.coordinator,
            self.nodes.client,
            chains=chains,
            retention=retention,
            groups=groups,
        )
        self.chunk_bytes = chunk_bytes
        self.base: Base | None = None
        self._tokens = itertools.count(1)

    def close(self) -> None:
        self.nodes.close()
        self.local.close()

    # ---- saving

    async def substitute(self, others: Any, taken: Any, failed: Any, error: Any) -> Any:
        """Choose another node as the agent does."""
        return replacement(self.nodes.infos, others=others, excluded=taken)

    def snapshot(self, state: Any, tag: str = "t", *, token: str | None = None) -> Snapshot:
        """Copy a state into the slot that does not hold the base."""
        slot = next(slot for slot in self.local.slots if self.base is None or slot.path != self.base.slot)
        flat = flatten(state, chunk_bytes=self.chunk_bytes)
        placement = place(flat.arrays)
        token = token or f"token-{next(self._tokens)}"
        slot.clear()
        slot.reserve(placement.total_bytes)
        slot.begin(token, tag)
        for spec, source in zip(flat.arrays, flat.sources, strict=True):
            start = placement.offsets[spec.path]
            copy_bits(source, slot.data[start : start + spec.nbytes])
        document = describe(token=token, tag=tag, created_unix=1.5, tree=flat.tree, arrays=flat.arrays)
        slot.complete(document, placement.total_bytes)
        return asyncio.run(derive(parse(slot.path, document), self.encoder))

    def slot_of(self, snapshot: Snapshot) -> Any:
        return next(slot for slot in self.local.slots if slot.path == snapshot.slot)

    def choice(self, shards: int | None = None, **options: Any) -> Choice:
        latest = self.coordinator.latest(RUN)
        arguments = {"wanted": shards, "max_shards": 3, "previous": latest.nodes if latest else ()}
        return choose(self.nodes.infos, **(arguments | options))

    def commit(self, snapshot: Snapshot, choice: Choice | None = None, **options: Any) -> Saved:
        """Save a snapshot that lies in a slot; what fails leaves base and records as they were."""
        latest = self.coordinator.latest(RUN)
        generation = 1 + (latest.generation if latest else 0)
        slot = self.slot_of(snapshot)
        arguments = {"latest": latest, "base": self.base, "generation": generation, "seal": slot.seal}
        saved = asyncio.run(self.saver.save(snapshot, choice or self.choice(), **(arguments | options)))
        slot.commit(saved.record.generation)
        self.base = as_base(slot.path, saved.manifest)
        return saved

    def save(self, state: Any, tag: str = "t", *, choice: Choice | None = None) -> Saved:
        return self.commit(self.snapshot(state, tag), choice)

    def retry(self, snapshot: Snapshot, **options: Any) -> Saved:
        return self.commit(snapshot, **options)

    def persist(self, saved: Saved, *, from_host: bool = True) -> Any:
        source = self.base if from_host else None
        return asyncio.run(
            self.persister.persist(saved.manifest, saved.manifest_bytes, record=saved.record, source=source)
        )

    def remove_before_publishing(self, directory: str) -> None:
        """Have a checkpoint removed just before the next one is published."""
        publish = self.persister.publish

        def late(*arguments: Any) -> None:
            self.folder.remove(directory)
            publish(*arguments)

        self.persister.publish = late  # type: ignore[method-assign]

    def save_to_objects(
        self, state: Any, tag: str = "t", *, compression: CompressionPolicy | None = None
    ) -> Saved:
        """Save as an agent without nodes does."""
        snapshot = self.snapshot(state, tag)
        latest = self.coordinator.latest(RUN)
        slot = self.slot_of(snapshot)
        saved = asyncio.run(
            save_to_objects(
                RUN,
                snapshot,
                generation=1 + (latest.generation if latest else 0),
                persister=self.persister,
                seal=slot.seal,
                degraded=None,
                compression=compression,
                base=self.base,
                before=None if self.base is None else self.base.manifest,
            )
        )
        record = self.coordinator.commit(saved.record, self.claim)
        slot.commit(record.generation)
        self.base = as_base(slot.path, saved.manifest)
        return saved

    # ---- loading

    def read(self, generation: int) -> Any:
        """Load a generation from the object tier alone."""
        marker = next(m for m in self.folder.committed() if m.generation == generation)
        stored = StoredCheckpoint(self.folder, marker)

        def get(spec: Any) -> Any:
            return np.concatenate([stored.read(chunk.key)[0] for chunk in spec.chunks])

        return unflatten(stored.manifest.tree, get, arrays=stored.manifest.arrays)

    def forget_local(self) -> None:
        """Lose the training host."""
        for slot in self.local.slots:
            slot.clear()
        self.base = None

    def recover(self, *, folder: bool = True, **options: Any) -> Recovered | None:
        recovery = Recovery(self.local, self.folder if folder else None, self.nodes.client)
        return asyncio.run(recovery.load(self.coordinator.commits(RUN), **options))

    def loader(self, saved: Saved, memory: dict[str, Any], *, folder: bool = False) -> ChunkLoader:
        """Return a loader whose regions are uint8 arrays that appear in `memory`."""
        sizes = saved.manifest.sizes

        def region(key: str) -> Any:
            return memory.setdefault(key, np.zeros(sizes[key], np.uint8))

        return ChunkLoader(
            saved.manifest,
            region,
            record=saved.record,
            client=self.nodes.client,
            stored=self.stored(saved) if folder else None,
            report=LoadReport(saved.record.generation, saved.record.tag),
        )

    def stored(self, saved: Saved) -> StoredCheckpoint:
        marker = CommitMarker.of(saved.manifest, saved.manifest_bytes)
        return StoredCheckpoint(self.folder, marker, saved.manifest)

    def committed_at(self, name: str) -> Any:
        found = self.nodes[name].store.holds(RUN)["committed"]
        return None if found is None else tuple(found)

    def staged_at(self, name: str) -> Any:
        return self.nodes[name].store.holds(RUN)["staged"]


class SavedRig(Rig):
    """A run with one committed checkpoint, persisted, whose copies can be damaged."""

    saved: Saved

    def load(
        self, *, keys: Sequence[str] | None = None, folder: bool = False, memory: dict[str, Any] | None = None
    ) -> LoadReport:
        """Load chunks; check every one that is said to be there against the slot that was saved from."""
        memory = {} if memory is None else memory
        keys = list(self.saved.manifest.chunks) if keys is None else keys
        loader = self.loader(self.saved, memory, folder=folder)
        asyncio.run(loader.load(keys))
        for key in keys:
            assert digest(memory[key]) == self.saved.manifest.digests[key]
        return loader._report

    def replace_payload(self, name: str, key: str, payload: Any, **fields: Any) -> None:
        """Change what a node holds of a chunk, as damage that its checksum does not show."""
        store = self.nodes[name].store
        (held,) = store._runs[RUN].generations()
        (entry,) = held.chains[key]
        described = entry.descriptor._replace(crc32c=checksum(payload), nbytes=payload.size, **fields)
        chain = (accept(described, payload, name),)
        store._holdings.set_chain(store._runs[RUN], held, key, chain=chain)

    def flip(self, name: str, key: str) -> None:
        """Flip one bit in the memory of a node."""
        (held,) = self.nodes[name].store._runs[RUN].generations()
        payload = held.chains[key][0].payload
        payload.flags.writeable = True
        payload[-1] ^= 1
        payload.flags.writeable = False

    def keys_at(self, shard: int) -> Sequence[str]:
        """Return the keys of a data shard."""
        return self.saved.manifest.layout.keys_of(shard)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    """Make runs, and end their threads whatever happens."""
    with contextlib.ExitStack() as stack:
        numbers = itertools.count()

        def make(*, kind: type[Rig] = Rig, **options: Any) -> Rig:
            made = kind(tmp_path / str(next(numbers)), **options)
            stack.callback(made.close)
            return made

        yield make


@pytest.fixture
def saved_rig(rig: Callable[..., Any]) -> Callable[..., SavedRig]:
    return partial(rig, kind=SavedRig)


@pytest.fixture
def saved(saved_rig: Callable[..., SavedRig], states: type[States]) -> SavedRig:
    run = saved_rig()
    run.saved = run.save(states.of(1))
    run.persist(run.saved)
    return run


@pytest.fixture(autouse=True)
def quick_commits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait between two attempts to commit."""
    monkeypatch.setattr(save, "_COMMIT_RETRY", 0.0)


@pytest.fixture
def save_alone() -> Callable[..., Saved]:
    """Return a function that saves without storage nodes, with a policy of compression."""

    def save_alone(
        run: Rig, state: Any, compression: CompressionPolicy | None = None, **options: Any
    ) -> Saved:
        snapshot = run.snapshot(state)
        arguments = {"generation": 1, "seal": run.slot_of(snapshot).seal, "degraded": None} | options
        return asyncio.run(
            save_to_objects(RUN, snapshot, persister=run.persister, compression=compression, **arguments)
        )

    return save_alone


def state_of(seed: int, *, step: int = 0, arrays: int = 5) -> dict[str, Any]:
    """Return a small training state: weights that drift with `step`, momenta that do not resemble."""
    rng = np.random.default_rng(seed)
    state: dict[str, Any] = {"step": step}
    for number in range(arrays):
        weights = rng.normal(size=700 + 400 * number).astype(np.float32)
        drift = np.random.default_rng([seed, step, number]).integers(0, 2, weights.size, np.uint32)
        state[f"w{number}"] = (weights.view(np.uint32) ^ (drift if step else 0)).view(np.float32)
    state["momentum"] = np.random.default_rng([seed, step, 99]).normal(size=900)
    return state


def same(left: Any, right: Any) -> bool:
    """Say whether two states have the same bits."""
    return left.keys() == right.keys() and all(
        np.asarray(left[key]).tobytes() == np.asarray(right[key]).tobytes()
        and np.asarray(left[key]).dtype == np.asarray(right[key]).dtype
        for key in left
    )


class States:
    """The functions above, for tests: they cannot import a conftest."""

    of = staticmethod(state_of)
    same = staticmethod(same)


@pytest.fixture(scope="session")
def states() -> type[States]:
    return States


class Apart:
    """A small state with a group that has a root of its own, and runs that save it."""

    def __init__(self, states: type[States]) -> None:
        self._states = states

    @staticmethod
    def group_at(root: str, *, every: int = 1) -> tuple[Group, ...]:
        """Return the groups of a run: a backbone with a root."""
        return (Group("backbone", "frozen*", every, root=root),)

    def state_of(self, step: int, *, backbone: int = 0) -> dict[str, Any]:
        """Return a small state with a backbone that is what it is told."""
        weights = np.random.default_rng([3, backbone]).normal(size=4000).astype(np.float32)
        small = self._states.of(1, step=step, arrays=2)
        return small | {"frozen": weights, "frozen_bias": weights[:5], "frozen_n": 7}

    def save(self, run: Rig, step: int, *, nodes: int, backbone: int = 0) -> int:
        """Save and persist a state; return how many bytes were written."""
        state = self.state_of(step, backbone=backbone)
        if not nodes:
            return run.save_to_objects(state, f"s{step}").stats.sent_bytes
        moved = run.persist(run.save(state, f"s{step}"))
        written: int = moved.by_nodes_bytes + moved.by_host_bytes
        return written

    @staticmethod
    def lose_memory(run: Rig) -> None:
        """Lose the training host and all storage nodes."""
        run.forget_local()
        for node in run.nodes:
            node.down = True

    @staticmethod
    def at_root(run: Rig, groups: Sequence[Group]) -> tuple[str, CheckpointFolder]:
        """Return where the group lies, and the folder there."""
        location = locations(run.folder.store, groups)["backbone"]
        return location, CheckpointFolder(open_store(location))

    @staticmethod
    def persister_of(
        run: Rig,
        groups: Sequence[Group],
        *,
        chains: ChainPolicy | None = None,
        encoder: bool = True,
        **options: Any,
    ) -> Persister:
        """Return another persister of a run, such as a master's, who has no encoder."""
        return Persister(
            run.folder.store.location,
            run.folder,
            run.encoder if encoder else None,
            run.coordinator,
            run.nodes.client,
            chains=chains or ChainPolicy(0, max_references=4),
            groups=groups,
            **options,
        )


@pytest.fixture
def apart(states: type[States]) -> Apart:
    return Apart(states)


@pytest.fixture
def folder_root(tmp_path: Path) -> str:
    return str(tmp_path / "shared")


@pytest.fixture
def loads() -> Callable[[Rig, Any, type[States]], bool]:
    """Return what says whether the storage nodes alone give exactly a state."""

    def loads(run: Rig, state: Any, states: type[States]) -> bool:
        run.forget_local()
        recovered = run.recover(folder=False)
        assert recovered is not None
        assert recovered.report.source == "peers"
        return states.same(recovered.state, state)

    return loads
