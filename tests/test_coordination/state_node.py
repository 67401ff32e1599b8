"""A storage node as far as the states are concerned: it stands for election, serves, and publishes itself."""

from __future__ import annotations

import logging
import sys

from fastcheck_dask.coordination import connect
from fastcheck_dask.node.data_server import DataServer
from fastcheck_dask.node.shard_store import ShardStore
from fastcheck_dask.node.states import NodeStates
from fastcheck_dask.tiers.object_store import open_store


def main(url: str, name: str, session_seconds: str) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    coordinator = connect(url, session_seconds=float(session_seconds), timeout_seconds=3.0)
    store = ShardStore(name, 2**30)
    states = NodeStates(name, coordinator.entries, store.status)
    server = DataServer(store, open_store, operations=states.operations)
    server.start()
    states.start(server.address)
    sys.stdout.write(f"{server.address}\n")
    sys.stdout.flush()
    # Until the test closes it.
    sys.stdin.read()
    states.close()
    server.close()
    coordinator.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
