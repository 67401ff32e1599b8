"""A process that dies at the n-th change of its stores, before or after it, and changes nothing any more."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

from fastcheck_dask.errors import TierError
from fastcheck_dask.tiers.store import ObjectStore, Parts, Payload, write_at_once

#: The methods that change something.
CHANGES = frozenset(("write", "create", "delete", "delete_tree", "sync"))


def fail() -> None:
    """Die as far as one can and go on: this change raises, and each one after it."""
    raise TierError("it dies")


class Death:
    """Counts the changes of all stores of a process. Any thread may call.

    Parameters
    ----------
    at : int
        Number of the change at which the process dies, from 1 on.
    after : bool
        Whether that change is still made.
    die : callable
        How; it is called anew for each change that follows.
    """

    def __init__(self, at: int, *, after: bool, die: Callable[[], None] = fail) -> None:
        self._left, self._after, self._die = at, after, die
        self._lock = threading.Lock()

    def around(self, change: Callable[[], Any]) -> Any:
        """Make a change, unless the process is dead by now."""
        with self._lock:
            self._left -= 1
            dead = self._left <= 0
        if dead and not self._after:
            self._die()
        result = change()
        if dead:
            self._die()
        return result


class DyingStore:
    """An `ObjectStore` over another one, of a process that dies."""

    def __init__(self, store: ObjectStore, death: Death) -> None:
        self._store, self._death = store, death
        self.location = store.location

    def write_all(self, files: Iterable[tuple[str, Payload | Parts]]) -> None:
        """See `ObjectStore`; each of them is a change of its own."""
        write_at_once(self.write, files)

    def __getattr__(self, name: str) -> Any:
        """Return a method of the other store; if it changes something, with the death around it."""
        method = getattr(self._store, name)
        if name not in CHANGES:
            return method
        return lambda *arguments: self._death.around(lambda: method(*arguments))
