"""Whether what several processes saw of one register can have happened in one order.

Wing and Gong's search, which remembers the pairs of done operations and value that it has seen.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Event:
    """One operation on the register, from its call to its return.

    A write whose outcome is not known never returned (`returned` is infinite): it may have taken effect at
    any moment after its call, or never.
    """

    kind: Literal["write", "read"]
    #: Written, or returned by the read.
    value: Hashable
    called: float
    returned: float = math.inf


def check_register(history: Sequence[Event], *, initial: Hashable = None) -> str:
    """Check the history of one register.

    Parameters
    ----------
    history : sequence of Event
        In any order. Writes have different values.
    initial : hashable
        Value before the first write.

    Returns
    -------
    str
        Empty if there is an order of all operations that returned, in which each takes effect between its
        call and its return, and each read returns what was written last before it. Else which could not be
        placed. So no read is older than a write that was completed before its call (freshness), and no two
        reads one after the other go back.
    """
    events = sorted(history, key=lambda event: event.called)
    everything = frozenset(range(len(events)))
    required = frozenset(n for n in everything if events[n].returned < math.inf)
    # A read that never returned says nothing.
    open_reads = frozenset(n for n in everything - required if events[n].kind == "read")
    seen: set[tuple[frozenset[int], Hashable]] = set()
    waiting: list[tuple[frozenset[int], Hashable]] = [(open_reads, initial)]
    farthest: frozenset[int] = frozenset()
    while waiting:
        done, value = waiting.pop()
        if required <= done:
            return ""
        if len(done) > len(farthest):
            farthest = done
        left = everything - done
        # Whatever takes effect next was called before anything that is left returned.
        until = min(events[n].returned for n in left)
        for n in left:
            event = events[n]
            if event.called > until or (event.kind == "read" and event.value != value):
                continue
            state = done | {n}, event.value
            if state not in seen:
                seen.add(state)
                waiting.append(state)
    stuck = min((n for n in required - farthest), key=lambda n: events[n].returned)
    return f"no order explains {events[stuck]}; before it {_last(events, farthest)}"


def _last(events: Sequence[Event], done: frozenset[int]) -> str:
    writes = [events[n] for n in sorted(done) if events[n].kind == "write"]
    return f"the last write could be {writes[-1]}" if writes else "nothing was written"
