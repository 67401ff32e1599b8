"""What the Dask worker of a storage node adds to the stock one: merge tasks and metrics."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from typing import Any

from distributed import Worker
from distributed.client import fire_and_forget
from distributed.diagnostics.plugin import WorkerPlugin

from fastcheck_dask.node.merge_queue import MergeQueue

TASK_PREFIX = "fastcheck-merge"

logger = logging.getLogger(__name__)

#: The queue of each storage node in this process, by node name: a task arrives without references to either.
_queues: dict[str, MergeQueue] = {}
_numbers = itertools.count()


def merge_waiting(node: str, run: str) -> None:
    """Merge the deltas of a run that wait on a node of this process; nothing happens if there is none."""
    queue = _queues.get(node)
    if queue is not None:
        queue.drain(run)


class StoragePlugin(WorkerPlugin):
    """Gives the worker to the merge queue, and the node's numbers to the scheduler.

    Parameters
    ----------
    node : str
        Name of the storage node.
    queue : MergeQueue
        Outlives the worker.
    metrics : callable
        Returns plain values for the scheduler; called in a thread at each heartbeat.
    """

    name = "fastcheck-storage"

    def __init__(self, node: str, queue: MergeQueue, metrics: Callable[[], dict[str, Any]]) -> None:
        self._node = node
        self._queue = queue
        self._metrics = metrics
        self._worker: Worker | None = None

    def setup(self, worker: Worker) -> None:
        """Attach to a worker that starts."""

        async def metrics(_worker: Worker) -> dict[str, Any]:
            return await asyncio.to_thread(self._metrics)

        self._worker = worker
        # Not an extension: a heartbeat from one without a twin on the scheduler closes the worker.
        worker.metrics["fastcheck"] = metrics
        _queues[self._node] = self._queue
        self._queue.remove_trigger(self.submit)
        self._queue.add_trigger(self.submit)

    def teardown(self, worker: Worker) -> None:
        """Leave a worker that closes; a worker that closes late does not take the next one's place."""
        if worker is not self._worker:
            return
        self._queue.remove_trigger(self.submit)
        if _queues.get(self._node) is self._queue:
            del _queues[self._node]
        self._worker = None

    def submit(self, run: str, generation: int) -> None:
        """Have a task on this worker merge what waits; from any thread, without blocking."""
        worker = self._worker
        if worker is not None:
            worker.loop.add_callback(self._submit, worker, run, generation)

    def _submit(self, worker: Worker, run: str, generation: int) -> None:
        try:
            future = worker.client.submit(
                merge_waiting,
                self._node,
                run,
                # What follows a number is not part of the prefix under which the dashboard groups tasks.
                key=f"{TASK_PREFIX}-{next(_numbers)}-{self._node}-{run}-{generation}",
                workers=[worker.address],
                allow_other_workers=False,
                pure=False,
            )
            fire_and_forget(future)  # type: ignore[no-untyped-call]
        except Exception:  # whatever Dask raises while its scheduler is gone, the local thread merges
            logger.debug("no Dask task for the merge of %s", run, exc_info=True)
