"""The trainer's end of the line to its agent: starts it, asks it, hears from it."""

from __future__ import annotations

import itertools
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

from fastcheck_dask.agent.channel import BlockingChannel, Message
from fastcheck_dask.clock import Deadline
from fastcheck_dask.errors import ClosedError, CoordinationError, TierTimeoutError, from_wire

#: How long a new agent may take until it serves; it may wait for its predecessor and for a session to end.
START_SECONDS = 120.0
_REQUEST_SECONDS = 60.0


class AgentLink:
    """One agent process and the channel to it.

    Parameters
    ----------
    start : dict
        The first message: what the agent works on.
    on_event : callable
        Called with every message about a save, from the link's own thread.
    on_lost : callable
        Called once, from that thread, when the agent has ended.
    """

    def __init__(
        self, start: Message, on_event: Callable[[Message], None], on_lost: Callable[[AgentLink], None]
    ) -> None:
        self._on_event, self._on_lost = on_event, on_lost
        self._ids = itertools.count()
        self._changed = threading.Condition()
        self._replies: dict[int, Message] = {}
        self._first: Message | None = None
        self.lost = False
        #: After `close`: whether the newest checkpoint is in another tier than this host's memory.
        self.safe_elsewhere = False
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "fastcheck_dask.agent.process",
                    str(theirs.fileno()),
                    str(os.getpid()),
                ],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                # A process group of its own: what kills the trainer's group must not kill the save in flight.
                start_new_session=True,
            )
        self._channel = BlockingChannel(ours)
        self._channel.send(start)
        self._thread = threading.Thread(target=self._listen, name="fastcheck-agent-link", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        """The agent's process id."""
        return self._process.pid

    def wait_ready(self) -> list[int]:
        """Wait until the agent serves; return the free slots, or raise what kept it from starting."""
        first = self._wait(lambda: self._first, START_SECONDS, "start")
        if first["event"] == "cannot_start":
            self.end()
            raise from_wire(first["error"])
        return list(first["free"])

    def save(self, slot: int, seq: int) -> None:
        """Hand over the snapshot in a slot."""
        self._channel.send({"op": "save", "slot": slot, "seq": seq})

    def ask(self, op: str, **arguments: Any) -> Message:
        """Send a request and wait for its reply."""
        number = next(self._ids)
        self._channel.send({"op": op, "id": number, **arguments})
        reply = self._wait(lambda: self._replies.pop(number, None), _REQUEST_SECONDS, op)
        if "error" in reply:
            raise from_wire(reply["error"])
        return reply

    def close(self, timeout: float) -> bool:
        """Let the agent finish what is in flight and end; False if it did not within `timeout` seconds."""
        try:
            self._channel.send({"op": "close"})
            self._process.wait(timeout)
        except ClosedError:
            pass
        except subprocess.TimeoutExpired:
            self.end()
            return False
        self.end()
        return True

    def end(self) -> None:
        """End the agent at once, whatever it is doing. Idempotent."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._channel.close()

    def _wait(self, found: Callable[[], Message | None], seconds: float, what: str) -> Message:
        deadline = Deadline.after(seconds)
        with self._changed:
            while (message := found()) is None:
                if self.lost:
                    raise CoordinationError(
                        f"the agent (process {self.pid}) ended with status {self._process.poll()} before it "
                        f"answered {what!r}; what it printed to stderr says why"
                    )
                if deadline.passed or not self._changed.wait(deadline.left()):
                    raise TierTimeoutError(
                        f"the agent (process {self.pid}) did not answer {what!r} in {seconds} s"
                    )
            return message

    def _listen(self) -> None:
        while (message := self._channel.receive()) is not None:
            event = message["event"]
            if event == "log":
                logging.getLogger(message["logger"]).log(message["level"], "%s", message["text"])
            elif event == "reply":
                with self._changed:
                    self._replies[message["id"]] = message
                    self._changed.notify_all()
            elif event in ("ready", "cannot_start"):
                with self._changed:
                    self._first = message
                    self._changed.notify_all()
            elif event == "closed":
                self.safe_elsewhere = message["safe"]
            else:
                self._on_event(message)
        with self._changed:
            self.lost = True
            self._changed.notify_all()
        self._on_lost(self)
