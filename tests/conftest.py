"""Fixtures that tests of several packages use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from uuid import uuid4

import pytest

from fastcheck_dask.testing.zookeeper import ZooKeeperMissingError, ZooKeeperServer


@pytest.fixture(scope="session")
def zookeeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ZooKeeperServer]:
    """Return a running server that all tests share; each stays under a root of its own."""
    try:
        with ZooKeeperServer(tmp_path_factory.mktemp("zookeeper")) as server:
            yield server
    except ZooKeeperMissingError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))


@pytest.fixture
def zookeeper_url(zookeeper: ZooKeeperServer) -> str:
    """Return the URL of a root that no other test uses."""
    return f"zk://{zookeeper.hosts}/tests/{uuid4().hex}"
