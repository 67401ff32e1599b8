"""Servers of our own: distribution, single servers, ensembles, and the command that runs them."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner
from kazoo.client import KazooClient

from fastcheck_dask import cli
from fastcheck_dask.coordination.zookeeper import distribution, server
from fastcheck_dask.coordination.zookeeper.command import run_zookeeper
from fastcheck_dask.coordination.zookeeper.distribution import ZooKeeperMissingError
from fastcheck_dask.coordination.zookeeper.ensemble import ZooKeeperEnsemble
from fastcheck_dask.coordination.zookeeper.server import ServerOptions, ZooKeeperServer, free_ports
from fastcheck_dask.errors import ConfigError, CoordinationError


@pytest.fixture
def client_of():
    """Return a function that connects a client of the test's own."""
    with contextlib.ExitStack() as stack:

        def start(hosts):
            client = KazooClient(hosts, timeout=10.0)
            client.start()
            stack.callback(client.close)
            stack.callback(client.stop)
            return client

        yield start


# What is installed


def test_class_path_nothing_installed_says_how_to_install(tmp_path, monkeypatch):
    monkeypatch.delenv("ZOOKEEPER_HOME", raising=False)
    monkeypatch.setattr(distribution, "_DEBIAN", tmp_path)
    with pytest.raises(ZooKeeperMissingError, match=r"apt-get install.*zookeeper.*ZOOKEEPER_HOME"):
        distribution.class_path()


def test_class_path_zookeeper_home_is_used_or_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("ZOOKEEPER_HOME", str(tmp_path))
    with pytest.raises(ZooKeeperMissingError, match="ZOOKEEPER_HOME"):
        distribution.class_path()
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "zookeeper-3.9.2.jar").touch()
    assert distribution.class_path() == str(tmp_path / "lib" / "zookeeper-3.9.2.jar")


def test_java_missing_says_how_to_install(monkeypatch, tmp_path):
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ZooKeeperMissingError, match=r"apt-get install.*default-jre-headless"):
        distribution.java()
    result = CliRunner().invoke(cli.main, ["zookeeper", "start"])
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert "default-jre-headless" in result.stderr


# One server


@pytest.mark.zookeeper
def test_server_stopped_leaves_no_process_and_restart_keeps_data(tmp_path, client_of, eventually):
    with ZooKeeperServer(tmp_path) as one:
        client = client_of(one.hosts)
        client.create("/a", b"kept")
        port = one.port
        one.restart()
        eventually(lambda: one.mode == "standalone")
        assert one.port == port
        assert client.retry(client.get, "/a")[0] == b"kept"
        pid = one.pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.zookeeper
def test_server_that_cannot_start_shows_its_log(tmp_path, monkeypatch):
    monkeypatch.setattr(server, "_MAIN", "org.example.Missing")
    with pytest.raises(CoordinationError, match=r"org\.example\.Missing"):
        ZooKeeperServer(tmp_path).start()


@pytest.mark.zookeeper
def test_server_port_taken_meanwhile_another_is_tried(tmp_path, monkeypatch, zookeeper):
    ports = [[zookeeper.port]]
    monkeypatch.setattr(server, "free_ports", lambda count: ports.pop() if ports else free_ports(count))
    with ZooKeeperServer(tmp_path) as one:
        assert one.port != zookeeper.port
        assert one.mode == "standalone"
    with pytest.raises(CoordinationError, match=rf"port {zookeeper.port}[\s\S]*BindException"):
        ZooKeeperServer(tmp_path, port=zookeeper.port).start()


def test_free_ports_are_different_and_never_given_to_a_connection():
    ports = free_ports(20)
    assert len(set(ports)) == 20
    lowest, highest = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    assert lowest < 11_000 or not any(lowest <= port <= highest for port in ports)


def test_free_ports_where_connections_get_all_are_free_all_the_same(monkeypatch):
    monkeypatch.setattr(server, "_LOWEST_PORT", 2**16)
    assert len(set(free_ports(20))) == 20


# Ensembles


@pytest.mark.zookeeper
def test_ensemble_leader_killed_another_leads_and_data_is_there(ensemble, client_of, eventually):
    client = client_of(ensemble.hosts)
    client.create("/a", b"kept")
    leader = ensemble.wait_leader()
    # One that is slow to answer says nothing.
    eventually(lambda: sorted(one.mode for one in ensemble.servers) == ["follower", "follower", "leader"])
    leader.kill()
    assert ensemble.wait_leader() is not leader
    assert client.retry(client.get, "/a")[0] == b"kept"
    leader.start()
    eventually(lambda: leader in ensemble.followers)
    assert client_of(leader.hosts).get("/a")[0] == b"kept"


@pytest.mark.zookeeper
def test_ensemble_leader_paused_another_leads_and_it_follows_when_resumed(ensemble, eventually):
    leader = ensemble.wait_leader()
    leader.pause()
    assert ensemble.wait_leader() is not leader
    leader.resume()
    eventually(lambda: leader.mode == "follower")


@pytest.mark.zookeeper
def test_ensemble_majority_killed_there_is_no_leader_until_one_is_back(ensemble):
    leader, *others = sorted(ensemble.servers, key=lambda one: one.mode != "leader")
    for one in others:
        one.kill()
    with pytest.raises(CoordinationError, match="no leader"):
        ensemble.wait_leader(0.0)
    others[0].start()
    assert ensemble.wait_leader() in (leader, others[0])


@pytest.mark.zookeeper
def test_ensemble_made_again_has_its_data_and_other_size_is_refused(tmp_path, client_of):
    with ZooKeeperEnsemble(tmp_path, 1) as ensemble:
        client_of(ensemble.hosts).create("/a", b"kept")
        assert ensemble.wait_leader().mode == "standalone"
    with ZooKeeperEnsemble(tmp_path, 1) as ensemble:
        assert client_of(ensemble.hosts).get("/a")[0] == b"kept"
    with pytest.raises(ConfigError, match="data of 1 ZooKeeper servers"):
        ZooKeeperEnsemble(tmp_path, 3).start()


@pytest.mark.zookeeper
def test_ensemble_one_cannot_start_none_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr(server, "_MAIN", "org.example.Missing")
    ensemble = ZooKeeperEnsemble(tmp_path, options=ServerOptions(start_seconds=30.0))
    with pytest.raises(CoordinationError, match=r"org\.example\.Missing"):
        ensemble.start()
    assert not any(one.running for one in ensemble.servers)


# The command


@pytest.fixture
def command(tmp_path):
    """Return a function that starts the command; whatever it has left is killed."""
    with contextlib.ExitStack() as stack:

        def start(*arguments):
            process = subprocess.Popen(
                [sys.executable, "-m", "fastcheck_dask.cli", "zookeeper", "start", *arguments],
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | {"TMPDIR": str(tmp_path)},
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            return process, process.stdout.readline().strip()

        yield start


@pytest.mark.zookeeper
@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 0), (signal.SIGTERM, 0), (signal.SIGHUP, 0), (signal.SIGKILL, -9)]
)
def test_command_ended_any_way_leaves_no_server(command, tmp_path, client_of, number, status):
    process, url = command()
    assert client_of(url.removeprefix("zk://")).get_children("/") == ["zookeeper"]
    (java,) = psutil.Process(process.pid).children()
    ended = os.pidfd_open(java.pid)
    process.send_signal(number)
    try:
        assert select.select([ended], [], [], 20.0)[0]
    finally:
        os.close(ended)
    assert process.wait(20.0) == status
    left = [path.name for path in tmp_path.iterdir() if path.name.startswith("fastcheck-zookeeper")]
    assert bool(left) == (number == signal.SIGKILL)


@pytest.mark.zookeeper
def test_command_folder_keeps_data_and_is_for_one(command, tmp_path, client_of):
    folder = tmp_path / "kept"
    process, url = command("--dir", str(folder))
    client_of(url.removeprefix("zk://")).create("/a", b"kept")
    with pytest.raises(ConfigError, match=f"runs in {folder} already"):
        run_zookeeper(folder, nodes=1, port=0, tick_milliseconds=200, say=print)
    process.send_signal(signal.SIGKILL)
    process.wait()
    port = free_ports(1)[0]
    _, url = command("--dir", str(folder), "--port", str(port))
    assert url == f"zk://127.0.0.1:{port}"
    assert client_of(url.removeprefix("zk://")).get("/a")[0] == b"kept"


@pytest.mark.zookeeper
def test_command_server_killed_is_told_and_status_1(command):
    process, _ = command()
    (java,) = psutil.Process(process.pid).children()
    java.kill()
    assert "ended; its log" in process.communicate(timeout=20.0)[0]
    assert process.returncode == 1


def test_command_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").touch()
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(ConfigError, match="cannot be used"):
        run_zookeeper(tmp_path / "file" / "x", nodes=1, port=0, tick_milliseconds=200, say=print)
    assert signal.getsignal(signal.SIGINT) is before
    assert not Path(tmp_path / "file" / "x").exists()
