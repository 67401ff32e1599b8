"""Storage nodes with TLS: the same faults as without, and no way in for who is no member."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pytest
from click.testing import CliRunner

from fastcheck_dask import cli
from fastcheck_dask.errors import ConfigError, NodeRefusedError
from fastcheck_dask.testing.certificates import Certificates
from fastcheck_dask.testing.cluster import StorageCluster
from fastcheck_dask.testing.faults import wait_until
from fastcheck_dask.testing.training import TrainingHost, assert_is_state, quick_client, state_at
from fastcheck_dask.tiers.wire_tls import DataTls


def options_of(tls: DataTls | None) -> dict[str, Any]:
    """Return the options of a manager with these files."""
    return {} if tls is None else {f"data_tls_{name}": file for name, file in files_of(tls).items()}


def config_of(tls: DataTls) -> dict[str, Any]:
    """Return the configuration of a process with these files."""
    return {f"fastcheck.data.tls-{name}": file for name, file in files_of(tls).items()}


def files_of(tls: DataTls) -> dict[str, Any]:
    return {name: getattr(tls.files, name) for name in ("ca", "cert", "key")}


@pytest.fixture
def outsider(stranger: Certificates) -> DataTls:
    """Return TLS of another cluster."""
    cert, key = stranger.issue("outsider")
    return DataTls(str(stranger.ca), str(cert), str(key))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, member: DataTls) -> Iterator[StorageCluster]:
    """Return four real nodes with TLS."""
    with StorageCluster(tmp_path_factory.mktemp("cluster"), config=config_of(member)) as nodes:
        yield nodes


@pytest.fixture
def host(on_cluster: Callable[..., TrainingHost], member: DataTls) -> TrainingHost:
    """Return a training host that is a member."""
    return on_cluster(num_shards=2, persist_every=0, **options_of(member))


def test_nodes_killed_and_trainer_killed_loads_are_exact_and_the_master_repairs(
    host: TrainingHost, cluster: StorageCluster, restart: Callable[..., None], trainer_of: Callable[..., Any]
) -> None:
    trainer = trainer_of(host)
    for step in (1, 2):
        trainer.tell(f"save {step}")
        trainer.expect(f"peers {step}")
    assert all(address.startswith("fcss://") for address in host.records()[-1].addresses)
    lost = host.records()[-1].nodes[0]
    cluster.kill(lost)
    state, report = host.load_elsewhere(objects=False)
    assert_is_state(state, 2)
    assert report.source == "peers+parity"
    trainer.kill()
    trainer.kill_agent()
    # The master finds it out, and has another node take the shard, all of it over TLS.
    wait_until(lambda: lost not in host.records()[-1].nodes, "the shard is on another node", seconds=60)
    state, report = host.load_elsewhere(objects=False)
    assert_is_state(state, 2)
    assert report.source == "peers"
    restart(cluster, lost)
    host.lose_memory()
    manager = host.manager()
    assert_is_state(manager.load(), 2)
    assert manager.last_load is not None
    assert manager.last_load.source == "peers"
    host.save(manager, 3)
    os.kill(manager._agents.link().pid, signal.SIGKILL)
    assert_is_state(host.load_elsewhere(objects=False)[0], 3)


@pytest.mark.parametrize(
    ("who", "said"),
    [("outsider", "refused by the CA .*tls-ca"), ("plain", "speaks TLS: give fastcheck.data.tls-ca")],
)
def test_who_is_no_member_can_neither_write_nor_read(
    tmp_path: Path, host: TrainingHost, cluster: StorageCluster, outsider: DataTls, who: str, said: str
) -> None:
    host.save(host.manager(), 1)
    tls = outsider if who == "outsider" else None
    options = {"num_shards": 2, **options_of(tls)}
    with TrainingHost(tmp_path / "theirs", cluster.coordinator, options) as theirs:
        with pytest.raises(NodeRefusedError, match=said):
            theirs.save(theirs.manager(), 1)
        assert theirs.records() == ()
    (record,) = host.records()

    async def read() -> None:
        client = quick_client(record.nodes[0], record.addresses[0], tls=tls)
        try:
            await client.read(record.run, record.generation, record.token, keys=["model/w0/c/0"])
        finally:
            await client.close()

    with pytest.raises(NodeRefusedError, match=said):
        asyncio.run(read())
    assert_is_state(host.load_elsewhere(objects=False)[0], 1)
    if who == "outsider":
        refusals = [line for line in cluster.log(record.nodes[0]).splitlines() if "refused a conn" in line]
        assert len(refusals) == 1


def test_manager_with_files_of_two_authorities_does_not_start_and_names_both(
    host: TrainingHost, outsider: DataTls
) -> None:
    with pytest.raises(ConfigError, match=r"outsider.pem \(fastcheck.data.tls-cert\) is refused by the CA"):
        host.manager(**options_of(outsider) | {"data_tls_ca": host.options["data_tls_ca"]})


def test_commands_are_members_by_their_configuration(
    host: TrainingHost, cluster: StorageCluster, member: DataTls, outsider: DataTls
) -> None:
    host.save(host.manager(), 1)
    where = ["--coordinator", cluster.coordinator]
    with dask.config.set(config_of(member)):
        status = CliRunner().invoke(cli.main, ["status", *where, "--json"])
        links = CliRunner().invoke(cli.main, ["links", *where])
        doctor = CliRunner().invoke(cli.main, ["doctor", *where, "--json"])
    assert {node["state"] for node in json.loads(status.output)["nodes"]} == {"available"}
    assert links.exit_code == 0, links.output
    assert "num_shards=" in links.output
    assert not [found for found in json.loads(doctor.output) if "TLS" in found["found"]]
    for config in ({}, config_of(outsider)):
        with dask.config.set(config):
            result = CliRunner().invoke(cli.main, ["links", *where])
        assert result.exit_code == 1
        assert "fastcheck.data.tls-ca" in result.output


def test_large_state_crosses_bit_for_bit(host: TrainingHost) -> None:
    state = state_at(1, arrays=2, size=4 * 2**20)
    manager = host.manager(chunk_bytes="8 MiB", compression="never")
    manager.save_async(state, "large").wait("peers", timeout=60.0)
    manager.close()
    host.lose_memory()
    loaded = host.manager(chunk_bytes="8 MiB").load()
    assert all(np.array_equal(loaded["model"][name], state["model"][name]) for name in state["model"])
