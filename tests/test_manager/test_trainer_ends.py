"""Trainers that are killed, interrupted, or that end without a word: what was saved is there for the next."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest

from fastcheck_dask.errors import (
    RunInUseError,
)

TRAINER = """
import os, signal, sys
import numpy as np
from fastcheck_dask import FastCheckManager
def noise(seed, nbytes=4096):
    return np.random.default_rng(seed).normal(size=nbytes // 4).astype(np.float32)
folder = sys.argv[1]
manager = FastCheckManager(folder + "/objects", local_dir=folder + "/shm", encoders=1)
def agent():
    return manager._agents.link().pid
def say(*words):
    print(*words, flush=True)
"""


def test_second_manager_refused_until_the_first_closes(make: Any, start_trainer: Any, tmp_path: Path) -> None:
    first = make()
    for options in ({}, {"run_id": "other"}, {"run_id": "other", "local_dir": tmp_path / "elsewhere"}):
        with pytest.raises(RunInUseError, match=f"process {os.getpid()}"):
            make(**options)
    other = start_trainer(TRAINER, tmp_path, stderr=subprocess.PIPE)
    assert other.end() != 0
    assert "RunInUseError" in other.process.stderr.read()
    other.process.stderr.close()
    first.close()
    other = start_trainer(TRAINER + "say('ready'); sys.stdin.read()", tmp_path)
    other.line("ready")
    with pytest.raises(RunInUseError, match=f"process {other.process.pid}"):
        make()
    other.kill()
    assert make().load() is None


SAVE_AND_DIE = """
manager.save_async({"w": noise(1)}, "first").wait()
os.kill(agent(), signal.SIGSTOP)
say("agent", agent())
manager.save_async({"w": noise(2)}, "flying")
say("saved")
os.kill(os.getpid(), signal.SIGKILL)
"""

DIE_BEFORE_HAND_OVER = """
from fastcheck_dask.manager.agent_link import AgentLink
manager.save_async({"w": noise(1)}, "first").wait()
say("agent", agent())
AgentLink.save = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
manager.save_async({"w": noise(2)}, "flying")
"""


@pytest.mark.parametrize("script", [SAVE_AND_DIE, DIE_BEFORE_HAND_OVER])
def test_trainer_killed_agent_finishes_the_save_and_ends(
    start_trainer: Any, make: Any, kit: Any, tmp_path: Path, script: str
) -> None:
    trainer = start_trainer(TRAINER + script, tmp_path)
    agent = psutil.Process(int(trainer.line("agent")[0]))
    encoders = agent.children()
    trainer.process.wait(kit.patience)
    agent.resume()
    assert not psutil.wait_procs([agent, *encoders], kit.patience)[1]
    manager = make()
    assert manager.load()["w"].tobytes() == kit.noise(2).tobytes()
    assert manager.last_load.source == "local"
    assert manager.tags() == ["first", "flying"]


def test_trainer_and_agent_killed_stale_snapshot_never_becomes_the_newest(
    start_trainer: Any, make: Any, kit: Any, tmp_path: Path
) -> None:
    script = SAVE_AND_DIE.replace("os.kill(os.getpid(), signal.SIGKILL)", "sys.stdin.read()")
    trainer = start_trainer(TRAINER + script, tmp_path)
    agent = psutil.Process(int(trainer.line("agent")[0]))
    trainer.line("saved")
    agent.kill()
    trainer.kill()
    # The next trainer loads, saves nothing, and dies: its agent must not take the old snapshot for its own.
    second = start_trainer(TRAINER + "say('agent', agent()); sys.stdin.read()", tmp_path)
    agent = psutil.Process(int(second.line("agent")[0]))
    second.kill()
    assert not psutil.wait_procs([agent], kit.patience)[1]
    assert make().tags() == ["first"]


def test_trainer_killed_at_any_moment_a_complete_checkpoint_loads(
    start_trainer: Any, make: Any, kit: Any, tmp_path: Path
) -> None:
    script = """
for step in range(int(sys.argv[2]), 10_000):
    manager.save_async({"step": step, "w": noise(step, 2**20), "v": [noise(step + 1)] * 3}, f"s{step}")
    say("step", step)
"""
    known = 0
    for kill_at in (1, 2, 4):
        trainer = start_trainer(TRAINER + script, tmp_path, known + 1)
        for _ in range(kill_at):
            reached = int(trainer.line("step")[0])
        trainer.kill()
        manager = make()
        found = manager.load()
        # The snapshot was complete when its line came, so the agent had to finish it.
        assert found["step"] >= reached
        known = found["step"]
        assert found["w"].tobytes() == kit.noise(known, 2**20).tobytes()
        assert [v.tobytes() for v in found["v"]] == [kit.noise(known + 1).tobytes()] * 3
        manager.close(keep_local=kill_at == 2)


def test_interrupt_of_the_process_group_ends_cleanly(
    start_trainer: Any, make: Any, kit: Any, tmp_path: Path
) -> None:
    script = """
say("agent", agent())
try:
    with manager:
        for step in range(10_000):
            manager.save_async({"step": step, "w": noise(step, 2**20)}, f"s{step}")
            say("step", step)
except KeyboardInterrupt:
    say("interrupted", step)
"""
    trainer = start_trainer(TRAINER + script, tmp_path)
    agent = psutil.Process(int(trainer.line("agent")[0]))
    for _ in range(3):
        trainer.line("step")
    os.killpg(trainer.process.pid, signal.SIGINT)
    step = int(trainer.line("interrupted")[0])
    assert trainer.end() == 0
    assert not psutil.wait_procs([agent], kit.patience)[1]
    assert not list((tmp_path / "shm").rglob("*"))
    found = make().load()
    assert step - 1 <= found["step"] <= step
    assert found["w"].tobytes() == kit.noise(found["step"], 2**20).tobytes()


def test_exit_without_close_finishes_and_gives_memory_back(
    start_trainer: Any, make: Any, kit: Any, tmp_path: Path
) -> None:
    trainer = start_trainer(
        TRAINER + "say('agent', agent()); manager.save_async({'w': noise(1, 2**20)}, 's')", tmp_path
    )
    agent = psutil.Process(int(trainer.line("agent")[0]))
    assert trainer.end() == 0
    assert not psutil.wait_procs([agent], kit.patience)[1]
    assert not list((tmp_path / "shm").rglob("*"))
    assert make().load()["w"].tobytes() == kit.noise(1, 2**20).tobytes()


def test_agent_started_from_hostile_folder_imports_what_the_trainer_did(
    start_trainer: Any, make: Any, kit: Any, tmp_path: Path
) -> None:
    hostile = tmp_path / "cwd"
    first = tmp_path / "first"
    for module in (hostile / "logging", hostile / "numpy", first / "fastcheck_dask"):
        module.mkdir(parents=True)
        (module / "__init__.py").write_text("raise RuntimeError('shadowed')")
    script = (
        "import sys; sys.path.remove('')\n"
        + TRAINER
        + """
manager.close()
sys.path.insert(0, sys.argv[1] + '/first')
os.umask(0o277)
manager = FastCheckManager("../rel", local_dir="../relshm", coordinator=None, encoders=1)
os.chdir("/")
manager.save_async({"w": noise(1)}, "a").wait()
os.kill(agent(), signal.SIGKILL)
manager.save_async({"w": noise(2)}, "b").exception()
manager.save_async({"w": noise(3)}, "c").wait()
assert manager.load()["w"].tobytes() == noise(3).tobytes()
assert manager.tags()[0] == "a" and manager.tags()[-1] == "c"
"""
    )
    environment = {k: v for k, v in os.environ.items() if k not in ("HOME", "PYTHONPATH")}
    trainer = start_trainer(script, tmp_path, cwd=hostile, env=environment)
    assert trainer.end() == 0
    assert (tmp_path / "rel" / "00000001-a").is_dir()
