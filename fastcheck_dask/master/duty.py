"""What a duty of the master is, and what it may rely on."""

from __future__ import annotations

from typing import Protocol

from fastcheck_dask.coordination.election import Leadership

__all__ = ["Duty", "Leadership"]


class Duty(Protocol):
    """One thing that the master does again and again.

    Another master may have begun the same work and died, or may still believe that it is one: whatever a duty
    does has to be idempotent, and what must happen once at most ends in a fenced change of an entry, in a
    commit marker that only one can create, or in an operation that storage nodes know to be old.
    """

    @property
    def name(self) -> str:
        """For the log and the status."""
        ...

    @property
    def interval_seconds(self) -> float:
        """Pause between the end of one round and the next."""
        ...

    async def run(self, leadership: Leadership) -> None:
        """Do one round. Returns between two steps when the leadership is not in force.

        A new master makes new duties: they may count time from their first round on. Any `FastCheckError` is
        written to the log, and the next round tries again.
        """
        ...
