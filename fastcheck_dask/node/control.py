"""The Dask worker of a storage node: made again whenever it closes, for it is only the control plane."""

from __future__ import annotations

import asyncio
import logging
import tempfile
from contextlib import suppress

from distributed import Worker

from fastcheck_dask.errors import ConfigError
from fastcheck_dask.node.plugin import StoragePlugin
from fastcheck_dask.scheduler_tls import mismatch
from fastcheck_dask.tiers.wire import is_loopback

#: Between the end of a worker and the next.
BACK_OFF_SECONDS = 0.5
_CLOSE_SECONDS = 2.0

logger = logging.getLogger(__name__)


def check_worker(scheduler: str | None, host: str, *, insecure: bool) -> None:
    """Raise `ConfigError` if a worker would take pickles from whoever reaches it."""
    if scheduler is None or insecure or scheduler.startswith("tls://") or is_loopback(host):
        return
    raise ConfigError(
        f"the Dask worker would listen on {host} without TLS, and whoever reaches it can run code here; "
        f"use a scheduler at tls:// in place of {scheduler}, or none, or a loopback host, or say insecure "
        "(--insecure) if the network is trusted"
    )


async def keep_worker(scheduler: str, *, name: str, host: str, plugin: StoragePlugin) -> None:
    """Keep a worker registered with a scheduler, until cancelled.

    A stock worker closes when its scheduler goes away, is restarted, or retires it. Then another is made,
    under the same name and, where it is still free, port; a scheduler that is absent is waited for.

    Parameters
    ----------
    scheduler : str
        Address of the scheduler.
    name, host : str
        Of the worker.
    plugin : StoragePlugin
        Goes into each of the workers.
    """
    port, said = 0, ""
    with tempfile.TemporaryDirectory(prefix="fastcheck-node-", ignore_cleanup_errors=True) as directory:
        while True:
            try:
                port = await _run_worker(
                    scheduler, name=name, host=host, port=port, plugin=plugin, directory=directory
                )
                logger.info("the Dask worker of node %s closed; its data is still served", name)
                said = ""
            except Exception as error:  # whatever Dask raises, the node goes on and tries again
                if (why := f"{type(error).__name__}: {error}") != said:
                    logger.warning("node %s has no Dask worker: %s", name, why)
                port, said = 0, why
            await asyncio.sleep(BACK_OFF_SECONDS)


async def _run_worker(
    scheduler: str, *, name: str, host: str, port: int, plugin: StoragePlugin, directory: str
) -> int:
    """Run one worker until it closes; return its port."""
    if (wrong := await asyncio.to_thread(mismatch, scheduler)) is not None:
        # Dask would wait for an answer for half a minute, and then not say why there is none.
        raise ConfigError(wrong)
    worker = Worker(
        scheduler,
        name=name,
        host=host,
        port=port,
        nthreads=1,
        # Dask would pause, and a nanny kill, a worker whose process holds much that is not Dask's.
        memory_limit=0,
        dashboard=False,
        plugins=(plugin,),
        death_timeout=None,
        local_directory=directory,
    )
    try:
        await worker
        port = worker.port
        logger.info("node %s registered with %s as %s", name, scheduler, worker.address)
        await worker.finished()  # type: ignore[no-untyped-call]
    finally:
        # A task that is merging cannot be cancelled, and need not be waited for.
        with suppress(TimeoutError, OSError):
            async with asyncio.timeout(_CLOSE_SECONDS):
                await worker.close(timeout=_CLOSE_SECONDS, executor_wait=False, reason="storage-node")
    return port
