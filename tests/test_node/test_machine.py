"""The memory of the machine, and of the container around the process."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from fastcheck_dask.errors import ConfigError
from fastcheck_dask.node.machine import check_memory, memory_limit_bytes

GIB = 2**30


def machine(root: Path, files: dict[str, str], *, total: int = 64 * GIB) -> Path:
    files = {"proc/meminfo": f"MemTotal:       {total // 1024} kB\nMemFree: 1 kB\n", **files}
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_limit_of_this_machine_is_what_it_has_at_most() -> None:
    assert 0 < memory_limit_bytes() <= psutil.virtual_memory().total


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        ({}, 64),
        ({"sys/fs/cgroup/memory.max": "max\n"}, 64),
        ({"sys/fs/cgroup/memory.max": f"{8 * GIB}\n"}, 8),
        ({"sys/fs/cgroup/memory.max": f"{800 * GIB}\n"}, 64),
        ({"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"}, 64),
        ({"sys/fs/cgroup/memory/memory.limit_in_bytes": f"{4 * GIB}\n"}, 4),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/memory.max": f"{3 * GIB}\n",
                "sys/fs/cgroup/a/b/memory.max": f"{5 * GIB}\n",
            },
            3,
        ),
        (
            {
                "proc/self/cgroup": "3:cpu,cpuacct:/x\n4:memory:/job\n0::/\n",
                "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{2 * GIB}\n",
                "sys/fs/cgroup/memory/x/memory.limit_in_bytes": f"{1 * GIB}\n",
            },
            2,
        ),
        # A container sees the path that the host knows, which is not there.
        ({"proc/self/cgroup": "0::/kubepods/pod1\n", "sys/fs/cgroup/memory.max": f"{GIB}\n"}, 1),
        ({"proc/self/cgroup": "nonsense\n0::/../../x\n"}, 64),
    ],
)
def test_limit_is_the_smallest_of_machine_and_cgroups(
    tmp_path: Path, files: dict[str, str], wanted: int
) -> None:
    assert memory_limit_bytes(machine(tmp_path, files)) == wanted * GIB


@pytest.mark.parametrize("text", [None, "nothing\n"])
def test_machine_that_does_not_tell_asks_for_a_size(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        machine(tmp_path, {"proc/meminfo": text})
    with pytest.raises(ConfigError, match="give --memory as a size"):
        memory_limit_bytes(tmp_path)


def test_memory_beyond_the_limit_names_both() -> None:
    check_memory(GIB, GIB)
    with pytest.raises(
        ConfigError, match=r"would be 1,073,741,825 bytes, and .* has 1,073,741,824; give less"
    ):
        check_memory(GIB + 1, GIB)
