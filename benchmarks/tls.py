"""What does TLS of the data ports cost a save and a load?

Four storage nodes with TLS and four without, on loopback, where nothing but the CPU holds a transfer back:
over a real network the part that TLS takes is smaller. A training host saves noise raw to either in turn, and
loads it with its shared memory empty. Beside the rates stands the median of the quotients of one round: what
else the machine does changes from round to round. Then the CPU time that a client takes for what it sends and
receives, in which nothing else counts, and what one core encrypts with AES-256-GCM as OpenSSL measures it.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import console, describe, spread, table
from fastcheck_dask import FastCheckManager
from fastcheck_dask.testing.certificates import Certificates
from fastcheck_dask.testing.cluster import StorageCluster
from fastcheck_dask.tiers.peer import PeerClient
from fastcheck_dask.tiers.wire_tls import DataTls

SHARDS = 2
KINDS = ("plain", "TLS")
PROBE_BYTES = 16 * 2**20


def _files(folder: Path) -> dict[str, str]:
    authority = Certificates(folder / "certificates")
    cert, key = authority.issue("member")
    return {"ca": str(authority.ca), "cert": str(cert), "key": str(key)}


def measure(folder: Path, nbytes: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return bytes a second of saves (while sending) and loads, by kind."""
    files = _files(folder)
    state = {f"w{i}": np.random.default_rng(i).integers(0, 2**32, nbytes // 32, np.uint32) for i in range(8)}
    options: dict[str, Any] = {
        "num_shards": SHARDS,
        "compression": "never",
        "persist_every": 0,
        "encoders": 1,
        "chunk_bytes": "8 MiB",
    }
    found: dict[str, dict[str, list[float]]] = {
        kind: {what: [] for what in ("save", "load", "sent", "received")} for kind in KINDS
    }
    with ExitStack() as stack:
        clusters = {}
        for kind in KINDS:
            config = {f"fastcheck.data.tls-{n}": f for n, f in files.items()} if kind == "TLS" else {}
            clusters[kind] = stack.enter_context(StorageCluster(folder / kind, SHARDS + 2, config=config))
        for number in range(rounds):
            for kind in KINDS:
                tls = DataTls(**files) if kind == "TLS" else None
                sent, received = asyncio.run(_processor_rates(clusters[kind].address("n0"), tls))
                found[kind]["sent"].append(sent)
                found[kind]["received"].append(received)
                mine = options | {"coordinator": clusters[kind].coordinator}
                if kind == "TLS":
                    mine |= {f"data_tls_{name}": file for name, file in files.items()}
                ckpts = folder / f"ckpts-{kind}-{number}"
                with FastCheckManager(ckpts, local_dir=folder / "local", **mine) as manager:
                    stats = manager.save_async(state, "noise").wait("peers").stats
                    found[kind]["save"].append(stats["link_bytes_per_second"])
                with FastCheckManager(ckpts, local_dir=folder / "elsewhere", **mine) as manager:
                    manager.load()
                    report = manager.last_load
                    assert report is not None
                    assert report.source == "peers"
                    found[kind]["load"].append(report.received_bytes / report.seconds)
    return found


async def _processor_rates(address: str, tls: DataTls | None) -> list[float]:
    """Return bytes that are sent, and received, in a second of this process's CPU time."""
    client, rates = PeerClient("n0", address, tls=tls, grace_seconds=30.0), []
    try:
        await client.ping()
        for data, give_bytes in ((bytes(PROBE_BYTES), 0), (b"", PROBE_BYTES)):
            began = time.process_time()
            for _ in range(8):
                await client.probe(data, give_bytes=give_bytes)
            rates.append(8 * PROBE_BYTES / (time.process_time() - began))
    finally:
        await client.close()
    return rates


def _encrypts() -> float:
    """Return bytes a second."""
    command = ["openssl", "speed", "-seconds", "1", "-bytes", "16384", "-evp", "aes-256-gcm"]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return float(output.split()[-1].rstrip("k")) * 1e3


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=256, help="size of the state")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    console.print(describe())
    with tempfile.TemporaryDirectory() as name:
        found = measure(Path(name), arguments.mib * 2**20, arguments.rounds)
    rows = []
    names = {"sent": "sent, per second of CPU", "received": "received, per second of CPU"}
    for what in ("save", "load", "sent", "received"):
        plain, tls = (found[kind][what] for kind in KINDS)
        ratio = statistics.median(t / p for t, p in zip(tls, plain, strict=True))
        rows.append(
            [names.get(what, what), spread(plain, "MB/s", 1e-6), spread(tls, "MB/s", 1e-6), f"{ratio:.2f}"]
        )
    table(f"{arguments.mib} MiB of noise, {SHARDS} data shards and parity", ["", *KINDS, "TLS / plain"], rows)
    console.print(f"AES-256-GCM, one core: {_encrypts() / 1e6:.0f} MB/s")


if __name__ == "__main__":
    main()
