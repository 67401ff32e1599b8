"""The states of storage nodes as everybody may rely on them: a master with bits, and entries with values.

A node tells the master that its state is about to change (*begin*: its bit is set), writes the entry, and
tells the master that it is done (*end*: the bit is cleared). A reader asks the master, waits while a bit is
set, and then reads the entries that changed. Source: FastCheck, "master, bitmap and key-value store"; what it
takes to make that safe is told in ``docs/concepts/coordination.md``.
"""

from fastcheck_dask.coordination.states.link import LocalLink
from fastcheck_dask.coordination.states.master import StateMaster
from fastcheck_dask.coordination.states.roles import StateReader, StateUpdater
from fastcheck_dask.coordination.states.value import NodeState

__all__ = ["LocalLink", "NodeState", "StateMaster", "StateReader", "StateUpdater"]
