"""The way to a master in the same process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastcheck_dask.coordination.election import master_of
from fastcheck_dask.coordination.entries import Entries
from fastcheck_dask.coordination.states.master import Operations
from fastcheck_dask.errors import NoMasterError


class LocalLink:
    """Asks whom the coordinator names as master, among the masters of this process.

    Parameters
    ----------
    entries : Entries
        To find the master.
    masters : mapping of str to Operations
        What each serves; may change meanwhile.
    """

    def __init__(self, entries: Entries, masters: Mapping[str, Operations]) -> None:
        self._entries, self._masters = entries, masters

    def ask(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Have the master serve a request; see `MasterLink`."""
        master = master_of(self._entries)
        if master is None or master.name not in self._masters:
            raise NoMasterError(
                "this process", master.name if master else "", master.address if master else ""
            )
        return self._masters[master.name][request["op"]](request)
