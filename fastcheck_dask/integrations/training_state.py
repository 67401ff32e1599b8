"""What makes up a training in torch: whether a saved one fits, and how each part is put back exactly."""

from __future__ import annotations

import contextlib
import itertools
import logging
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from fastcheck_dask.errors import LayoutError

try:
    import torch
except ImportError as missing:
    raise ImportError(
        f"fastcheck_dask.integrations.pytorch needs torch, which cannot be imported ({missing}); "
        "install it with: pip install 'fastcheck-dask[torch]'"
    ) from missing

log = logging.getLogger(__name__)


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model inside of `DistributedDataParallel`, `DataParallel` and `torch.compile`."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if isinstance(model, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel):
            inner = model.module
        if not isinstance(inner, torch.nn.Module):
            return model
        model = inner


@contextlib.contextmanager
def refusal(what: str) -> Iterator[None]:
    """Turn what torch raises when it cannot take a state into a `LayoutError`."""
    try:
        yield
    except (RuntimeError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise LayoutError(
            f"{what} refused the state of the checkpoint, part of which is loaded by now: {error}"
        ) from error


def check_model(saved: Any, model: torch.nn.Module, *, exact_dtypes: bool) -> None:
    """Raise `LayoutError` if a saved state_dict does not fit a model; changes nothing.

    Parameters
    ----------
    saved : mapping of str to object
        A state_dict.
    model : torch.nn.Module
    exact_dtypes : bool
        Whether weights that would be cast are an error, or merely logged.
    """
    if not isinstance(saved, Mapping):
        raise LayoutError(f"the model of the checkpoint is a {type(saved).__name__}, not a state_dict")
    live = model.state_dict()
    shapes, dtypes, no_memory = _compared(saved, live)
    if dtypes and not exact_dtypes:
        log.warning("weights are cast to the model's dtypes: %s", _first(dtypes))
        dtypes = []
    problems = {
        "missing from the checkpoint": [name for name in live if name not in saved],
        "unexpected, not in the model": [str(name) for name in saved if name not in live],
        "other shapes": shapes,
        "other dtypes (exact_dtypes=False casts them)": dtypes,
        "without memory (materialize the model with to_empty)": no_memory,
    }
    shown = [f"{what}: {_first(names)}" for what, names in problems.items() if names]
    if shown:
        raise LayoutError(f"the checkpoint does not fit the model; {'; '.join(shown)}; nothing was loaded")


def _first(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _compared(saved: Mapping[str, Any], live: Mapping[str, Any]) -> tuple[list[str], list[str], list[str]]:
    """Return the tensors of other shapes, of other dtypes, and those that could take no value."""
    shapes, dtypes, no_memory = [], [], []
    for name, there in live.items():
        here = saved.get(name)
        if not isinstance(here, torch.Tensor) or not isinstance(there, torch.Tensor):
            continue
        if torch.nn.parameter.is_lazy(there):
            continue
        if here.shape != there.shape:
            shapes.append(f"{name} (saved {tuple(here.shape)}, model {tuple(there.shape)})")
        if here.dtype != there.dtype:
            dtypes.append(f"{name} (saved {here.dtype}, model {there.dtype})")
        if there.is_meta:
            # torch would copy nothing into it, and only warn.
            no_memory.append(name)
    return shapes, dtypes, no_memory


def param_names(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str | None]]:
    """Return the name in the model of each parameter of an optimizer, by group; None for a foreign one."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [[names.get(id(parameter)) for parameter in group["params"]] for group in optimizer.param_groups]


def check_optimizer(saved: Any, optimizer: torch.optim.Optimizer, *, then: Any, now: Any) -> None:
    """Raise `LayoutError` if a saved state_dict does not fit an optimizer; changes nothing.

    Parameters
    ----------
    saved : dict
        A state_dict.
    optimizer : torch.optim.Optimizer
    then, now : list of list of (str or None)
        `param_names` when it was saved, and of `optimizer`.
    """
    try:
        there = [len(group["params"]) for group in saved["param_groups"]]
    except (KeyError, TypeError) as error:
        raise LayoutError(f"the optimizer of the checkpoint has no parameter groups ({error!r})") from error
    here = [len(group["params"]) for group in optimizer.param_groups]
    if here != there:
        raise LayoutError(
            f"the checkpoint does not fit the optimizer; parameters by group: saved {there}, here {here}; "
            "nothing was loaded"
        )
    if then is not None and then != now:
        # torch knows parameters by number alone and would give the moments to the wrong ones.
        flat = (itertools.chain.from_iterable(groups) for groups in (then, now))
        moved = [f"{a} is now {b}" for a, b in itertools.zip_longest(*flat) if a != b]
        raise LayoutError(
            f"the parameters of the optimizer are in another order; {_first(moved)}; nothing was loaded"
        )


def load_optimizer(saved: dict[str, Any], optimizer: torch.optim.Optimizer, *, exact_dtypes: bool) -> None:
    """Load a state_dict; with `exact_dtypes` undo the casts that torch makes on the way.

    Parameters
    ----------
    saved : dict
        A state_dict. Tensors that need no cast and no move are not copied: the optimizer takes them over.
    optimizer : torch.optim.Optimizer
    exact_dtypes : bool
        Whether each tensor gets the dtype with which it was saved, on the device where torch put it.

    Notes
    -----
    `Optimizer.load_state_dict` casts every tensor of a floating-point parameter to the parameter's dtype,
    except one called ``step``.
    """
    optimizer.load_state_dict(saved)
    if not exact_dtypes:
        return
    for of_saved, group in zip(saved["param_groups"], optimizer.param_groups, strict=True):
        for number, parameter in zip(of_saved["params"], group["params"], strict=True):
            if number in saved["state"] and parameter in optimizer.state:
                optimizer.state[parameter] = _exact(saved["state"][number], optimizer.state[parameter])


def _exact(saved: Any, live: Any) -> Any:
    """Return `live` with the tensors of which `load_state_dict` changed the dtype as they were saved."""
    if isinstance(saved, torch.Tensor) and isinstance(live, torch.Tensor):
        cast = saved.dtype != live.dtype and saved.shape == live.shape
        return saved.to(live.device) if cast else live
    if isinstance(saved, dict) and isinstance(live, dict):
        for key in saved.keys() & live.keys():
            live[key] = _exact(saved[key], live[key])
    elif type(saved) in (list, tuple) and type(saved) is type(live) and len(saved) == len(live):
        return type(saved)(map(_exact, saved, live))
    return live


def moved(value: Any, device: str | torch.device) -> Any:
    """Move the tensors in nested dicts, lists and tuples to a device; dicts are changed in place."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        for key, inner in value.items():
            value[key] = moved(inner, device)
    elif type(value) in (list, tuple):
        return type(value)(moved(inner, device) for inner in value)
    return value


def rng_state() -> dict[str, Any]:
    """Return the states of Python's, numpy's and torch's global generators; draws nothing."""
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Undo `rng_state`; a different number of CUDA devices is logged."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    saved = state.get("cuda", [])
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if len(saved) != devices:
        log.warning("random states of %d CUDA devices were saved and there are %d", len(saved), devices)
    for device, of_device in enumerate(saved[:devices]):
        torch.cuda.set_rng_state(of_device, device)
