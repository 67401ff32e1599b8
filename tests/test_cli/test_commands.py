from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click
import dask
import numpy as np
import pytest
import zarr
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from fastcheck_dask import FastCheckManager, cli
from fastcheck_dask.cli import storage
from fastcheck_dask.cli.arguments import parse_memory
from fastcheck_dask.errors import ConfigError, TierError
from fastcheck_dask.ids import check_name
from fastcheck_dask.master.storage_node import master_of_nodes
from fastcheck_dask.testing.checkpoints import write_checkpoint, write_joint
from fastcheck_dask.version import __version__

GOOD = ["--coordinator", "sqlite:///tmp/c.db"]


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[object, ...], dict[str, object]]]:
    """What `run_storage` was called with, in place of running a node."""
    calls: list[tuple[tuple[object, ...], dict[str, object]]] = []
    monkeypatch.setattr("fastcheck_dask.node.process.run_storage", lambda *a, **k: calls.append((a, k)))
    return calls


def test_storage_all_options_reach_the_node(ran):
    arguments = [
        *("--scheduler", "tcp://127.0.0.1:8786", "--coordinator", "zk://a:2181/root", "--memory", "2GiB"),
        *("--name", "n1", "--rack", "r1", "--host", "0.0.0.0", "--port", "4711", "--insecure"),
        *("--ring", "3", "--metrics-port", "9400", "--drain-timeout", "2 m"),
        *("--drill-every", "never", "--repair-rate", "100 MB"),
    ]
    result = CliRunner().invoke(cli.dask_group, ["storage", *arguments])
    assert result.exit_code == 0, result.output
    assert ran == [
        (
            ("tcp://127.0.0.1:8786", "zk://a:2181/root"),
            {
                "memory_bytes": 2 * 2**30,
                "ring": 3,
                "drain_seconds": 120.0,
                "name": "n1",
                "rack": "r1",
                "host": "0.0.0.0",
                "port": 4711,
                "metrics_port": 9400,
                "insecure": True,
                "service_of": master_of_nodes,
                "config": {},
                "drill_every": "never",
                "repair_rate": "100 MB",
            },
        )
    ]


def test_storage_files_for_tls_are_configuration_and_allow_any_host(ran, member):
    files = {"ca": member.files.ca, "cert": member.files.cert, "key": member.files.key}
    data = [part for name, file in files.items() for part in (f"--data-tls-{name}", file)]
    control = ["--tls-ca-file", "a.pem", "--tls-cert", "b.pem", "--tls-key", "c.pem"]
    arguments = [*GOOD, "--host", "0.0.0.0", "--scheduler", "tls://h:8786", *data, *control]
    result = CliRunner().invoke(cli.main, ["storage", *arguments])
    assert result.exit_code == 0, result.output
    assert ran[0][1]["config"] == {
        **{f"fastcheck.data.tls-{name}": file for name, file in files.items()},
        "distributed.comm.tls.ca-file": "a.pem",
        "distributed.comm.tls.worker.cert": "b.pem",
        "distributed.comm.tls.client.cert": "b.pem",
        "distributed.comm.tls.worker.key": "c.pem",
        "distributed.comm.tls.client.key": "c.pem",
    }


def test_storage_with_tls_of_the_data_port_alone_keeps_pickles_on_loopback(ran, member):
    with dask.config.set(
        {f"fastcheck.data.tls-{n}": getattr(member.files, n) for n in ("ca", "cert", "key")}
    ):
        arguments = ["storage", *GOOD, "--host", "0.0.0.0"]
        refused = CliRunner().invoke(cli.main, [*arguments, "--scheduler", "tcp://h:8786"])
        assert "whoever reaches it can run code" in refused.stderr
        assert not ran
        assert CliRunner().invoke(cli.main, arguments).exit_code == 0


def test_storage_without_name_takes_host_and_pid(ran):
    result = CliRunner().invoke(cli.main, ["storage", *GOOD])
    assert result.exit_code == 0, result.output
    options = ran[0][1]
    assert str(options["name"]).endswith(f"-{os.getpid()}")
    assert options["rack"] == "default"
    assert options["insecure"] is False


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--coordinator"),
        (["--coordinator", "http://x"], "sqlite:///"),
        (["--coordinator", "sqlite://host/x"], "names a host"),
        (["--coordinator", "zk://a:99999"], "a:99999"),
        ([*GOOD, "--memory", "much"], "'much'"),
        ([*GOOD, "--memory", "0"], "at least one byte"),
        ([*GOOD, "--memory", "101%"], "at most 100%"),
        ([*GOOD, "--memory", "1.5"], "at most 100%"),
        ([*GOOD, "--memory", "0.0"], "at most 100%"),
        ([*GOOD, "--ring", "-1"], "--ring"),
        ([*GOOD, "--drain-timeout", "soon"], "'soon'"),
        ([*GOOD, "--drain-timeout", "-1 s"], "0 or more"),
        ([*GOOD, "--scrub-every", "often"], "fastcheck.storage.scrub-every"),
        ([*GOOD, "--repair-rate", "1 kB"], "100,000 bytes a second"),
        ([*GOOD, "--name", "no/slash"], "no/slash"),
        ([*GOOD, "--rack", ""], "--rack"),
        ([*GOOD, "--port", "70000"], "70000"),
        ([*GOOD, "--port", "x"], "--port"),
        ([*GOOD, "--host", "0.0.0.0"], "--insecure"),
        ([*GOOD, "--data-tls-ca", "ca.pem"], "fastcheck.data.tls-cert and fastcheck.data.tls-key are not"),
        ([*GOOD, "--tls-cert", "c.pem"], "--data-tls-cert"),
        ([*GOOD, "--scheduler", "nonsense"], "tcp://host:8786"),
        ([*GOOD, "--no-such-option"], "--no-such-option"),
        ([*GOOD, "surplus"], "surplus"),
    ],
)
@pytest.mark.parametrize("group", [cli.main, cli.dask_group])
def test_storage_bad_value_is_one_line_and_status_2(ran, group, arguments, said):
    result = CliRunner().invoke(group, ["storage", *arguments])
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1
    assert not ran


def test_group_unknown_command_is_one_line_and_status_2():
    result = CliRunner().invoke(cli.main, ["no-such-command"])
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "no-such-command" in result.stderr


@pytest.mark.parametrize("error", [TierError("no room\nat all"), ConfigError("wrong")])
def test_command_error_of_fastcheck_is_its_message_and_status_1(monkeypatch, error):
    def fail(*_args: object, **_options: object) -> None:
        raise error

    monkeypatch.setattr("fastcheck_dask.node.process.run_storage", fail)
    result = CliRunner().invoke(cli.main, ["storage", *GOOD])
    assert result.exit_code == 1
    assert result.stderr == f"Error: {' '.join(str(error).split())}\n"


def test_demo_that_compares_unequal_has_status_1(monkeypatch, tmp_path):
    asked = []

    def run(out: Path, **options: object) -> bool:
        asked.append((out, options))
        return len(asked) > 1

    monkeypatch.setattr("fastcheck_dask.demo.command.run_demo", run)
    arguments = ["demo", "--out", str(tmp_path), "--seed", "3", "--quick"]
    assert CliRunner().invoke(cli.main, arguments).exit_code == 1
    assert CliRunner().invoke(cli.main, arguments).exit_code == 0
    assert asked[0] == (tmp_path, {"seed": 3, "keep": False, "quick": True})


def test_demo_out_is_a_file_has_status_2(tmp_path):
    (tmp_path / "file").write_text("")
    result = CliRunner().invoke(cli.main, ["demo", "--out", str(tmp_path / "file")])
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    """A folder with two checkpoints of floats."""
    values = np.random.default_rng(0).normal(size=5000).astype(np.float32)
    with FastCheckManager(tmp_path / "ckpts", local_dir=tmp_path / "shm", encoders=1) as manager:
        for step in (1, 2):
            manager.save_async({"w": values * (1 + step * 1e-6)}, tag=f"step{step}").wait("object")
    return tmp_path / "ckpts"


def test_tune_prints_the_curve_and_draws_it(checkpoints, tmp_path):
    png = tmp_path / "curve.png"
    result = CliRunner().invoke(cli.main, ["tune", str(checkpoints), "--plot", str(png)])
    assert result.exit_code == 0, result.output
    assert "Best P for weights" in result.output
    assert "XorDelta on weights, float32 against step1" in result.output
    assert png.read_bytes().startswith(b"\x89PNG")


def test_tune_of_several_ranks_takes_one_and_says_which(tmp_path):
    location = str(tmp_path / "ckpts")
    values = np.random.default_rng(0).normal(size=5000).astype(np.float32)
    for number in (1, 2):
        states = [{f"w{rank}": values * (rank + number)} for rank in range(2)]
        write_joint(location, states, f"t{number}", number=number, generations=(number, number + 3))
    # What one rank saved alone is no checkpoint of the run.
    write_checkpoint(f"{location}/rank-00001", {"w": values}, "t3", generation=9)
    for arguments, said in (
        ([], "The part of rank 0 (--rank takes another):\nCheckpoint t2 (generation 2)"),
        (["--rank", "1"], "The part of rank 1:\nCheckpoint t2 (generation 5)"),
        (["--rank", "1", "--tag", "t1"], "The part of rank 1:\nCheckpoint t1 (generation 4)"),
    ):
        result = CliRunner().invoke(cli.main, ["tune", location, *arguments])
        assert result.exit_code == 0, result.output
        assert said in result.output
    result = CliRunner().invoke(cli.main, ["tune", location, "--rank", "2"])
    assert (result.exit_code, "there is no rank 2" in result.stderr) == (2, True)
    write_checkpoint(location, {"w": values}, "alone", generation=1, created_unix=1.8e9)
    result = CliRunner().invoke(cli.main, ["tune", location])
    assert "The part of" not in result.output
    assert "Checkpoint alone" in result.output


def test_tune_while_the_run_goes_on_disturbs_nothing(tmp_path):
    values = np.random.default_rng(0).normal(size=5000).astype(np.float32)
    with FastCheckManager(tmp_path / "ckpts", local_dir=tmp_path / "shm", encoders=1) as manager:
        manager.save_async({"w": values}, tag="a").wait("object")
        result = CliRunner().invoke(cli.main, ["tune", str(tmp_path / "ckpts"), "--tag", "a"])
        assert (result.exit_code, "Checkpoint a" in result.output) == (0, True)
        manager.save_async({"w": values + 1}, tag="b").wait("object")
        assert manager.load()["w"].tobytes() == (values + 1).tobytes()


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["nowhere"], 2, "nowhere"),
        (["."], 1, "no committed checkpoint"),
        ([".", "--tag", "no/slash"], 2, "no/slash"),
        ([".", "--sample", "some"], 2, "some"),
    ],
)
def test_tune_bad_argument_is_one_line(tmp_path, monkeypatch, arguments, status, said):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli.main, ["tune", *arguments])
    assert (result.exit_code, result.stderr.count("\n")) == (status, 1)
    assert said in result.stderr


def test_tune_plot_without_matplotlib_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "fastcheck_dask.engine.tuning_plot", None)
    result = CliRunner().invoke(cli.main, ["tune", str(tmp_path), "--plot", "x.png"])
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert "pip install matplotlib" in result.stderr


def test_tune_plot_that_cannot_be_written_is_one_line(checkpoints, tmp_path):
    result = CliRunner().invoke(
        cli.main, ["tune", str(checkpoints), "--plot", str(tmp_path / "no" / "x.png")]
    )
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert "cannot be written" in result.stderr


@pytest.mark.parametrize("group", [cli.main, cli.dask_group])
def test_version_option_says_the_version(group: click.Group):
    result = CliRunner().invoke(group, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"fastcheck, version {__version__}\n")


@given(st.integers(1, 2**40))
def test_memory_whole_bytes_are_exact(size):
    assert parse_memory(str(size)) == size


def test_memory_share_is_of_what_the_machine_has():
    whole = parse_memory("100%")
    assert whole > 0
    assert abs(parse_memory("25 %") - whole // 4) <= 1
    assert parse_memory("0.25") == parse_memory(".25") == parse_memory("25 %")
    assert parse_memory("1.0") == whole


@pytest.mark.parametrize("host", ["", "host.domain", "-odd_näme", "x" * 300])
def test_default_node_name_any_host_can_name_a_node(monkeypatch, host):
    monkeypatch.setattr(storage.socket, "gethostname", lambda: host)
    assert check_name(storage.default_node_name(), "name")


def test_import_of_cli_and_help_load_nothing_heavy():
    # The package itself is replaced by an empty one: what it imports is not the command's affair.
    code = f"""
import sys, types
package = types.ModuleType("fastcheck_dask")
package.__path__ = [{str(Path(cli.__file__).parents[1])!r}]
sys.modules["fastcheck_dask"] = package
from fastcheck_dask import cli
try:
    cli.main(["storage", "--help"])
except SystemExit as end:
    assert end.code == 0
heavy = ("torch", "distributed", "dask", "sklearn", "matplotlib", "numpy", "rich", "zarr", "kazoo")
print([name for name in heavy if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_import_of_package_and_cli_load_no_framework():
    code = """
import fastcheck_dask.cli, sys
print([name for name in ("torch", "sklearn", "matplotlib") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.slow
def test_dask_fastcheck_storage_serves_until_sigterm(tmp_path):
    command = [sys.executable, "-m", "dask", "fastcheck", "storage", "--memory", "1MiB", "--name", "n1"]
    command += ["--coordinator", f"sqlite:///{tmp_path}/coord.db"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("fastcheck storage n1: data fcs://127.0.0.1:")
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.communicate()


def test_compact_of_several_ranks_makes_all_parts_whole(tmp_path):
    def manager(rank):
        options = {"local_dir": tmp_path / "shm", "encoders": 1, "persist": "incremental"}
        return FastCheckManager(tmp_path / "c", rank=rank, world_size=2, **options)

    with ThreadPoolExecutor(2) as pool:
        managers = list(pool.map(manager, range(2)))
        for step in range(3):
            state = {"w": np.arange(3000, dtype=np.float32) + step, "same": np.ones(2000)}
            handles = [one.save_async(state, f"s{step}") for one in managers]
            for handle in handles:
                handle.wait("object", timeout=60)
        list(pool.map(lambda one: one.close(), managers))
    run = CliRunner().invoke
    found = run(cli.main, ["compact", str(tmp_path / "c"), "s1"])
    assert [line.split(":")[0] for line in found.output.splitlines()] == [
        "rank 0, generation 2 (s1)",
        "rank 1, generation 2 (s1)",
    ]
    assert "is whole" not in found.output
    told = json.loads(run(cli.main, ["compact", str(tmp_path / "c"), "--all", "--json"]).stdout)
    chunks = {(one["rank"], one["tag"]): one["chunks"] for one in told["checkpoints"]}
    assert [key for key, count in chunks.items() if count] == [(0, "s2"), (1, "s2")]
    assert len(chunks) == 6
    for rank in range(2):
        whole = zarr.open_group(str(tmp_path / "c" / f"rank-0000{rank}" / "00000003-s2"), mode="r")
        assert whole["w"][7] == 9
    (tmp_path / "c/rank-00001/.fastcheck/commits/00000002-s1.json").unlink()
    found = run(cli.main, ["compact", str(tmp_path / "c"), "s1"])
    assert (found.exit_code, "rank-00001/.fastcheck/commits/00000002-s1.json" in found.stderr) == (1, True)


def test_compact_makes_deltas_whole_and_says_so(tmp_path):
    with FastCheckManager(
        tmp_path / "c", local_dir=tmp_path / "shm", encoders=1, persist="incremental"
    ) as manager:
        for step in range(3):
            state = {"w": np.arange(3000, dtype=np.float32) + step, "same": np.ones(2000)}
            manager.save_async(state, f"s{step}").wait()
    run = CliRunner().invoke
    found = run(cli.main, ["compact", str(tmp_path / "c"), "s1"])
    assert (found.exit_code, found.output.split(":")[0]) == (0, "generation 2 (s1)")
    found = run(cli.main, ["compact", str(tmp_path / "c"), "--all"])
    assert [line.endswith("is whole") for line in found.output.splitlines()] == [True, True, False]
    found = run(cli.main, ["compact", str(tmp_path / "c"), "--all"])
    assert [line.endswith("is whole") for line in found.output.splitlines()] == [True, True, True]
    for wrong in (["s1", "--all"], [], ["s9"]):
        found = run(cli.main, ["compact", str(tmp_path / "c"), *wrong])
        assert found.exit_code
        assert len(found.output.splitlines()) == 1
