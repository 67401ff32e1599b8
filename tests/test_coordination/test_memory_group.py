"""Which cgroup counts for a process, in both versions and in containers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fastcheck_dask.coordination.memory_group import group_of_this_process

V1 = "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"
V2 = "low 0\nhigh 0\nmax 9\noom 4\noom_kill 3\noom_group_kill 0\n"


def machine(root: Path, cgroup: str, files: dict[str, str]) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(cgroup)
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("cgroup", "file", "text"),
    [
        ("0::/system.slice/node.service\n", "sys/fs/cgroup/system.slice/node.service/memory.events", V2),
        # In a container, with and without a name space of its own.
        ("0::/\n", "sys/fs/cgroup/memory.events", V2),
        ("0::/kubepods/pod7/abc\n", "sys/fs/cgroup/memory.events", V2),
        ("7:cpu:/x\n4:memory:/pods/a\n0::/\n", "sys/fs/cgroup/memory/pods/a/memory.oom_control", V1),
        ("4:memory:/docker/abc\n", "sys/fs/cgroup/memory/memory.oom_control", V1),
    ],
)
def test_group_of_this_process_is_the_nearest_that_is_there(
    tmp_path: Path, cgroup: str, file: str, text: str
) -> None:
    root = machine(tmp_path, cgroup, {file: text})
    found = group_of_this_process(root)
    assert found is not None
    folder = (root / file).parent
    assert (found.path, found.inode, found.oom_kills) == (str(folder), folder.stat().st_ino, 3)
    (root / file).write_text(text.replace("oom_kill 3", "oom_kill 5"))
    assert found.now() == replace(found, oom_kills=5)


def test_group_that_is_gone_or_another_one_is_not_known(tmp_path: Path) -> None:
    root = machine(tmp_path, "0::/n\n", {"sys/fs/cgroup/n/memory.events": V2})
    found = group_of_this_process(root)
    assert found is not None
    assert replace(found, inode=found.inode + 1).now() is None
    (root / "sys/fs/cgroup/n/memory.events").unlink()
    assert found.now() is None


@pytest.mark.parametrize("text", ["", "oom_kill\n", "oom_kill many\n", "max 3\n"])
def test_group_of_a_kernel_that_does_not_count_is_none(tmp_path: Path, text: str) -> None:
    text = text.replace("oom_kill\n", "under_oom 0\n")
    assert (
        group_of_this_process(machine(tmp_path, "0::/n\n", {"sys/fs/cgroup/n/memory.events": text})) is None
    )


def test_group_without_proc_is_none(tmp_path: Path) -> None:
    assert group_of_this_process(tmp_path) is None
