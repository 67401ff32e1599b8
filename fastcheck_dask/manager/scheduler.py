"""Asks the Dask scheduler of the storage nodes which coordinator they use."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Coroutine
from typing import Any, TypeVar

from distributed.core import rpc

from fastcheck_dask.errors import ConfigError, CoordinationError

_T = TypeVar("_T")


def run_apart(coroutine: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine on an event loop of its own thread: the caller may itself be on a loop."""
    with concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="fastcheck-load") as executor:
        return executor.submit(asyncio.run, coroutine).result()


def coordinator_of(address: str, seconds: float) -> str:
    """Return the URL of the coordinator that the storage nodes at a scheduler use; empty without any node.

    Raises
    ------
    CoordinationError
        If the scheduler does not answer.
    ConfigError
        If what answers is no scheduler.
    """
    try:
        identity = run_apart(_identity(address, seconds))
    except Exception as error:  # whatever kind of server listens there, and whatever it answers
        raise CoordinationError(
            f"the scheduler {address} does not answer ({type(error).__name__}: {error}); start it "
            "(`dask scheduler`), correct scheduler=..., or leave it out and give coordinator=..."
        ) from error
    if not isinstance(identity, dict) or identity.get("type") != "Scheduler":
        raise ConfigError(f"scheduler={address!r} is the address of something else; give the scheduler's")
    for worker in identity["workers"].values():
        url = (worker.get("metrics", {}).get("fastcheck") or {}).get("coordinator")
        if url:
            return str(url)
    return ""


async def _identity(address: str, seconds: float) -> Any:
    async with rpc(address, timeout=seconds) as scheduler:  # type: ignore[no-untyped-call]
        return await asyncio.wait_for(scheduler.identity(), seconds)
