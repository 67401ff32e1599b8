"""Fixtures that tests of several packages use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from uuid import uuid4

import pytest

from fastcheck_dask.testing.s3 import S3Server, s3_environment
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


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """Return a running S3 server that all tests share; its credentials are in the environment."""
    with S3Server(tmp_path_factory.mktemp("s3")) as server, s3_environment(server):
        yield server


@pytest.fixture
def s3_location(s3_server: S3Server) -> str:
    """Return a location in the bucket that no other test uses."""
    return s3_server.url(f"{uuid4().hex}/ckpts")
