"""Fixtures that tests of several packages use."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from hypothesis import settings

from fastcheck_dask.engine import pace
from fastcheck_dask.testing.certificates import Certificates
from fastcheck_dask.testing.s3 import S3Server, s3_environment
from fastcheck_dask.testing.zookeeper import ZooKeeperEnsemble, ZooKeeperMissingError, ZooKeeperServer
from fastcheck_dask.tiers.wire_tls import DataTls

# Seeds are fixed, and a slow moment of the machine is no failure. Here, for all: a test takes what it does
# not say itself from the profile that is there when it is defined.
settings.register_profile("fastcheck", derandomize=True, deadline=None, max_examples=100)
settings.load_profile("fastcheck")

#: As it is outside of tests.
_JITTER_SECONDS = pace.JITTER_SECONDS


@contextlib.contextmanager
def _or_skip() -> Iterator[None]:
    """Skip the test where there is no ZooKeeper, except in continuous integration."""
    try:
        yield
    except ZooKeeperMissingError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def zookeeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ZooKeeperServer]:
    """Return a running server that all tests share; each stays under a root of its own."""
    with _or_skip(), ZooKeeperServer(tmp_path_factory.mktemp("zookeeper")) as server:
        yield server


@pytest.fixture
def ensemble(tmp_path: Path) -> Iterator[ZooKeeperEnsemble]:
    """Return three running servers of the test's own, to be killed, paused and restarted."""
    with _or_skip(), ZooKeeperEnsemble(tmp_path / "ensemble") as servers:
        yield servers


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


@contextlib.contextmanager
def _mounted(folder: Path, nbytes: int) -> Iterator[Path]:
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={nbytes},mode=700", "tmpfs", str(folder)]
    if os.geteuid() or not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a small file system cannot be mounted here")
    try:
        yield folder
    finally:
        # Lazily: a failed test may have left a mapping.
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def small_file_system() -> Callable[[Path, int], contextlib.AbstractContextManager[Path]]:
    """Return what mounts a file system of so many bytes in a new folder; skips where it may not."""
    return _mounted


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Return a CA that all tests share."""
    return Certificates(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="session")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Return another CA."""
    return Certificates(tmp_path_factory.mktemp("stranger"))


@pytest.fixture(scope="session")
def member(authority: Certificates) -> DataTls:
    """Return what makes a member of the data ports."""
    cert, key = authority.issue("member")
    return DataTls(str(authority.ca), str(cert), str(key))


@pytest.fixture(params=["plain", "tls"])
def tls(request: pytest.FixtureRequest) -> DataTls | None:
    """Have a test run on plain data ports, and on such with TLS."""
    found: DataTls | None = request.getfixturevalue("member") if request.param == "tls" else None
    return found


@pytest.fixture(autouse=True)
def nobody_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have loads wait for a node that the others on a busy machine hold up; `impatient` loads do not."""
    monkeypatch.setattr(pace, "JITTER_SECONDS", 20.0)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch, nobody_is_late: None) -> None:
    """Have loads go on without a node that is late, as they do outside of tests."""
    monkeypatch.setattr(pace, "JITTER_SECONDS", _JITTER_SECONDS)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let some tests run for longer than they do by default."""
    parser.addoption("--model-walks", type=int, default=100, help="random walks through each model")
    parser.addoption("--faults", type=int, default=4, help="random faults of storage nodes, one at a time")
    parser.addoption("--faults-seed", type=int, default=20251, help="which faults, and when")
    parser.addoption("--chaos-seconds", type=float, default=15.0, help="how long servers are harmed")
    parser.addoption("--chaos-seed", type=int, default=None, help="which harm is done; drawn and printed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files of slow tests: a long one that comes last keeps one process busy alone."""
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -slow[item.path])


@pytest.fixture
def model_walks(request: pytest.FixtureRequest) -> int:
    """Return how many random walks a model takes."""
    walks: int = request.config.getoption("--model-walks")
    return walks
