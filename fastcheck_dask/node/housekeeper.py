"""What a storage node does now and then: drop saves nobody goes on with, ask what became of others."""

from __future__ import annotations

import logging
import threading

from fastcheck_dask.coordination.base import CommitRecord, Coordinator
from fastcheck_dask.errors import CoordinationError, FastCheckError
from fastcheck_dask.node.generations import Undecided
from fastcheck_dask.node.shard_store import ShardStore

#: Between two rounds.
ROUND_SECONDS = 15.0

logger = logging.getLogger(__name__)


class Housekeeper:
    """A thread that keeps a store tidy.

    A save whose author died after its nodes had voted for it may or may not have been committed, and a node
    that was not told that a generation is persisted keeps it for ever: of both the coordinator knows. It is
    asked only about runs that nobody saves at the moment.

    Parameters
    ----------
    store : ShardStore
    coordinator : Coordinator
        Both outlive the housekeeper.
    round_seconds : float
        Between two rounds, and before the first.
    """

    def __init__(
        self, store: ShardStore, coordinator: Coordinator, *, round_seconds: float = ROUND_SECONDS
    ) -> None:
        self._store, self._coordinator = store, coordinator
        self._round_seconds = round_seconds
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="fastcheck-housekeeper", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End after the round that is going on. Idempotent."""
        self._closing.set()
        self._thread.join()

    def _work(self) -> None:
        while not self._closing.wait(self._round_seconds):
            try:
                tidy(self._store, self._coordinator)
            except CoordinationError as error:
                logger.debug("node %s cannot ask its coordinator: %s", self._store.name, error)
            except Exception:  # the thread outlives whatever a round raises
                logger.exception("housekeeping of node %s failed", self._store.name)


def tidy(store: ShardStore, coordinator: Coordinator) -> None:
    """Do one round: drop what has expired, and settle what the coordinator knows."""
    store.expire()
    for undecided in store.undecided():
        latest = coordinator.latest(undecided.run)
        if latest is not None:
            _settle(store, undecided, latest)


def _settle(store: ShardStore, undecided: Undecided, latest: CommitRecord) -> None:
    run = undecided.run
    try:
        for generation, token in undecided.prepared:
            if (latest.generation, latest.token) == (generation, token):
                store.commit(run, generation, token)
            elif latest.generation >= generation:
                # A commit is always greater than the latest one: this can never be committed any more.
                store.abort(run, token)
        if latest.persisted:
            store.persisted(run, latest.generation, latest.token)
    except FastCheckError as error:
        logger.debug("node %s: run %s is not settled: %s", store.name, run, error)
