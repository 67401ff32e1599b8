"""A training process to be killed: takes commands on stdin, says on stdout how far each save has come.

``save N`` saves the state of step N; ``stall copy`` stops the next save in the middle of the copy, ``stall
handover`` before the agent is told of the snapshot, and ``go on`` lets it continue;
``load`` prints the step that was loaded; ``quit`` closes the manager.
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

from fastcheck_dask.errors import FastCheckError
from fastcheck_dask.manager import FastCheckManager, snapshots
from fastcheck_dask.manager.agent_link import AgentLink
from fastcheck_dask.manager.handle import SaveHandle
from fastcheck_dask.testing.training import TrainingHost, assert_is_state, state_at

_saying = threading.Lock()
_stall = {"copy": threading.Event(), "handover": threading.Event()}
_may_go_on = threading.Event()
_copy_bits, _hand_over = snapshots.copy_bits, AgentLink.save


def say(*words: object) -> None:
    with _saying:
        print(*words, flush=True)  # noqa: T201


def copy_bits(source: Any, out: Any) -> None:
    if _stall["copy"].is_set():
        out[: out.size // 2] = 0
        stop("copy")
    _copy_bits(source, out)


def hand_over(link: AgentLink, *arguments: Any) -> None:
    if _stall["handover"].is_set():
        stop("handover")
    _hand_over(link, *arguments)


def stop(where: str) -> None:
    _stall[where].clear()
    say("stopped", where)
    _may_go_on.wait()


def follow(handle: SaveHandle, step: int) -> None:
    try:
        handle.wait("peers")
        say("peers", step)
    except FastCheckError as error:
        say("failed", step, type(error).__name__)


def main(folder: str, coordinator: str, options: str) -> None:
    snapshots.copy_bits = copy_bits
    AgentLink.save = hand_over  # type: ignore[method-assign]
    host = TrainingHost(Path(folder), coordinator, json.loads(options))
    manager = host.manager()
    say("agent", manager._agents.link().pid)
    for line in sys.stdin:
        command, _, argument = line.strip().partition(" ")
        if command == "save":
            step = int(argument)
            if any(stall.is_set() for stall in _stall.values()):
                threading.Thread(target=save, args=(manager, step), daemon=True).start()
            else:
                save(manager, step)
        elif command == "stall":
            _stall[argument].set()
        elif command == "go":
            _may_go_on.set()
        elif command == "load":
            state = manager.load()
            assert_is_state(state, state["step"])
            say("loaded", state["step"], manager.last_load and manager.last_load.source)
        elif command == "quit":
            break
    manager.close()


def save(manager: FastCheckManager, step: int) -> None:
    handle = manager.save_async(state_at(step), f"step{step}")
    say("local", step)
    threading.Thread(target=follow, args=(handle, step), daemon=True).start()


if __name__ == "__main__":
    main(*sys.argv[1:])
