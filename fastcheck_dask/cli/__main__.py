"""``python -m fastcheck_dask.cli``."""

from __future__ import annotations

from fastcheck_dask.cli import main

if __name__ == "__main__":
    main(prog_name="fastcheck")
