"""An encoder process: reads the slots in shared memory, writes payloads into the arena.

Jobs come over an inherited socket; the arena is an inherited memory file. The process ends when its
socket closes, so it never outlives the agent.
"""

from __future__ import annotations

import mmap
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from fastcheck_codecs import max_encoded_nbytes

from fastcheck_dask.agent.channel import BlockingChannel, Message
from fastcheck_dask.engine.encode import Bits, TaskEncoder, check_cast
from fastcheck_dask.errors import ClosedError, to_wire
from fastcheck_dask.tiers.local import Slot


def run_job(message: Message, arena: Bits, encoder: TaskEncoder) -> Message:
    """Encode the tasks of one job one after the other into the job's window of the arena."""
    # Mapped for this job only: a mapping kept longer would hold the memory of a slot that has to grow.
    current = Slot(Path(message["current"]), readonly=True).data
    base = Slot(Path(message["base"]), readonly=True).data if message["base"] is not None else None
    at: int = message["window"]
    results: list[list[Any]] = []
    for dtype, nbytes, pieces, base_pieces, exponent in message["tasks"]:
        assert base is not None or base_pieces is None
        started = time.perf_counter()
        out = arena[at : at + max_encoded_nbytes(nbytes)]
        payload = encoder.encode(
            (current, tuple(map(tuple, pieces))),
            None if base is None or base_pieces is None else (base, tuple(map(tuple, base_pieces))),
            dtype=dtype,
            nbytes=nbytes,
            out=out,
            compress=message["compress"],
            exponent=exponent,
        )
        took = time.perf_counter() - started
        results.append([at, payload.nbytes, payload.digest, payload.crc32c, took, payload.nonfinite])
        at += payload.nbytes
    return {"id": message["id"], "results": results}


def run_checks(message: Message) -> Message:
    """Compare chunks of a slot with the casts of others."""
    current = Slot(Path(message["current"]), readonly=True).data
    return {
        "id": message["id"],
        "digests": [
            check_cast(current, source=tuple(source), narrow=tuple(narrow), dtype=dtype)
            for dtype, source, narrow in message["checks"]
        ],
    }


def main(socket_fd: int, arena_fd: int) -> None:
    """Serve jobs until the socket closes."""
    # The agent decides when encoders end; a Ctrl-C in the terminal goes to the whole group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = BlockingChannel(socket.socket(fileno=socket_fd))
    arena: Bits = np.empty(0, np.uint8)
    encoder = TaskEncoder()
    while (message := channel.receive()) is not None:
        try:
            if "checks" in message:
                reply = run_checks(message)
            else:
                if arena.size != message["arena_bytes"]:
                    arena = np.frombuffer(mmap.mmap(arena_fd, message["arena_bytes"]), np.uint8)
                reply = run_job(message, arena, encoder)
        except Exception as error:  # a failed job is answered, whatever it was: the agent decides
            reply = {"id": message["id"], "error": to_wire(error)}
        try:
            channel.send(reply)
        except ClosedError:  # the agent died during the job
            return


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
