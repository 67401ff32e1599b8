"""Run every benchmark; ``make bench``."""

from __future__ import annotations

from benchmarks import failover, files, inspection, memory, stall, tiers
from benchmarks.machine import console, describe


def main() -> None:
    """Print all tables."""
    console.print(describe())
    for benchmark in (stall, memory, tiers, files, failover, inspection):
        benchmark.main()


if __name__ == "__main__":
    main()
