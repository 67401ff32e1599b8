"""The way to the master over the data port of the storage node that leads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from fastcheck_dask.coordination.election import master_of
from fastcheck_dask.coordination.entries import Entries
from fastcheck_dask.errors import NoMasterError, TierError
from fastcheck_dask.tiers.peer import PeerClient


class WireLink:
    """Asks whom the coordinator names as master; see `MasterLink`.

    Requests are rare and small, so each has a connection of its own and nothing is kept between them. Blocks;
    not to be called from a thread that runs an event loop.

    Parameters
    ----------
    entries : Entries
        To find the master.
    client_of : callable
        Makes a client of a node's name and address.
    """

    def __init__(self, entries: Entries, client_of: Callable[[str, str], PeerClient]) -> None:
        self._entries, self._client_of = entries, client_of

    def ask(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Have the master serve a request; see `MasterLink`."""
        master = master_of(self._entries)
        if master is None or not master.address:
            raise NoMasterError("nobody", "", "")
        try:
            return asyncio.run(self._ask(master.name, master.address, request))
        except TierError as error:
            raise NoMasterError(str(error), master.name, master.address) from error

    async def _ask(self, name: str, address: str, request: Mapping[str, Any]) -> Mapping[str, Any]:
        client = self._client_of(name, address)
        try:
            return await client.ask(request)
        finally:
            await client.close()
