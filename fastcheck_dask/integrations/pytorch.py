"""PyTorch training loops: save and load everything that makes up the training, and when to do so.

The state that a `FastCheckWrapper` saves is a dict: ``model``, ``optimizer`` (and ``param_names``, which
parameter of the model each number of the optimizer is), ``lr_scheduler``, ``scaler``, ``rng``, ``extra``,
``epoch``, ``step``. What was not given is not in it.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import os
import random
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from fastcheck_dask.config import parse_shards
from fastcheck_dask.errors import ClosedError, ConfigError, LayoutError
from fastcheck_dask.ids import check_name, joined, normalised, parse_directory_name, parted
from fastcheck_dask.integrations.callback import FastCheckCallback, Position
from fastcheck_dask.integrations.training_state import (
    check_model,
    check_optimizer,
    load_optimizer,
    moved,
    param_names,
    refusal,
    rng_state,
    set_rng_state,
    unwrapped,
)
from fastcheck_dask.manager import FastCheckManager, SaveHandle

if TYPE_CHECKING:
    import torch

__all__ = ["FastCheckCallback", "FastCheckWrapper", "Stateful"]

log = logging.getLogger(__name__)

Extra = Mapping[str, Any] | Callable[[], Mapping[str, Any]]


class Stateful(Protocol):
    """An LR scheduler, a GradScaler, or anything else that keeps its state in the same way."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> object:
        """Take the state."""
        ...


class FastCheckWrapper:
    """Saves and loads a training: model, optimizer, and what else decides how it goes on.

    Parameters
    ----------
    model : torch.nn.Module
        Of one wrapped by `DistributedDataParallel`, `DataParallel` or `torch.compile` the inner model is
        saved, so that the names are the same with and without.
    optimizer : torch.optim.Optimizer or None
        None to load a model alone.
    checkpoint_dir : str or Path
        As for `FastCheckManager`. May be None if `manager` is given.
    num_shards : int or "auto"
        Data shards. Without storage nodes a number has no effect yet, which is logged.
    scheduler, coordinator : str, optional
        Where the storage nodes are; as for `FastCheckManager`. `scheduler` is Dask's, not the LR scheduler.
    lr_scheduler : Stateful, optional
        LR scheduler.
    scaler : Stateful, optional
        `torch.amp.GradScaler`.
    rng : bool
        Whether the states of the random number generators belong to a checkpoint: Python's `random`, numpy's
        global one, torch's on the CPU and on each CUDA device.
    extra : mapping or callable, optional
        More to save, or a callable that returns it and is called at each save: the state of a sampler, say.
        What was loaded is then in the attribute `extra`.
    exact_dtypes : bool
        Give each tensor of the optimizer's state the dtype with which it was saved, where torch would cast it
        to the parameter's; and refuse weights of another dtype than the model's instead of casting them.
    map_location : str or torch.device, optional
        Where the tensors of a loaded `extra` go, the CPU unless given. The model's tensors are copied to
        where the model is, and the optimizer's follow.
    manager : FastCheckManager, optional
        Use this one, which `close` leaves open, instead of making one.
    **manager_options
        Any other argument of `FastCheckManager`.

    Attributes
    ----------
    manager : FastCheckManager
    extra : object
        The `extra` of the checkpoint that was loaded; None before that, and if it had none.
    position : tuple of int or None
        Epoch and step that were saved or loaded last.
    last_handle : SaveHandle or None
        Of the last save.

    Raises
    ------
    ConfigError
        If the arguments do not go together.

    Notes
    -----
    Belongs to the thread that trains. Random numbers are drawn nowhere: training with and without checkpoints
    sees the same ones.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        checkpoint_dir: str | os.PathLike[str] | None,
        num_shards: int | str = "auto",
        *,
        scheduler: str | None = None,
        coordinator: str | None = None,
        lr_scheduler: Stateful | None = None,
        scaler: Stateful | None = None,
        rng: bool = True,
        extra: Extra | None = None,
        exact_dtypes: bool = True,
        map_location: str | torch.device | None = None,
        manager: FastCheckManager | None = None,
        **manager_options: Any,
    ) -> None:
        if scheduler is not None and not isinstance(scheduler, str):
            raise ConfigError(
                f"scheduler is the address of the Dask scheduler, got a {type(scheduler).__name__}; "
                "the LR scheduler is lr_scheduler=..."
            )
        self.model = unwrapped(model)
        self.optimizer = optimizer
        self.extra: Any = None
        self.position: Position | None = None
        self.last_handle: SaveHandle | None = None
        self._stateful = {"lr_scheduler": lr_scheduler, "scaler": scaler}
        self._rng, self._extra_source = rng, extra
        self._exact_dtypes, self._map_location = exact_dtypes, map_location
        self._pid = os.getpid()
        self._owns_manager = manager is None
        options = {
            "num_shards": num_shards,
            "scheduler": scheduler,
            "coordinator": coordinator,
            **manager_options,
        }
        if manager is None:
            manager = _new_manager(checkpoint_dir, options)
        else:
            _check_given_manager(manager, checkpoint_dir, options)
        self.manager = manager

    def save_checkpoint(
        self, epoch: int, step: int, *, tag: str | None = None, metrics: Mapping[str, float] | None = None
    ) -> SaveHandle:
        """Save the training as it is now; only the copy into shared memory is waited for.

        Call it between steps: after `optimizer.step()`, the LR scheduler and `scaler.update()`.

        Parameters
        ----------
        epoch, step : int
            Where the training is; `load_checkpoint` returns them.
        tag : str, optional
            ``epoch{epoch}_step{step}`` unless given.
        metrics : mapping of str to float, optional
            As for `FastCheckManager.save_async`.

        Returns
        -------
        SaveHandle

        Raises
        ------
        FastCheckError
            As `FastCheckManager.save_async`: if nothing was saved. `ClosedError` also in a forked process.
        """
        if os.getpid() != self._pid:
            raise ClosedError(
                f"this wrapper belongs to process {self._pid}, of which this one ({os.getpid()}) was forked; "
                "save there"
            )
        epoch, step = operator.index(epoch), operator.index(step)
        name = f"epoch{epoch}_step{step}" if tag is None else tag
        handle = self.manager.save_async(self._state(epoch, step), name, metrics=metrics)
        if not handle.skipped:
            self.position, self.last_handle = (epoch, step), handle
        return handle

    def load_checkpoint(self, resume_path: str | os.PathLike[str] | None = None) -> Position:
        """Bring the training back to where it was saved.

        Parameters
        ----------
        resume_path : str or Path, optional
            A tag, or the path of a checkpoint below `checkpoint_dir` (``.../00000012-epoch3_step1200``). The
            newest checkpoint that can be had complete unless given.

        Returns
        -------
        epoch, step : int
            As they were given to `save_checkpoint`; (0, 0) if nothing was ever saved.

        Raises
        ------
        ConfigError
            If `resume_path` names no checkpoint of this run, or one that was replaced under the same tag.
        CheckpointNotFoundError
            If no checkpoint has that tag.
        LayoutError
            If it does not fit the model or the optimizer. Nothing was loaded, unless the message says so.
        FastCheckError
            Whatever else `FastCheckManager.load` raises.
        """
        with _python_rng_untouched():
            state = self._read(resume_path)
        if state is None:
            return 0, 0
        self._check(state)
        self._apply(state)
        self._report_unmatched(state)
        self.last_handle = None
        self.position = state["epoch"], state["step"]
        return self.position

    def close(self, *, timeout: float | None = None) -> None:
        """Finish what is in flight and close the manager, unless it was given. Idempotent.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait for saves in flight.
        """
        if self._owns_manager:
            self.manager.close(timeout=timeout)

    def __enter__(self) -> FastCheckWrapper:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _state(self, epoch: int, step: int) -> dict[str, Any]:
        state: dict[str, Any] = {"model": self.model.state_dict()}
        if self.optimizer is not None:
            state["optimizer"] = self.optimizer.state_dict()
            state["param_names"] = param_names(self.model, self.optimizer)
        state |= {name: part.state_dict() for name, part in self._stateful.items() if part is not None}
        if self._rng:
            state["rng"] = rng_state()
        if self._extra_source is not None:
            source = self._extra_source
            state["extra"] = dict(source() if callable(source) else source)
        return state | {"epoch": epoch, "step": step}

    def _read(self, resume_path: str | os.PathLike[str] | None) -> Any:
        if resume_path is None:
            return self.manager.load()
        generation, tag = self._resolve(_as_text(resume_path))
        state = self.manager.load(tag)
        report = self.manager.last_load
        if generation is not None and (report is None or report.generation != generation):
            newest = "unknown" if report is None else report.generation
            raise ConfigError(
                f"{os.fspath(resume_path)} is generation {generation}, and the newest checkpoint with the "
                f"tag {tag!r} is generation {newest}: only the newest of a tag can be resumed from; nothing "
                "was loaded"
            )
        return state

    def _resolve(self, text: str) -> tuple[int | None, str]:
        """Return the generation, if the text names one, and the tag that are meant."""
        if "/" not in text:
            named = parse_directory_name(text)
            if named is not None and text not in self.manager.tags():
                return named
            return None, check_name(text, "resume_path, unless it is the path of a checkpoint,")
        folder, name = parted(normalised(text))
        found = parse_directory_name(name)
        if found is None or folder != self.manager.checkpoint_dir:
            raise ConfigError(
                f"resume_path {text!r} is no checkpoint below {self.manager.checkpoint_dir}; give a tag "
                f"('epoch3_step1200') or a path ({joined(self.manager.checkpoint_dir, '00000012-t')!r}), "
                "leave it out for the newest checkpoint, or make a wrapper for that other directory"
            )
        return found

    def _check(self, state: Any) -> None:
        """Raise `LayoutError` if the state is none of ours or does not fit; changes nothing."""
        if not isinstance(state, dict) or not {"model", "epoch", "step"} <= state.keys():
            got = ", ".join(map(str, state)) if isinstance(state, dict) else type(state).__name__
            raise LayoutError(
                f"this checkpoint was not saved by FastCheckWrapper: it has model, epoch and step, and not "
                f"{got[:200]}; load it with manager.load()"
            )
        check_model(state["model"], self.model, exact_dtypes=self._exact_dtypes)
        if self.optimizer is not None and "optimizer" in state:
            now = param_names(self.model, self.optimizer)
            check_optimizer(state["optimizer"], self.optimizer, then=state.get("param_names"), now=now)

    def _apply(self, state: dict[str, Any]) -> None:
        with refusal("the model"):
            self.model.load_state_dict(state["model"])
        if self.optimizer is not None and "optimizer" in state:
            with refusal("the optimizer"):
                load_optimizer(state["optimizer"], self.optimizer, exact_dtypes=self._exact_dtypes)
        for name, part in self._stateful.items():
            # A GradScaler that is disabled has an empty state, and an enabled one refuses it.
            if part is not None and state.get(name) and part.state_dict():
                with refusal(f"the {name}"):
                    part.load_state_dict(state[name])
        extra = state.get("extra")
        self.extra = extra if self._map_location is None else moved(extra, self._map_location)
        if self._rng and "rng" in state:
            with refusal("the random number generators"):
                set_rng_state(state["rng"])

    def _report_unmatched(self, state: dict[str, Any]) -> None:
        parts = {"optimizer": self.optimizer is not None, "rng": self._rng}
        parts |= {name: part is not None and bool(part.state_dict()) for name, part in self._stateful.items()}
        unused = [name for name, wanted in parts.items() if state.get(name) and not wanted]
        known = {*parts, "model", "param_names", "extra", "epoch", "step"}
        unused += [str(name) for name in state if name not in known]
        absent = [name for name, wanted in parts.items() if wanted and not state.get(name)]
        if self._extra_source is not None and "extra" not in state:
            absent.append("extra")
        if unused:
            log.warning("saved in the checkpoint, but nobody here takes it: %s", ", ".join(unused))
        if absent:
            log.warning("not in the checkpoint, and left as it is: %s", ", ".join(absent))


def _as_text(resume_path: object) -> str:
    text = os.fspath(resume_path) if isinstance(resume_path, os.PathLike) else resume_path
    if isinstance(text, str):
        return text
    raise ConfigError(f"resume_path is a tag or the path of a checkpoint, got {resume_path!r}")


def _new_manager(checkpoint_dir: str | os.PathLike[str] | None, options: dict[str, Any]) -> FastCheckManager:
    if checkpoint_dir is None:
        raise ConfigError("checkpoint_dir is needed unless manager=... is given")
    if options["scheduler"] is None and options["coordinator"] is None:
        if parse_shards(options["num_shards"]) is not None:
            log.warning(
                "num_shards=%s has no effect without storage nodes: checkpoints of %s go to shared memory "
                "and to the object tier; give scheduler=... or coordinator=... for the peer tier",
                options["num_shards"],
                os.fspath(checkpoint_dir),
            )
        options["num_shards"] = "auto"
    with _python_rng_untouched():
        return FastCheckManager(checkpoint_dir, **options)


def _check_given_manager(
    manager: FastCheckManager, checkpoint_dir: str | os.PathLike[str] | None, options: dict[str, Any]
) -> None:
    given = sorted(name for name, value in options.items() if value not in (None, "auto"))
    if given:
        raise ConfigError(f"{', '.join(given)}: give these to the manager, not beside manager=...")
    if checkpoint_dir is not None and normalised(os.fspath(checkpoint_dir)) != manager.checkpoint_dir:
        raise ConfigError(
            f"checkpoint_dir is {os.fspath(checkpoint_dir)}, and the manager's is {manager.checkpoint_dir}; "
            "give None or the same"
        )


@contextlib.contextmanager
def _python_rng_untouched() -> Iterator[None]:
    # A connection that is tried again waits for a random time, drawn from the global generator.
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)
