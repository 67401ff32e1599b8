from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

for _needed in ("torch", "sklearn", "matplotlib"):
    pytest.importorskip(_needed)


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Return a running ``fastcheck demo --quick`` that writes to `tmp_path`."""
    command = [sys.executable, "-m", "fastcheck_dask.cli", "demo", "--quick", "--out", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield process
    finally:
        # Gives it the chance to end its own children, which SIGKILL would leave to the kernel.
        process.terminate()
        try:
            process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def local_tiers() -> set[str]:
    root = Path(f"/dev/shm/fastcheck-{os.geteuid()}")
    return {path.name for path in root.iterdir()} if root.exists() else set()


def check_model(found: dict[str, Any]) -> None:
    assert found["faults"] == []
    assert found["last_loss"] < found["first_loss"]
    assert found["digests"]["interrupted"] == found["digests"]["uninterrupted"]
    assert set(found["digests"]["interrupted"]) == {"weights", "optimizer", "losses"}
    peers, objects = found["recoveries"]
    # The other nodes may have rebuilt the lost shard before the trainer was back: then no parity is needed.
    assert peers["source"] in ("peers+parity", "peers")
    assert len(peers["killed"]) == 2
    assert (peers["rebuilt_chunks"] > 0) is (peers["source"] == "peers+parity")
    assert objects["source"] == "object"
    assert len(objects["killed"]) == 5
    for recovery in (peers, objects):
        assert 0 < recovery["step"] < recovery["killed_at_step"]
        assert 0 < recovery["load_seconds"] < recovery["back_seconds"]
    assert found["tiers"]["peers"]["sent_bytes"] > 0
    assert sum(peers["raw_bytes"].values()) <= found["tiers"]["peers"]["raw_bytes"]


@pytest.mark.slow
@pytest.mark.timeout(540)
def test_demo_quick_recovers_bit_for_bit_and_leaves_nothing(demo, tmp_path):
    before = local_tiers()
    output, _ = demo.communicate()
    assert demo.returncode == 0, output
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["ok"] is True
    assert set(summary["models"]) == {"vgg", "gpt"}
    for found in summary["models"].values():
        check_model(found)
    assert "bit for bit the same" in output
    assert (tmp_path / "recovery.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["recovery.png", "summary.json"]
    assert not {name for name in local_tiers() - before if name.startswith(("vgg-", "gpt-"))}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_demo_terminated_midway_leaves_no_process(demo, tmp_path):
    assert demo.stdout is not None
    while "with checkpoints: step" not in demo.stdout.readline():
        assert demo.poll() is None
    below = psutil.Process(demo.pid).children(recursive=True)
    # Scheduler, five storage nodes, and the training process with its agent and an encoder.
    assert len(below) >= 9
    demo.send_signal(signal.SIGTERM)
    assert demo.wait(60) == 128 + signal.SIGTERM
    assert [process for process in below if process.is_running()] == []
    assert list(tmp_path.iterdir()) == []
