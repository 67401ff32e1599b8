"""The trainer's end of the line to one agent: asks it, hears from it, and notices when it dies or hangs."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import select
import socket
import subprocess
import threading
from collections.abc import Callable
from typing import Any

from fastcheck_dask.agent.channel import BlockingChannel, Message
from fastcheck_dask.clock import Deadline
from fastcheck_dask.errors import (
    ClosedError,
    CoordinationError,
    FastCheckError,
    SaveFailedError,
    TierTimeoutError,
    from_wire,
)
from fastcheck_dask.manager.agent_start import start_agent
from fastcheck_dask.manager.handle import SaveHandle
from fastcheck_dask.manager.in_flight import InFlight

log = logging.getLogger(__name__)

#: How long a new agent may take until it serves; it may wait for its predecessor and for a session to end.
START_SECONDS = 120.0
#: How long the answer to one question may take.
REQUEST_SECONDS = 60.0
#: An agent is asked this often whether it lives,
PING_SECONDS = 10.0
#: and is ended when it was silent this many times in a row. Counted, not timed: a trainer that was stopped
#: together with its agent finds hours gone by on waking up.
SILENT_PINGS = 12
#: How long an agent may take to end after it closed the channel.
_EXIT_SECONDS = 10.0
_WAIT_NOTICE_SECONDS = 30.0


class AgentLink:
    """One agent process, the channel to it, which slots it has left free, and the saves it is busy with.

    Parameters
    ----------
    start : dict
        The first message: what the agent works on.
    on_failure : callable
        Called with the error of each save that falls short.

    Raises
    ------
    CoordinationError
        If the process cannot be started.

    Notes
    -----
    Any thread may call, except that saves are handed over one after the other. Two threads of its own live
    as long as the agent: one receives, one watches. When the agent ends, `lost` is set, and every save that
    was not done fails.
    """

    def __init__(self, start: Message, on_failure: Callable[[FastCheckError], None]) -> None:
        self.in_flight = InFlight(on_failure)
        self.lost = False
        #: After `close`: whether the newest checkpoint is in another tier than this host's memory.
        self.safe_elsewhere = False
        self._ids = itertools.count()
        self._changed = threading.Condition()
        self._replies: dict[int, Message] = {}
        self._first: Message | None = None
        self._free: set[int] = set()
        self._closing = False
        self._heard = True
        self._start_seconds = START_SECONDS
        if start["ranks"] is not None:
            # Its predecessor may still wait for the other ranks.
            self._start_seconds += start["settings"]["commit_seconds"]
        #: Whether the training communicates, what the agent was told of it, and whether it has yet to answer.
        self._busy = self._told_busy = self._telling_busy = False
        ours, theirs = socket.socketpair()
        self._channel = BlockingChannel(ours)
        with theirs:
            try:
                self._process = start_agent(theirs.fileno())
            except BaseException:
                self._channel.close()
                raise
        self._threads = [
            threading.Thread(target=target, name=f"fastcheck-agent-{target.__name__[1:]}", daemon=True)
            for target in (self._listen, self._watch)
        ]
        for thread in self._threads:
            thread.start()
        try:
            self._channel.send(start)
        except ClosedError:
            # It died at once; `wait_ready` says so.
            log.debug("agent %d did not take the first message", self.pid)

    @property
    def pid(self) -> int:
        """The agent's process id."""
        return self._process.pid

    def wait_ready(self) -> None:
        """Wait until the agent serves, or raise what kept it from starting."""
        first = self._wait(lambda: self._first, self._start_seconds, "start")
        if first["event"] == "cannot_start":
            raise from_wire(first["error"])

    def free_slot(self, stop: Callable[[], bool] | None = None) -> int | None:
        """Return a free slot; it stays free until it is handed over.

        Parameters
        ----------
        stop : callable, optional
            Says whether to go on waiting makes no sense any more; `nudge` has it asked. Without it nothing is
            waited for.

        Returns
        -------
        int or None
            None if there is none, or the agent is lost.

        Notes
        -----
        The wait lasts as long as the agent is alive and answers, because a slow tier is no failure; an agent
        that hangs is ended after `PING_SECONDS` times `SILENT_PINGS`, and then it is over.
        """
        with self._changed:
            waited = 0.0
            while not self._free and not self.lost:
                if stop is None or stop():
                    return None
                if not self._changed.wait(_WAIT_NOTICE_SECONDS):
                    waited += _WAIT_NOTICE_SECONDS
                    log.warning(
                        "training has waited %.0f s for earlier saves to leave a slot; the tiers are slower "
                        "than the saves come (on_busy='skip' would leave this one out)",
                        waited,
                    )
            return None if self.lost else min(self._free)

    def nudge(self) -> None:
        """Have whoever waits for a slot ask whether to stop."""
        with self._changed:
            self._changed.notify_all()

    def save(self, number: int, handle: SaveHandle) -> None:
        """Hand over the snapshot in a slot; what becomes of it is told on the handle."""
        seq = self.in_flight.add(handle)
        message = {"op": "save", "slot": number, "seq": seq}
        try:
            with self._changed:
                self._free.discard(number)
            self._channel.send(message)
        except ClosedError as error:
            self.in_flight.fail(seq, SaveFailedError(f"save {handle.tag!r}: {error}"))
        except BaseException:
            # A signal's exception, and perhaps it is sent already: the agent takes each number once.
            self._channel.send(message)
            raise

    def gave_up(self, tag: str, reason: str) -> None:
        """Say that no snapshot will come for a save."""
        # An agent that is gone says it by that.
        with contextlib.suppress(ClosedError):
            self._channel.send({"op": "gave_up", "tag": tag, "reason": reason})

    def adopt(self, number: int) -> None:
        """Offer the checkpoint that a load put into a slot as delta base."""
        # Taken first: were it used again while the agent encodes against it, deltas would be wrong.
        with self._changed:
            self._free.discard(number)
        if not self.ask("adopt", slot=number)["adopted"]:
            self._give_back(number)

    def ask(self, op: str, **arguments: Any) -> Message:
        """Send a request and wait for its reply."""
        number = next(self._ids)
        self._channel.send({"op": op, "id": number, **arguments})
        reply = self._wait(lambda: self._replies.pop(number, None), REQUEST_SECONDS, op)
        if "error" in reply:
            raise from_wire(reply["error"])
        return reply

    def tell_busy(self, busy: bool) -> None:
        """Tell the agent whether the training communicates; from any thread, never blocks, nor raises.

        One such message is on its way at a time, and what was told and taken back meanwhile is left out: an
        agent that does not read must not hold up the training.
        """
        with self._changed:
            self._busy = busy
            if self._telling_busy or self._told_busy == busy:
                return
            self._telling_busy, self._told_busy = True, busy
        with contextlib.suppress(ClosedError):
            self._channel.send({"op": "busy", "busy": busy})

    def close(self, timeout: float) -> bool:
        """Let the agent finish what is in flight and end; False if it did not within `timeout` seconds.

        An exception of a signal handler (a second Ctrl-C) ends the wait, not the agent: it has been told to
        finish, and does.
        """
        self._closing = True
        finished = True
        try:
            self._channel.send({"op": "close"})
            self._process.wait(timeout)
        except ClosedError:
            log.debug("agent %d had ended before", self.pid)
        except subprocess.TimeoutExpired:
            finished = False
        except BaseException:
            self._fail_all(f"close() was interrupted; the agent (process {self.pid}) goes on by itself")
            raise
        self.end()
        return finished

    def end(self) -> None:
        """End the agent at once, whatever it is doing. Idempotent."""
        self._closing = True
        if self._process.poll() is None:
            self._process.kill()
        for thread in self._threads:
            if threading.current_thread() is not thread:
                thread.join()

    def _wait(self, found: Callable[[], Message | None], seconds: float, what: str) -> Message:
        deadline = Deadline.after(seconds)
        with self._changed:
            while (message := found()) is None:
                if self.lost:
                    raise CoordinationError(
                        f"the agent (process {self.pid}) ended with status {self._exit_status()} before it "
                        f"answered {what!r}; what it printed to stderr says why"
                    )
                if deadline.passed or not self._changed.wait(deadline.left()):
                    raise TierTimeoutError(
                        f"the agent (process {self.pid}) did not answer {what!r} in {seconds} s"
                    )
            return message

    def _give_back(self, number: int) -> None:
        with self._changed:
            self._free.add(number)
            self._changed.notify_all()

    def _listen(self) -> None:
        try:
            while (message := self._channel.receive()) is not None:
                self._heard = True
                self._take(message)
        except Exception:  # nothing that it said can be relied on: its saves must fail, and not wait for ever
            log.exception("the agent (process %d) cannot be understood and is ended", self.pid)
            self._process.kill()
        self._is_lost()

    def _take(self, message: Message) -> None:
        event = message["event"]
        if event == "log":
            with contextlib.suppress(Exception):  # of the user's filters and handlers
                logging.getLogger(message["logger"]).log(message["level"], "%s", message["text"])
        elif event == "free":
            self._give_back(message["slot"])
        elif event == "closed":
            self.safe_elsewhere = message["safe"]
        elif event in ("reply", "ready", "cannot_start"):
            with self._changed:
                if event == "reply":
                    self._replies[message["id"]] = message
                elif self._first is None:
                    self._first = message
                    self._free.update(message.get("free", ()))
                self._changed.notify_all()
        elif event == "noted":
            with self._changed:
                self._telling_busy = False
                busy = self._busy
            self.tell_busy(busy)
        elif event != "pong":
            self.in_flight.take(message)

    def _is_lost(self) -> None:
        with self._changed:
            self.lost = True
            self._changed.notify_all()
        # First, so that nothing is handed over after what was is told to be lost.
        self._channel.close()
        status = self._exit_status()
        if self._closing:
            self._fail_all("the manager was closed before this save was done: it is lost")
        else:
            self._fail_all(
                f"the agent (process {self.pid}) died (status {status}) while this save was on its way; "
                "the next save starts a new one"
            )

    def _exit_status(self) -> int:
        """See to it that the process has ended, also when it hangs after it closed the channel."""
        try:
            return self._process.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def _fail_all(self, reason: str) -> None:
        self.in_flight.fail_all(lambda handle: SaveFailedError(f"save {handle.tag!r}: {reason}"))

    def _watch(self) -> None:
        """See to it that the agent's end is noticed, and end it when it hangs."""
        try:
            process = os.pidfd_open(self.pid)
        except OSError:
            self._channel.shut()
            return
        poller = select.poll()
        poller.register(process, select.POLLIN)
        silent = 0
        while not poller.poll(PING_SECONDS * 1000):
            if self._closing or self._first is None:
                continue
            silent = 0 if self._heard else silent + 1
            self._heard = False
            if silent >= SILENT_PINGS:
                log.error("the agent (process %d) does not answer any more and is ended", self.pid)
                self._process.kill()
            else:
                self._ping()
        os.close(process)
        # A process that was forked just when the agent was started may hold a copy of its end of the socket.
        self._channel.shut()

    def _ping(self) -> None:
        try:
            self._channel.send({"op": "ping"})
        except ClosedError:
            log.debug("agent %d is gone", self.pid)
