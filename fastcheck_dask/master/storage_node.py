"""A storage node that does the master's work while it leads."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from fastcheck_dask.config import settings
from fastcheck_dask.coordination.base import Coordinator, NodeInfo
from fastcheck_dask.coordination.election import Service
from fastcheck_dask.master.duty import Duty
from fastcheck_dask.master.lease_sweep import LeaseSweepDuty
from fastcheck_dask.master.node_watch import NodeWatchDuty, look
from fastcheck_dask.master.persisting import PersistDuty
from fastcheck_dask.master.recoverable import DrillDuty, RecoverableDuty
from fastcheck_dask.master.repairer import DaskRepairer, repair_here
from fastcheck_dask.master.repairing import RepairDuty
from fastcheck_dask.master.service import MasterService
from fastcheck_dask.node.background import Background, background
from fastcheck_dask.tiers.peer import clients_for


def master_of_nodes(
    coordinator: Coordinator, scheduler: str | None = None, *, work: Background | None = None
) -> Service:
    """Return what a storage node does while it leads.

    Parameters
    ----------
    coordinator : Coordinator
        That of the node.
    scheduler : str, optional
        Address of the Dask scheduler on whose workers repairs run, if it is there.
    work : Background, optional
        How often and how fast; as it is configured, unless given.
    """
    found = work or background()
    client = clients_for(settings())
    repair = repair_here if scheduler is None else DaskRepairer(scheduler)

    async def end_lease(node: NodeInfo, run: str) -> None:
        opened = client(node.name, node.address)
        try:
            await opened.lease(run, 0.0)
        finally:
            await opened.close()

    def duties() -> Sequence[Duty]:
        return (
            PersistDuty(coordinator, client),
            LeaseSweepDuty(coordinator, end_lease, interval_seconds=found.sweep_seconds),
            NodeWatchDuty(coordinator, probe=partial(look, client=client)),
            RepairDuty(
                coordinator,
                client,
                repair,
                interval_seconds=found.repair_seconds,
                bytes_per_second=found.repair_bytes_per_second,
            ),
            RecoverableDuty(coordinator, client),
            DrillDuty(
                coordinator,
                client,
                drill_seconds=found.drill_seconds,
                bytes_per_second=found.drill_bytes_per_second,
            ),
        )

    return MasterService(duties)
