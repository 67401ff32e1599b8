"""A training host for fault tests: states that are made from their step, and a run that loses its host."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import numpy as np

from fastcheck_dask.config import settings
from fastcheck_dask.coordination.base import CommitRecord
from fastcheck_dask.coordination.connect import connect
from fastcheck_dask.engine.load_report import LoadReport
from fastcheck_dask.engine.recover import Recovery
from fastcheck_dask.ids import run_id_for
from fastcheck_dask.manager import FastCheckManager
from fastcheck_dask.manager.handle import Level, SaveHandle
from fastcheck_dask.tiers.checkpoint_folder import CheckpointFolder
from fastcheck_dask.tiers.local import LocalTier
from fastcheck_dask.tiers.object_store import open_store
from fastcheck_dask.tiers.peer import PeerClient
from fastcheck_dask.tiers.wire_tls import DataTls

#: Nodes that hang are noticed soon, though none that the others on a busy machine hold up is taken for one.
_GRACE_SECONDS: Final = 3.0
#: And small states have many chunks.
QUICK: Final[dict[str, Any]] = {
    "grace": f"{_GRACE_SECONDS} s",
    "connect_timeout": f"{_GRACE_SECONDS} s",
    "encoders": 1,
    "chunk_bytes": 4096,
}


def state_at(step: int, *, arrays: int = 6, size: int = 1500) -> dict[str, Any]:
    """Return a state that is a function of the step.

    Parameters
    ----------
    step : int
        Stands in every array, so that a mixture of two steps shows.
    arrays, size : int
        Number of float32 arrays, and elements of each.
    """
    model = {}
    for number in range(arrays):
        values = np.random.default_rng(number).normal(size=size).astype(np.float32)
        values[:: 7 + number] += np.float32(step)
        model[f"w{number}"] = values
    return {"step": step, "all": np.full(700, step, np.int64), "model": model}


def assert_is_state(state: Any, step: int, *, arrays: int = 6, size: int = 1500) -> None:
    """Raise `AssertionError` unless the state is, bit for bit, the one of a step."""
    wanted = state_at(step, arrays=arrays, size=size)
    found = {"all": state["all"], **state["model"]}
    expected = {"all": wanted["all"], **wanted["model"]}
    wrong = [
        name
        for name, values in expected.items()
        if name not in found
        or (found[name].dtype, found[name].shape) != (values.dtype, values.shape)
        or found[name].tobytes() != values.tobytes()
    ]
    if state["step"] != step or found.keys() != expected.keys() or wrong:
        raise AssertionError(f"the state of step {state['step']} differs from step {step} in {wrong}")


@dataclass
class TrainingHost:
    """One run on one training host; its memory can be lost, and others can look at what the run saved.

    Everything lies in `folder`. `options` go to each manager. Without `coordinator` there are no storage
    nodes.
    """

    folder: Path
    coordinator: str | None
    options: dict[str, Any] = field(default_factory=dict)
    _open: list[FastCheckManager] = field(default_factory=list)

    @property
    def shared_memory(self) -> Path:
        """Root of the local tier."""
        return self.folder / "shm"

    @property
    def run_id(self) -> str:
        """Name of the run, which `objects` gives it."""
        return run_id_for(str(self.objects))

    @property
    def objects(self) -> Path:
        """Folder of the object tier."""
        return self.folder / "objects"

    def manager(self, **options: Any) -> FastCheckManager:
        """Return a new manager of the run; it is closed with the host."""
        made = FastCheckManager(
            self.objects,
            coordinator=self.coordinator,
            local_dir=self.shared_memory,
            **{**QUICK, **self.options, **options},
        )
        self._open.append(made)
        return made

    def save(self, manager: FastCheckManager, step: int, *, level: Level = "peers") -> SaveHandle:
        """Save the state of a step and wait for a level."""
        return manager.save_async(state_at(step), f"step{step}").wait(level, timeout=60.0)

    def lose_memory(self) -> None:
        """Close what is open and wipe the local tier: the run goes on on another machine."""
        self.close()
        shutil.rmtree(self.shared_memory, ignore_errors=True)

    def close(self) -> None:
        """Close the managers. Idempotent."""
        while self._open:
            self._open.pop().close()

    def records(self) -> tuple[CommitRecord, ...]:
        """Return what the coordinator of the nodes knows of the run."""
        assert self.coordinator is not None
        with contextlib.closing(connect(self.coordinator)) as coordinator:
            return coordinator.commits(self.run_id)

    def load_elsewhere(
        self, tag: str | None = None, *, objects: bool = True, peers: bool = True
    ) -> tuple[Any, LoadReport]:
        """Load as another host would, with nothing in its shared memory, and without owning the run.

        Without `objects` the object tier is not asked, and without `peers` no coordinator or storage node.
        """
        with LocalTier(self.run_id, self.folder / "elsewhere") as local:
            folder = CheckpointFolder(open_store(str(self.objects))) if objects else None
            tls = DataTls.of(settings(**{k: v for k, v in self.options.items() if k.startswith("data_tls")}))
            client = partial(quick_client, tls=tls)
            records = self.records() if peers else ()
            recovered = asyncio.run(Recovery(local, folder, client).load(records, tag=tag))
        assert recovered is not None, "nothing was ever committed"
        return recovered.state, recovered.report

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def quick_client(name: str, address: str, *, tls: DataTls | None = None) -> PeerClient:
    """Return a client that gives up soon."""
    return PeerClient(name, address, grace_seconds=_GRACE_SECONDS, connect_seconds=_GRACE_SECONDS, tls=tls)
