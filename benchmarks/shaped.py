"""Storage nodes behind links of given rates: network namespaces, joined by a router and shaped by tc."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

#: Several processes of one machine may do this at once.
_PREFIX = f"fc{os.getpid()}"
_NODE = (
    "import sys; from fastcheck_dask.node.process import storage; "
    "sys.exit(storage(None, sys.argv[1], memory_bytes=2**31, name=sys.argv[2], rack=sys.argv[2], "
    "host=sys.argv[3], insecure=True))"
)


def why_not() -> str | None:
    """Say what is missing, if anything is."""
    if os.geteuid() != 0:
        return "root is needed to make network namespaces"
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        return f"{' and '.join(missing)} cannot be found (iproute2)"
    tried = subprocess.run(["ip", "netns", "add", f"{_PREFIX}T"], capture_output=True, text=True)
    if tried.returncode:
        return f"no network namespace can be made here: {tried.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", f"{_PREFIX}T"], check=True)
    return None


def _ip(namespace: str, *words: str) -> None:
    subprocess.run(["ip", "-n", namespace, *words], check=True)


def _link(name: str, address: str, mbit: int) -> None:
    """Join a new namespace with the router by a link of its own, shaped at both ends."""
    router, inner, outer = f"{_PREFIX}R", f"i{name}", f"o{name}"
    subprocess.run(["ip", "netns", "add", f"{_PREFIX}{name}"], check=True)
    _ip(router, "link", "add", outer, "type", "veth", "peer", "name", inner, "netns", f"{_PREFIX}{name}")
    _ip(router, "addr", "add", f"{address}.1/24", "dev", outer)
    _ip(f"{_PREFIX}{name}", "addr", "add", f"{address}.2/24", "dev", inner)
    for namespace, device in ((router, outer), (f"{_PREFIX}{name}", inner)):
        _ip(namespace, "link", "set", device, "up")
        shape = ["tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf"]
        subprocess.run([*shape, "rate", f"{mbit}mbit", "burst", "256kb", "latency", "20ms"], check=True)
    _ip(f"{_PREFIX}{name}", "link", "set", "lo", "up")
    _ip(f"{_PREFIX}{name}", "route", "add", "default", "via", f"{address}.1")


def in_host() -> list[str]:
    """Return what a command is preceded by that shall run on the training host."""
    return ["ip", "netns", "exec", f"{_PREFIX}H"]


@contextlib.contextmanager
def network(node_mbits: Sequence[int], host_mbit: int) -> Iterator[None]:
    """Make the namespaces: a router, the training host, and one for each node; no way out."""
    names = ["R", "H", *(str(n) for n in range(1, len(node_mbits) + 1))]
    try:
        subprocess.run(["ip", "netns", "add", f"{_PREFIX}R"], check=True)
        forward = ["ip", "netns", "exec", f"{_PREFIX}R", "sysctl", "-qw", "net.ipv4.ip_forward=1"]
        subprocess.run(forward, check=True)
        _link("H", "10.77.0", host_mbit)
        for number, mbit in enumerate(node_mbits, 1):
            _link(str(number), f"10.77.{number}", mbit)
        yield
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", f"{_PREFIX}{name}"], capture_output=True)


@contextlib.contextmanager
def nodes(folder: Path, coordinator: str, count: int) -> Iterator[None]:
    """Run storage nodes ``n1``, ``n2`` and so on in their namespaces; they may take a while to be there."""
    running = []
    try:
        for number in range(1, count + 1):
            arguments = [sys.executable, "-c", _NODE, coordinator, f"n{number}", f"10.77.{number}.2"]
            with (folder / f"n{number}.log").open("wb") as log:
                inside = ["ip", "netns", "exec", f"{_PREFIX}{number}", *arguments]
                running.append(subprocess.Popen(inside, stdout=log, stderr=log))
        yield
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait()
