"""Keeps a run in the memory of its storage nodes for as long as its agent lives, and a lease longer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from fastcheck_dask.coordination.base import CommitRecord
from fastcheck_dask.coordination.leases import RENEWALS_PER_LEASE, LeaseRenewer
from fastcheck_dask.errors import FastCheckError
from fastcheck_dask.tiers.peer import PeerClient

log = logging.getLogger(__name__)


class LeaseKeeper:
    """Renews the lease of a run: on the nodes of its newest commit with each one, and all of it by a timer.

    Belongs to one event loop.

    Parameters
    ----------
    run : str
        Which run.
    client : callable
        Opens a node by name and address.
    seconds : float
        How long each renewal lasts.
    tell : callable, optional
        Renews it at the coordinator, by which the master goes; blocks.
    """

    def __init__(
        self,
        run: str,
        client: Callable[[str, str], PeerClient],
        seconds: float,
        tell: Callable[[], None] = lambda: None,
    ) -> None:
        self._run, self._client, self._seconds = run, client, seconds
        self._tell, self._renewer = tell, LeaseRenewer(tell, seconds)
        self._record: CommitRecord | None = None
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def note(self, record: CommitRecord) -> None:
        """Renew on the nodes of a commit from now on, and at once; does not wait for it."""
        self._record = record
        self._changed.set()
        if self._task is None:
            self._task = asyncio.create_task(self._keep())

    async def close(self) -> None:
        """Renew once more, and then no more: the lease counts from now. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
            self._renewer = LeaseRenewer(self._tell, self._seconds)
            await self.renew()

    async def _keep(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._seconds / RENEWALS_PER_LEASE):
                    await self._changed.wait()
            self._changed.clear()
            await self.renew()

    async def renew(self) -> None:
        """Renew on every node once; one that cannot be reached keeps what it holds for some time anyway."""
        if self._record is not None:
            nodes = zip(self._record.nodes, self._record.addresses, strict=True)
            await asyncio.gather(
                asyncio.to_thread(self._renewer.tick),
                *(self._renew_at(name, address) for name, address in nodes),
            )

    async def _renew_at(self, name: str, address: str) -> None:
        client = self._client(name, address)
        try:
            await client.lease(self._run, self._seconds)
        except FastCheckError as error:
            log.debug("the lease of run %s is not renewed on %s: %s", self._run, name, error)
        finally:
            await client.close()
