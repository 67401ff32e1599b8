"""Asks the Dask scheduler of the storage nodes which coordinator they use."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Coroutine
from typing import Any, TypeVar

from distributed.core import rpc
from distributed.security import Security

from fastcheck_dask.clock import Deadline
from fastcheck_dask.errors import ConfigError, CoordinationError
from fastcheck_dask.manager.arguments import check_address
from fastcheck_dask.scheduler_tls import check_scheduler, mismatch

_T = TypeVar("_T")
_ASK_AGAIN_SECONDS = 0.1


def run_apart(coroutine: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine on an event loop of its own thread: the caller may itself be on a loop."""
    with concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="fastcheck-load") as executor:
        return executor.submit(asyncio.run, coroutine).result()


def coordinator_of_nodes(scheduler: str | None, coordinator: str | None, seconds: float) -> str | None:
    """Return the coordinator that was given, or the one that the nodes of a scheduler use; None without both.

    Raises
    ------
    ConfigError
        If one of them is no address, or no storage node is registered with the scheduler.
    CoordinationError
        If the scheduler does not answer in `seconds`.
    """
    if coordinator is not None:
        coordinator = check_address(coordinator, "coordinator")
    if scheduler is not None:
        # Asked even if the coordinator was given: a wrong address is told now, not when it matters.
        asked = coordinator_of(check_address(scheduler, "scheduler"), seconds)
        coordinator = coordinator or asked
        if not coordinator:
            raise ConfigError(
                f"no storage node is registered with the scheduler {scheduler}; start some "
                "(`dask fastcheck storage`), or give coordinator=... so that they can come later"
            )
    return coordinator


def coordinator_of(address: str, seconds: float) -> str:
    """Return the URL of the coordinator that the storage nodes at a scheduler use.

    Nodes that were just started are waited for, `seconds` at most. Empty if there is none.

    Raises
    ------
    CoordinationError
        If the scheduler does not answer.
    ConfigError
        If what answers is no scheduler, or the files for TLS cannot be used.
    """
    check_scheduler(address, "client")
    if (wrong := mismatch(address)) is not None:
        # Dask would wait for an answer until the time is over.
        raise CoordinationError(f"{wrong}; correct scheduler=...")
    try:
        return run_apart(_coordinator_of(address, seconds))
    except ConfigError:
        raise
    except Exception as error:  # whatever kind of server listens there, and whatever it answers
        raise CoordinationError(
            f"the scheduler {address} does not answer ({type(error).__name__}: {error}); start it "
            "(`dask scheduler`), correct scheduler=..., or leave it out and give coordinator=..."
        ) from error


async def _coordinator_of(address: str, seconds: float) -> str:
    deadline = Deadline.after(seconds)
    security = Security().get_connection_args("client")  # type: ignore[no-untyped-call]
    connecting = rpc(address, timeout=seconds, connection_args=security)  # type: ignore[no-untyped-call]
    async with connecting as scheduler:
        while True:
            identity = await asyncio.wait_for(scheduler.identity(), seconds)
            if not isinstance(identity, dict) or identity.get("type") != "Scheduler":
                raise ConfigError(f"scheduler={address!r} is the address of something else, no scheduler")
            for worker in identity["workers"].values():
                # Comes with a heartbeat, which may be later than the registration.
                url = (worker.get("metrics", {}).get("fastcheck") or {}).get("coordinator")
                if url:
                    return str(url)
            if deadline.passed:
                return ""
            await asyncio.sleep(_ASK_AGAIN_SECONDS)
