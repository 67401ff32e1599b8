"""TLS to Dask's scheduler: real schedulers, with TLS and without."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import closing, contextmanager

import dask
import pytest

from fastcheck_dask.errors import ConfigError, CoordinationError
from fastcheck_dask.manager.scheduler import coordinator_of
from fastcheck_dask.scheduler_tls import check_scheduler, mismatch


@pytest.fixture(scope="module")
def files(authority):
    """CA, certificate and key."""
    return tuple(map(str, (authority.ca, *authority.issue("dask"))))


@contextmanager
def configured(ca, cert, key, *roles):
    values = {"distributed.comm.tls.ca-file": ca}
    for role in roles or ("client", "worker", "scheduler"):
        values |= {f"distributed.comm.tls.{role}.cert": cert, f"distributed.comm.tls.{role}.key": key}
    with dask.config.set(values):
        yield


@contextmanager
def scheduler(folder, *options):
    """Run a scheduler, and give its address."""
    command = [sys.executable, "-m", "distributed.cli.dask_scheduler", "--host", "127.0.0.1"]
    process = subprocess.Popen(
        [*command, "--port", "0", "--no-dashboard", *options],
        cwd=folder,
        env={**os.environ, "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if "Scheduler at:" in line:
                break
        yield line.split()[-1]
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def secure(tmp_path_factory, files):
    """Return the address of a scheduler with TLS."""
    options = zip(("--tls-ca-file", "--tls-cert", "--tls-key"), files, strict=True)
    with scheduler(tmp_path_factory.mktemp("secure"), *(part for pair in options for part in pair)) as found:
        yield found


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Return the address of a scheduler without TLS."""
    with scheduler(tmp_path_factory.mktemp("plain")) as found:
        yield found


def test_mismatch_is_told_and_only_then(secure, plain):
    assert mismatch(secure) is None
    assert mismatch(plain) is None
    assert mismatch(plain.removeprefix("tcp://")) is None
    location = secure.removeprefix("tls://")
    assert mismatch(f"tcp://{location}") == (
        f"the scheduler at {location} speaks TLS: its address is tls://{location}, not tcp://"
    )
    assert "speaks no TLS: its address is tcp://" in (mismatch(plain.replace("tcp:", "tls:")) or "")


@pytest.mark.parametrize("address", ["inproc://x/1", "tcp://127.0.0.1", "ucx://127.0.0.1:1", "nonsense"])
def test_mismatch_of_what_is_no_such_address_is_none(address):
    assert mismatch(address) is None


def test_mismatch_of_a_scheduler_that_is_not_there_is_none():
    with closing(socket.socket()) as unused:
        unused.bind(("127.0.0.1", 0))
        assert mismatch(f"tcp://127.0.0.1:{unused.getsockname()[1]}") is None


def test_manager_with_the_wrong_scheme_is_told_the_right_one(secure, plain, files):
    with configured(*files):
        with pytest.raises(CoordinationError, match=r"speaks TLS: its address is tls://.*correct scheduler="):
            coordinator_of(secure.replace("tls:", "tcp:"), 30.0)
        with pytest.raises(CoordinationError, match="speaks no TLS: its address is tcp://"):
            coordinator_of(plain.replace("tcp:", "tls:"), 30.0)


def test_files_that_are_not_configured_or_do_not_fit_are_named(secure, files, stranger, tmp_path):
    ca, cert, key = files
    with pytest.raises(ConfigError, match=r"has no distributed.comm.tls.ca-file: give .*--tls-ca-file"):
        coordinator_of(secure, 30.0)
    with configured(ca, cert, key, "client"):
        check_scheduler(secure, "client")
        with pytest.raises(ConfigError, match=r"has no distributed.comm.tls.worker.cert"):
            check_scheduler(secure, "client", "worker")
    with (
        configured(ca, cert, str(tmp_path / "missing.key")),
        pytest.raises(ConfigError, match=r"missing.key \(distributed.comm.tls.client.key\) cannot be read"),
    ):
        check_scheduler(secure, "client")
    with (
        configured(str(stranger.ca), cert, key),
        pytest.raises(ConfigError, match=r"\(distributed.comm.tls.worker.cert\) is refused by the CA"),
    ):
        check_scheduler(secure, "worker")


def test_addresses_without_tls_need_no_files():
    check_scheduler("tcp://127.0.0.1:1", "client", "worker")
