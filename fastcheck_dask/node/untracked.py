"""Keeps the garbage collector from going through what a node holds: its full passes hold the interpreter.

A pass takes time for every object that is tracked: with tens of thousands of chunks it kept a node from
answering for a third of a second. What is stored is never changed and refers to nothing that could refer back
to it, so it cannot be part of a cycle, and counting references is enough to free it.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable

_untrack: Callable[[object], object] | None = None
if sys.implementation.name == "cpython":
    _untrack = ctypes.pythonapi.PyObject_GC_UnTrack
    _untrack.argtypes = [ctypes.py_object]
    _untrack.restype = None


def untrack(*values: object) -> None:
    """Take objects out of the collector's lists; nothing happens to those that are not in them.

    Parameters
    ----------
    *values : object
        Never changed again, and part of no cycle: one that is would never be freed.
    """
    if _untrack is not None:
        for value in values:
            # Objects without a header of the collector must not be passed on.
            if gc.is_tracked(value):
                _untrack(value)


def freeze_what_is_here() -> None:
    """Have the collector skip all that was made until now: modules and classes, which stay anyway."""
    gc.collect()
    gc.freeze()
