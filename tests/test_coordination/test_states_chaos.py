"""The states protocol with real servers and masters that are killed, stopped and cut off: what was seen."""

from __future__ import annotations

import contextlib
import itertools
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from fastcheck_dask.clock import Deadline
from fastcheck_dask.coordination import connect
from fastcheck_dask.coordination.election import master_of
from fastcheck_dask.coordination.states import NodeState, StateReader, StateUpdater
from fastcheck_dask.errors import CoordinationError
from fastcheck_dask.node.master_link import WireLink
from fastcheck_dask.testing.linearizability import Event, check_register
from fastcheck_dask.testing.tcp_proxy import TcpProxy
from fastcheck_dask.tiers.peer import PeerClient

pytestmark = [pytest.mark.zookeeper, pytest.mark.slow]

SESSION_SECONDS = 2.0
REGISTERS = ("u0", "u1")


class Node:
    """A master, or one to be, in a process, with cables of its own to the servers."""

    def __init__(self, name, ensemble, folder):
        self.name, self.folder = name, folder
        self.cables = [TcpProxy(server.port) for server in ensemble.servers]
        self.url = f"zk://{','.join(cable.hosts for cable in self.cables)}/chaos"
        self.child = None

    def start(self):
        script = Path(__file__).with_name("state_node.py")
        with (self.folder / f"{self.name}.log").open("a") as log:
            self.child = subprocess.Popen(
                [sys.executable, str(script), self.url, self.name, str(SESSION_SECONDS)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=log,
            )

    def signal(self, number):
        self.child.send_signal(number)

    def kill(self):
        self.child.kill()
        self.child.wait()
        self.child.stdin.close()

    def pull(self):
        for cable in self.cables:
            cable.pull()

    def plug(self):
        for cable in self.cables:
            cable.plug()

    def close(self):
        self.signal(signal.SIGCONT)
        self.kill()
        for cable in self.cables:
            cable.close()


class Recorder:
    """Clients in threads, and everything that they did."""

    def __init__(self, hosts):
        self.url = f"zk://{hosts}/chaos"
        self.stopping = threading.Event()
        self.events = {name: [] for name in REGISTERS}
        self.lock = threading.Lock()
        self.failures = []
        self.threads = [threading.Thread(target=self.run, args=(self.write, name)) for name in REGISTERS]
        self.threads += [threading.Thread(target=self.run, args=(self.read, str(n))) for n in range(2)]

    def start(self):
        for thread in self.threads:
            thread.start()

    def finish(self):
        self.stopping.set()
        for thread in self.threads:
            thread.join()
        assert not self.failures, self.failures

    def run(self, what, name):
        coordinator = connect(self.url, session_seconds=SESSION_SECONDS, timeout_seconds=3.0)
        try:
            what(coordinator.entries, name)
        except Exception as error:
            self.failures.append(error)
        finally:
            coordinator.close()

    def note(self, name, event):
        with self.lock:
            self.events[name].append(event)

    def write(self, entries, name):
        updater = StateUpdater(name, entries, link=WireLink(entries, PeerClient))
        session, alive = entries.session, time.monotonic()
        for number in itertools.count(1):
            if self.stopping.wait(0.02):
                # The state goes with the session that is closed next.
                self.note(name, Event("write", None, time.monotonic()))
                return
            called = time.monotonic()
            returned = float("inf")
            with contextlib.suppress(CoordinationError):
                updater.update(NodeState("available", number, 2**30), deadline=Deadline.after(5.0))
                returned = time.monotonic()
            self.note(name, Event("write", number, called, returned))
            if entries.session != session:
                # The state went with the session that ended since it was known to live, at some moment.
                self.note(name, Event("write", None, alive))
                session = entries.session
            elif returned < float("inf"):
                alive = called

    def read(self, entries, _):
        reader = StateReader(entries, link=WireLink(entries, PeerClient))
        while not self.stopping.wait(0.005):
            called = time.monotonic()
            try:
                states = reader.read(deadline=Deadline.after(5.0))
            except CoordinationError:
                continue
            returned = time.monotonic()
            for name in REGISTERS:
                value = states[name].used_bytes if name in states else None
                self.note(name, Event("read", value, called, returned))

    def judge(self):
        return {name: check_register(events) for name, events in self.events.items()}


class Chaos:
    """Harms servers and masters, one after the other, and makes them whole again."""

    def __init__(self, ensemble, nodes, entries, seed):
        self.ensemble, self.nodes, self.entries = ensemble, nodes, entries
        self.dice = random.Random(seed)
        self.done = []
        self.pause = threading.Event()

    def master(self):
        with contextlib.suppress(CoordinationError):
            found = master_of(self.entries)
            if found is not None:
                return next(node for node in self.nodes if node.name == found.name)
        return self.dice.choice(self.nodes)

    def harm(self):
        what = self.dice.choice(
            [
                self.kill_server,
                self.stop_server,
                self.kill_master,
                self.stop_master,
                self.cut_master,
                self.cut_master,
            ]
        )
        self.done.append(what.__name__)
        what()
        self.pause.wait(self.dice.uniform(0.2, 1.0))

    def some_time(self):
        self.pause.wait(self.dice.uniform(0.5, 1.6 * SESSION_SECONDS))

    def kill_server(self):
        server = self.dice.choice(self.ensemble.servers)
        server.kill()
        self.pause.wait(self.dice.uniform(0.1, 0.8))
        server.launch()

    def stop_server(self):
        server = self.dice.choice(self.ensemble.servers)
        server.pause()
        self.pause.wait(self.dice.uniform(0.1, 1.5))
        server.resume()

    def kill_master(self):
        node = self.master()
        node.kill()
        self.pause.wait(self.dice.uniform(0.0, SESSION_SECONDS))
        node.start()

    def stop_master(self):
        node = self.master()
        node.signal(signal.SIGSTOP)
        self.some_time()
        node.signal(signal.SIGCONT)

    def cut_master(self):
        node = self.master()
        node.pull()
        self.some_time()
        node.plug()


def test_servers_and_masters_are_harmed_no_read_is_old(ensemble, tmp_path, request, capsys):
    """Linearizable per node: a read that was called after an update is complete sees it, or a newer one."""
    seconds, seed = request.config.getoption("--chaos-seconds"), request.config.getoption("--chaos-seed")
    seed = random.SystemRandom().randrange(10**6) if seed is None else seed
    with contextlib.ExitStack() as stack:
        coordinator = connect(
            f"zk://{ensemble.hosts}/chaos", session_seconds=SESSION_SECONDS, timeout_seconds=3.0
        )
        stack.callback(coordinator.close)
        nodes = [Node(f"m{number}", ensemble, tmp_path) for number in range(3)]
        for node in nodes:
            node.start()
            stack.callback(node.close)
        recorder = Recorder(ensemble.hosts)
        stack.callback(recorder.stopping.set)
        reader = StateReader(coordinator.entries, link=WireLink(coordinator.entries, PeerClient))
        reader.read(deadline=Deadline.after(30.0))
        recorder.start()
        chaos, until = Chaos(ensemble, nodes, coordinator.entries, seed), Deadline.after(seconds)
        while not until.passed:
            chaos.harm()
        # Once nothing goes wrong any more, nobody waits for ever.
        ensemble.wait_leader()
        answered = threading.Event()
        deadline = Deadline.after(30.0)
        while not answered.is_set():
            with contextlib.suppress(CoordinationError):
                reader.read(deadline=deadline)
                answered.set()
            assert not deadline.passed, f"no answer after {chaos.done}, seed {seed}"
        recorder.finish()
    kinds = {name: [event.kind for event in events] for name, events in recorder.events.items()}
    counts = {name: (found.count("write"), found.count("read")) for name, found in kinds.items()}
    said = f"seed {seed}: {chaos.done}, writes and reads {counts}"
    with capsys.disabled():
        sys.stdout.write(f"\n{said}\n")
    assert recorder.judge() == dict.fromkeys(REGISTERS, ""), said
    assert all(reads > 20 and writes > 5 for writes, reads in counts.values()), said
