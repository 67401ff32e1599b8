"""Full and delta checkpoints in a folder, for PyTorch: no agent, no storage nodes, no coordinator."""

from __future__ import annotations

import logging
import operator
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fastcheck_dask.config import settings
from fastcheck_dask.engine.chains import FULL_HOURS, MAX_DELTAS, ChainPolicy
from fastcheck_dask.engine.folder_run import FolderRun, FolderSave
from fastcheck_dask.engine.retention import Retention
from fastcheck_dask.errors import CheckpointNotFoundError, ConfigError, LayoutError
from fastcheck_dask.ids import check_name, normalised, parse_directory_name, parted, run_id_for
from fastcheck_dask.integrations.training_state import (
    check_model,
    check_optimizer,
    load_optimizer,
    param_names,
    refusal,
    rng_state,
    set_rng_state,
    unwrapped,
)
from fastcheck_dask.layout.notes import check_metrics
from fastcheck_dask.tiers.checkpoint_folder import CheckpointFolder
from fastcheck_dask.tiers.object_store import open_store

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

_OPTIONS = frozenset(("keep_last", "keep_every", "keep_hours", "keep_best", "max_references", "chunk_bytes"))


class IncrementalCheckpointer:
    """Saves a training into a folder: now and then whole, in between what changed.

    Parameters
    ----------
    model : torch.nn.Module
        Of one that is wrapped, the inner model.
    optimizer : torch.optim.Optimizer or None
        None for a model alone.
    save_dir : str or Path
        Folder, or a URL as for `FastCheckManager`.
    max_deltas : int
        Most deltas that follow a checkpoint without; the next has none.
    full_hours : float
        One without deltas at least so often, in hours.
    rng : bool
        Whether the states of the random number generators belong to a checkpoint.
    **options
        ``keep_last``, ``keep_every``, ``keep_hours``, ``keep_best``, ``max_references`` and ``chunk_bytes``,
        as for `FastCheckManager`.

    Attributes
    ----------
    last_save : FolderSave or None
        What the last save wrote.

    Raises
    ------
    ConfigError
        If an argument cannot be used.

    Notes
    -----
    Works in the calling thread, which is the training's: `save` returns when the checkpoint is complete.
    Random numbers are drawn nowhere. It keeps one copy of the state in memory, against which deltas are made.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        save_dir: str | os.PathLike[str],
        *,
        max_deltas: int = MAX_DELTAS,
        full_hours: float = FULL_HOURS,
        rng: bool = True,
        **options: Any,
    ) -> None:
        self.model, self.optimizer = unwrapped(model), optimizer
        self.last_save: FolderSave | None = None
        self._rng = rng
        self._location = normalised(os.fspath(save_dir))
        if unknown := sorted(options.keys() - _OPTIONS):
            raise ConfigError(
                f"there is no option {unknown[0]!r}; the options are {', '.join(sorted(_OPTIONS))}"
            )
        self._settings = settings(max_deltas=max_deltas, full_hours=full_hours, **options)
        self._run = self._open(self._location)

    def save(self, epoch: int, is_full: bool = False, *, metrics: Mapping[str, float] | None = None) -> str:
        """Save the training as it is now.

        Parameters
        ----------
        epoch : int
            Where it is; `load` returns it.
        is_full : bool
            Write everything, so that the checkpoint needs no other one. The first one is whole anyway, and so
            is the one after `max_deltas` deltas.
        metrics : mapping of str to float, optional
            Numbers that belong to it (``{"loss": 0.31}``).

        Returns
        -------
        str
            Name of its directory in `save_dir`.

        Raises
        ------
        TierError
            If the folder cannot be written; the checkpoint before is still in force.
        RunInUseError
            If another process saves into the folder.
        UnsupportedLeafError
            If something in the state could not be restored.
        """
        epoch = operator.index(epoch)
        state: dict[str, Any] = {"epoch": epoch, "model": self.model.state_dict()}
        if self.optimizer is not None:
            state["optimizer"] = self.optimizer.state_dict()
            state["param_names"] = param_names(self.model, self.optimizer)
        if self._rng:
            state["rng"] = rng_state()
        saved = self._run.save(state, f"epoch{epoch}", whole=is_full, metrics=check_metrics(metrics))
        self.last_save = saved
        log.info(
            "epoch %d: %d of %d bytes written to %s, %d chunks as deltas, %d unchanged",
            epoch,
            saved.written_bytes,
            saved.raw_bytes,
            saved.marker.directory,
            saved.deltas,
            saved.shared,
        )
        return saved.marker.directory

    def load(
        self,
        path: str | os.PathLike[str] | None = None,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> int:
        """Bring a training back, bit for bit; what a delta needs is found by itself.

        Parameters
        ----------
        path : str or Path, optional
            A folder with checkpoints (the newest that can be had complete), a checkpoint's directory in one,
            or a tag of `save_dir` (``epoch3``). `save_dir` unless given.
        model, optimizer : optional
            What takes the state; those that are saved unless given.

        Returns
        -------
        int
            The epoch.

        Raises
        ------
        CheckpointNotFoundError
            If there is none.
        LayoutError
            If it does not fit model or optimizer: the message names what does not. Nothing was loaded, unless
            it says so.
        UnrecoverableError, CorruptDataError, ShardUnavailableError
            If it, or one that it needs, is damaged.
        """
        run, name = self._found(path)
        loaded = run.load(name)
        if loaded is None:
            raise CheckpointNotFoundError(f"{run.folder.store.location} has no checkpoint")
        state, marker = loaded
        if not isinstance(state, dict) or not {"epoch", "model"} <= state.keys():
            raise LayoutError(f"{marker.directory} was not saved by IncrementalCheckpointer")
        target = self.model if model is None else unwrapped(model)
        taker = self.optimizer if optimizer is None else optimizer
        self._apply(state, target, taker)
        return int(state["epoch"])

    def _apply(
        self, state: dict[str, Any], model: torch.nn.Module, optimizer: torch.optim.Optimizer | None
    ) -> None:
        check_model(state["model"], model, exact_dtypes=True)
        if optimizer is not None and "optimizer" not in state:
            raise LayoutError("the checkpoint has no optimizer; nothing was loaded")
        if optimizer is not None:
            names = param_names(model, optimizer)
            check_optimizer(state["optimizer"], optimizer, then=state.get("param_names"), now=names)
        with refusal("the model"):
            model.load_state_dict(state["model"])
        if optimizer is not None:
            with refusal("the optimizer"):
                load_optimizer(state["optimizer"], optimizer, exact_dtypes=True)
        if self._rng and "rng" in state:
            with refusal("the random number generators"):
                set_rng_state(state["rng"])

    def _open(self, location: str) -> FolderRun:
        return FolderRun(
            CheckpointFolder(open_store(location)),
            run=run_id_for(location),
            policy=ChainPolicy.of(self._settings),
            retention=Retention.of(self._settings),
            chunk_bytes=self._settings.chunk_bytes,
        )

    def _found(self, path: str | os.PathLike[str] | None) -> tuple[FolderRun, str | None]:
        """Return the folder that is meant, and the checkpoint in it; None for the newest."""
        if path is None:
            return self._run, None
        text = os.fspath(path)
        if not isinstance(text, str):
            raise ConfigError(f"path is a folder, a checkpoint's directory or a tag, got {path!r}")
        if "/" not in text and not os.path.isdir(text):
            return self._run, text if parse_directory_name(text) else check_name(text, "path")
        location = normalised(text)
        parent, name = parted(location)
        if parse_directory_name(name) is not None:
            return (self._run if parent == self._location else self._open(parent)), name
        return (self._run if location == self._location else self._open(location)), None
