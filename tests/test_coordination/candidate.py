"""A process that stands for election and, while it leads, writes its fencing token again and again.

Says ``leads TOKEN SINCE``, ``idle TOKEN SINCE`` when it has to stop acting, and ``over TOKEN``. On stdin:
``fail`` has its service end with an error, ``hang`` has it stop.
"""

from __future__ import annotations

import logging
import sys
import threading
import time

from fastcheck_dask.coordination import connect
from fastcheck_dask.coordination.election import Election, ElectionTimes, Leadership
from fastcheck_dask.coordination.entries import Write
from fastcheck_dask.errors import CoordinationError, FencedError

TICK_SECONDS = 0.02


class Service:
    def __init__(self) -> None:
        self.failing, self.hanging = threading.Event(), threading.Event()

    def __call__(self, leadership: Leadership) -> None:
        say(f"leads {leadership.fencing_token} {time.monotonic()}")
        acted = False
        try:
            while leadership.wait(TICK_SECONDS):
                if self.failing.is_set():
                    self.failing.clear()
                    raise RuntimeError("the service failed, as it was told")
                if self.hanging.is_set():
                    threading.Event().wait()
                if leadership.in_force:
                    acted = True
                    act(leadership)
                elif acted:
                    acted = False
                    say(f"idle {leadership.fencing_token} {time.monotonic()}")
        finally:
            say(f"over {leadership.fencing_token}")


def act(leadership: Leadership) -> None:
    try:
        leadership.apply(Write("act", str(leadership.fencing_token).encode(), None))
    except FencedError:
        say(f"fenced {leadership.fencing_token}")
        raise
    except CoordinationError:
        # The next time, if it still leads.
        return


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(url: str, name: str, session_seconds: str) -> None:
    logging.basicConfig()
    coordinator = connect(url, session_seconds=float(session_seconds), timeout_seconds=5.0)
    service = Service()
    times = ElectionTimes(confirm_seconds=0.2, trust_seconds=1.0, watchdog_seconds=1.0)
    election = Election(coordinator.entries, name, service, address=f"fcs://{name}:1", times=times)
    election.start()
    say("stands")
    for line in sys.stdin:
        {"fail": service.failing, "hang": service.hanging}[line.strip()].set()
    election.close()
    coordinator.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
