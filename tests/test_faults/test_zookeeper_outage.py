"""ZooKeeper goes away in the middle of a run and comes back: training and loads go on, later saves commit."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from fastcheck_dask.coordination.zookeeper.server import free_ports
from fastcheck_dask.errors import CoordinationError, FastCheckError
from fastcheck_dask.testing.cluster import StorageCluster
from fastcheck_dask.testing.training import TrainingHost, assert_is_state, state_at
from fastcheck_dask.testing.zookeeper import (
    Certificates,
    ZooKeeperEnsemble,
    ZooKeeperServer,
    tls_options,
)

pytestmark = [pytest.mark.zookeeper, pytest.mark.slow]

SECRET = "s3cr3t"
OPTIONS = {"coordinator_timeout": "3 s", "session_timeout": "4 s"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ZooKeeperServer]:
    """Return a server for this module, whose tests leave it running."""
    with ZooKeeperServer(tmp_path_factory.mktemp("zookeeper")) as made:
        yield made


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, server: ZooKeeperServer) -> Iterator[StorageCluster]:
    """Return two storage nodes that this module's tests share."""
    url = f"zk://{server.hosts}/root"
    with StorageCluster(tmp_path_factory.mktemp("cluster"), 2, coordinator=url) as nodes:
        yield nodes


@pytest.mark.parametrize("how", ["killed", "paused"])
def test_server_away_saves_reach_local_loads_come_from_memory_and_later_saves_commit(
    tmp_path: Path,
    server: ZooKeeperServer,
    cluster: StorageCluster,
    caplog: pytest.LogCaptureFixture,
    how: str,
) -> None:
    with TrainingHost(tmp_path, cluster.coordinator, OPTIONS | {"num_shards": 1}) as host:
        manager = host.manager()
        for step in (1, 2):
            host.save(manager, step, level="object")
        server.kill() if how == "killed" else server.pause()
        for step in (3, 4, 5):
            handle = manager.save_async(state_at(step), f"step{step}").wait("local", timeout=30.0)
            with pytest.raises(CoordinationError, match="did not answer within 3 s"):
                handle.wait("peers", timeout=30.0)
            assert handle.level == "local"
        assert_is_state(manager.load(), 2)
        assert manager.last_load is not None
        assert manager.last_load.source == "local"
        assert "the coordinator is away, generation 2 is the newest that is known" in caplog.text
        server.start() if how == "killed" else server.resume()
        later = [manager.save_async(state_at(step), f"step{step}") for step in (6, 7)]
        # What comes while it comes back may fall short; what comes after must not.
        for handle in later:
            handle.exception(60.0)
        generation = host.save(manager, 8).generation
        assert generation is not None
        assert_is_state(manager.load(), 8)
        assert [record.tag for record in host.records()][-1] == "step8"
        state, report = host.load_elsewhere(objects=False)
        assert_is_state(state, 8)
        assert report.generation == generation


def test_server_away_ranks_load_what_all_know_or_nothing(tmp_path: Path, server: ZooKeeperServer) -> None:
    options = OPTIONS | {"world_size": 2, "coordinator_timeout": "6 s"}
    with TrainingHost(tmp_path, f"zk://{server.hosts}/ranks", options) as host, ThreadPoolExecutor(2) as pool:
        managers = list(pool.map(lambda rank: host.manager(rank=rank), range(2)))
        for step in (1, 2):
            for handle in [manager.save_async(state_at(step), f"step{step}") for manager in managers]:
                handle.wait("object", timeout=60.0)
        server.pause()
        suspended = [pool.submit(manager.load) for manager in managers]
        for load in suspended:
            with pytest.raises(CoordinationError):
                load.result(60.0)
        # One that is away for less than the time-out is waited for.
        short = [pool.submit(manager.load) for manager in managers]
        server.resume()
        for load in short:
            assert_is_state(load.result(60.0), 2)
        list(pool.map(lambda manager: manager.close(), managers))


def test_server_away_close_keeps_the_memory_and_the_next_manager_finds_it(
    tmp_path: Path, server: ZooKeeperServer
) -> None:
    with TrainingHost(tmp_path, f"zk://{server.hosts}/no-nodes", OPTIONS) as host:
        manager = host.manager()
        host.save(manager, 1, level="object")
        server.kill()
        manager.close(timeout=20.0)
        with pytest.raises(CoordinationError):
            host.manager()
        server.start()
        again = host.manager()
        assert_is_state(again.load(), 1)
        assert again.last_load is not None
        assert again.last_load.source == "local"
        assert host.save(again, 2, level="object").generation == 2


def test_leader_of_the_ensemble_killed_no_save_is_lost(tmp_path: Path, ensemble: ZooKeeperEnsemble) -> None:
    options = OPTIONS | {"coordinator_timeout": "10 s", "session_timeout": "5 s"}
    with TrainingHost(tmp_path, f"zk://{ensemble.hosts}/no-nodes", options) as host:
        manager = host.manager()
        host.save(manager, 1, level="object")
        ensemble.wait_leader().kill()
        generations = [host.save(manager, step, level="object").generation for step in (2, 3, 4)]
        assert generations == [2, 3, 4]
        assert_is_state(manager.load(), 4)


def test_credentials_and_tls_reach_node_and_agent_and_are_nowhere_to_be_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    authority = Certificates(tmp_path / "authority")
    cert, key = authority.issue("client")
    (port,) = free_ports(1)
    options = tls_options(authority, authority.issue("server"), port=port)
    tls = {"coordinator_tls_ca": authority.ca, "coordinator_tls_cert": cert, "coordinator_tls_key": key}
    environment = {"AUTH": f"me:{SECRET}"} | {
        name.removeprefix("coordinator_").upper(): str(path) for name, path in tls.items()
    }
    for name, value in environment.items():
        monkeypatch.setenv(f"DASK_FASTCHECK__COORDINATOR__{name}", value)
    with (
        caplog.at_level(0, logger="fastcheck_dask"),
        ZooKeeperServer(tmp_path / "zookeeper", options),
        StorageCluster(tmp_path / "cluster", 2, coordinator=f"zk://127.0.0.1:{port}/root") as cluster,
    ):
        # The nodes have it from their environment, the manager and its agent from arguments.
        for name in environment:
            monkeypatch.delenv(f"DASK_FASTCHECK__COORDINATOR__{name}")
        arguments = OPTIONS | tls | {"num_shards": 1}
        with TrainingHost(tmp_path, cluster.coordinator, arguments) as host:
            with pytest.raises(CoordinationError, match="demands credentials"):
                host.manager()
            manager = host.manager(coordinator_auth=f"me:{SECRET}")
            assert host.save(manager, 1).generation == 1
            assert_is_state(manager.load(), 1)
            commands = [
                " ".join(process.cmdline())
                for process in psutil.Process(os.getpid()).children(recursive=True)
            ]
            assert any("fastcheck_dask.agent.process" in command for command in commands)
            with pytest.raises(FastCheckError) as caught:
                host.manager(coordinator_auth=f"me:{SECRET}2", run_id="other")
        logs = [cluster.log(f"n{number}") for number in range(2)]
    for text in [*commands, *logs, caplog.text, str(caught.value), repr(caught.value)]:
        assert SECRET not in text
