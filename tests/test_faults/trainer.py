"""A training process to be killed: takes commands on stdin, says on stdout how far each save has come.

``save N`` saves the state of step N; ``stall`` makes the next copy stop halfway, ``go on`` lets it continue;
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
from fastcheck_dask.manager.handle import SaveHandle
from fastcheck_dask.testing.training import TrainingHost, assert_is_state, state_at

_saying = threading.Lock()
_stalled, _may_go_on = threading.Event(), threading.Event()
_copy_bits = snapshots.copy_bits


def say(*words: object) -> None:
    with _saying:
        print(*words, flush=True)  # noqa: T201


def copy_bits(source: Any, out: Any) -> None:
    if _stalled.is_set():
        _stalled.clear()
        out[: out.size // 2] = 0
        say("copying")
        _may_go_on.wait()
    _copy_bits(source, out)


def follow(handle: SaveHandle, step: int) -> None:
    try:
        handle.wait("peers")
        say("peers", step)
    except FastCheckError as error:
        say("failed", step, type(error).__name__)


def main(folder: str, coordinator: str, options: str) -> None:
    snapshots.copy_bits = copy_bits
    host = TrainingHost(Path(folder), coordinator, json.loads(options))
    manager = host.manager()
    say("agent", manager._agents.link().pid)
    for line in sys.stdin:
        command, _, argument = line.strip().partition(" ")
        if command == "save":
            step = int(argument)
            if _stalled.is_set():
                threading.Thread(target=save, args=(manager, step), daemon=True).start()
            else:
                save(manager, step)
        elif command == "stall":
            _stalled.set()
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
