"""What `fastcheck links` says, of made-up rates and of real nodes."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from fastcheck_dask import FastCheckManager
from fastcheck_dask.cli import main
from fastcheck_dask.engine.tuning import Measured
from fastcheck_dask.manager.links_report import conclusions
from fastcheck_dask.placement import bandwidth
from fastcheck_dask.placement.bandwidth import Bandwidths
from fastcheck_dask.testing.faults import FaultyCluster


def found(ratio: float, nodes: int) -> Bandwidths:
    rates = {f"n{number}": 125e6 for number in range(nodes)}
    return Bandwidths(rates, rates, 125e6 * ratio, 125e6 * ratio)


def test_conclusions_give_the_number_and_its_reason() -> None:
    first, *others = conclusions(found(2.97, 6), nodes=6, encoders=3)
    assert first.startswith("num_shards=3: 371 MB/s go out to all nodes at once and 125 MB/s to one of them")
    assert "2.97 nodes" in first
    assert others == [conclusions(found(2.97, 6), nodes=6, encoders=3)[-1]]
    assert "each has to encode 124 MB/s" in others[0]


@pytest.mark.parametrize(
    ("encoders", "says"),
    [(9, "9 are configured, which is enough"), (4, "4 are configured, which keep them 50% busy")],
)
def test_conclusions_on_a_checkpoint_say_how_many_encoders_keep_the_links_busy(
    encoders: int, says: str
) -> None:
    # Two thirds remain, at 75 MB/s; 375 MB/s go out.
    auto = Measured(300, 200, 4e-6, 1e-6)
    *_, line = conclusions(found(3.0, 6), nodes=6, encoders=encoders, auto=auto)
    assert line.startswith("encoders=8: one makes 75 MB/s of whole chunks 1.50 times smaller")
    assert "the links take 562 MB/s before encoding" in line
    assert says in line


@pytest.mark.parametrize(("ratio", "nodes", "says"), [(2.97, 3, "start 1 more"), (3.9, 4, "start 1 more")])
def test_conclusions_too_few_nodes_say_so(ratio: float, nodes: int, says: str) -> None:
    assert any(says in line for line in conclusions(found(ratio, nodes), nodes=nodes, encoders=1))


def test_conclusions_count_every_parity_shard() -> None:
    lines = conclusions(found(2.97, 4), nodes=4, encoders=1, parity=2)
    assert any("5 nodes with the parity" in line and "start 1 more" in line for line in lines)


def test_links_measures_registered_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "WARM_UP_SECONDS", 0.0)
    monkeypatch.setattr(bandwidth, "MEASURED_SECONDS", 0.02)
    with FaultyCluster(tmp_path, 2) as nodes:
        result = CliRunner().invoke(main, ["links", "--coordinator", nodes.coordinator])
    assert result.exit_code == 0, result.output
    assert "n0" in result.output
    assert "all at once" in result.output
    assert "num_shards=" in result.output


def test_tune_with_nodes_measures_their_links_and_counts_the_encoders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bandwidth, "WARM_UP_SECONDS", 0.0)
    monkeypatch.setattr(bandwidth, "MEASURED_SECONDS", 0.02)
    with FastCheckManager(tmp_path / "ckpts", local_dir=tmp_path / "local", encoders=1) as manager:
        state = {"w": np.random.default_rng(0).normal(size=5000).astype(np.float32)}
        manager.save_async(state, "first").wait("object")
    with FaultyCluster(tmp_path / "nodes", 2) as nodes:
        arguments = ["tune", str(tmp_path / "ckpts"), "--coordinator", nodes.coordinator]
        result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    for said in ("Best P for weights", "all at once", "num_shards=", "encoders=", "before encoding"):
        assert said in result.output.replace("\n", " ")


@pytest.mark.parametrize(
    ("options", "status", "says"),
    [([], 2, "--scheduler or --coordinator"), (["--coordinator", "sqlite:///{}/c.db"], 1, "start some")],
)
def test_links_without_nodes_says_what_to_do_in_one_line(
    tmp_path: Path, options: list[str], status: int, says: str
) -> None:
    with contextlib.chdir(tmp_path):
        result = CliRunner().invoke(main, ["links", *(o.format(tmp_path) for o in options)])
    assert result.exit_code == status
    assert says in result.output
    assert len(result.output.strip().splitlines()) == 1
