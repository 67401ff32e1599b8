from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

import pytest
from kazoo.client import KazooClient

from fastcheck_dask.testing import zookeeper as module
from fastcheck_dask.testing.zookeeper import ZooKeeperMissingError, ZooKeeperServer


def test_class_path_nothing_installed_says_how_to_install(tmp_path, monkeypatch):
    monkeypatch.delenv("ZOOKEEPER_HOME", raising=False)
    monkeypatch.setattr(module, "_DEBIAN", tmp_path)
    with pytest.raises(ZooKeeperMissingError, match=r"apt-get install.*zookeeper"):
        module._class_path()


def test_class_path_zookeeper_home_is_used_or_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("ZOOKEEPER_HOME", str(tmp_path))
    with pytest.raises(ZooKeeperMissingError, match="ZOOKEEPER_HOME"):
        module._class_path()
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "zookeeper-3.9.2.jar").touch()
    assert module._class_path() == str(tmp_path / "lib" / "zookeeper-3.9.2.jar")


def test_java_missing_says_how_to_install(monkeypatch, tmp_path):
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ZooKeeperMissingError, match=r"apt-get install.*default-jre-headless"):
        module._java()


@pytest.mark.zookeeper
def test_server_stopped_leaves_no_process_and_restart_keeps_data(tmp_path):
    with ZooKeeperServer(tmp_path) as server:
        client = KazooClient(server.hosts)
        client.start()
        client.create("/a", b"kept")
        port = server.port
        server.restart()
        assert server.port == port
        assert client.retry(client.get, "/a")[0] == b"kept"
        client.stop()
        client.close()
        pid = server.pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.zookeeper
def test_server_parent_killed_dies_too(tmp_path):
    program = (
        "import sys, pathlib; from fastcheck_dask.testing.zookeeper import ZooKeeperServer\n"
        "print(ZooKeeperServer(pathlib.Path(sys.argv[1])).start().pid, flush=True); input()\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    server = os.pidfd_open(int(parent.stdout.readline()))
    try:
        parent.kill()
        parent.communicate()
        assert select.select([server], [], [], 20.0)[0]
    finally:
        signal_pidfd(server)
        os.close(server)


def signal_pidfd(descriptor):
    try:
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    except ProcessLookupError:
        return


@pytest.mark.zookeeper
def test_server_that_cannot_start_shows_its_log(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_MAIN", "org.example.Missing")
    with pytest.raises(RuntimeError, match=r"org\.example\.Missing"):
        ZooKeeperServer(tmp_path).start()
