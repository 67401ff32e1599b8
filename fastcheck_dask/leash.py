"""Run a command that ends when its parent does: ``python leash.py PARENT_PID COMMAND ARGUMENT...``.

It is run by its path, not as a module: so it starts at once, without importing the package.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Ask the kernel for SIGKILL at the parent's death, then become the command."""
    parent, *command = arguments
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have died before the kernel knew what to do then.
    if os.getppid() != int(parent):
        sys.exit(1)
    os.execv(command[0], command)  # noqa: S606


if __name__ == "__main__":
    main(sys.argv[1:])
