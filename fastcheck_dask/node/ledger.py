"""Counts the bytes that a storage node holds. No locks."""

from __future__ import annotations

from collections.abc import Iterable

from fastcheck_dask.tiers.wire import Bits


class Ledger:
    """Counts the bytes of arrays that are held, each once however often it is held. Not thread-safe."""

    def __init__(self) -> None:
        self.used_bytes = 0
        self._holders: dict[int, int] = {}

    def hold(self, arrays: Iterable[Bits]) -> None:
        """Count arrays; the caller keeps them alive until it lets them go."""
        for array in arrays:
            holders = self._holders.get(id(array), 0)
            self._holders[id(array)] = holders + 1
            if holders == 0:
                self.used_bytes += array.nbytes

    def let_go(self, arrays: Iterable[Bits]) -> list[Bits]:
        """Undo :meth:`hold`; return the arrays that nobody holds any more."""
        released = []
        for array in arrays:
            holders = self._holders.pop(id(array)) - 1
            if holders:
                self._holders[id(array)] = holders
            else:
                self.used_bytes -= array.nbytes
                released.append(array)
        return released
