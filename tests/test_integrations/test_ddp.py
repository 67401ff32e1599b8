"""Distributed training that is killed on all ranks goes on bit for bit where all ranks were."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
pytest.importorskip("torch.distributed")


def train(folder: Path, life: str, die_after: int = 0) -> list[list[str]]:
    """Run both ranks to their end; return the lines that each printed."""
    folder.mkdir(exist_ok=True)
    program = str(Path(__file__).with_name("ddp_process.py"))
    started: list[subprocess.Popen[str]] = []
    try:
        for rank in range(2):
            environment = {"RANK": str(rank), "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
            command = [sys.executable, program, str(folder), str(folder / f"meet-{life}"), str(die_after)]
            started.append(
                subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | environment)
            )
        return [one.communicate(timeout=120)[0].splitlines() for one in started]
    finally:
        for one in started:
            one.kill()
            one.wait()


def test_ddp_killed_and_resumed_is_bit_exact(tmp_path: Path) -> None:
    undisturbed = train(tmp_path / "undisturbed", "only")
    assert [lines[0] for lines in undisturbed] == ["begin 0"] * 2
    first = train(tmp_path / "killed", "first", die_after=5)
    assert first == [["begin 0"]] * 2
    second = train(tmp_path / "killed", "second")
    assert [lines[0] for lines in second] == ["begin 4"] * 2
    ends = {lines[-1] for lines in undisturbed + second}
    assert len(ends) == 1
    assert ends.pop().startswith("end ")
