"""What the README prints has to run as printed."""

import re
import subprocess
import sys
from pathlib import Path

import zarr

from fastcheck_dask.ids import run_id_for

README = Path(__file__).parent.parent / "README.md"


def example() -> str:
    found = re.search(r"<!-- tested: example -->\n```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert found
    return found[1]


def test_example_run_twice_goes_on_where_it_stopped(tmp_path):
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", example()],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    ckpts = tmp_path / "ckpts"
    assert sorted(p.name for p in ckpts.iterdir() if p.name != ".fastcheck") == [
        "00000001-step_1",
        "00000002-step_2",
    ]
    first, second = (
        zarr.open_group(ckpts / name, mode="r") for name in ("00000001-step_1", "00000002-step_2")
    )
    assert (first["model/weight"][:] != second["model/weight"][:]).any()
    assert list(Path("/dev/shm").glob(f"fastcheck-*/{run_id_for(str(ckpts))}")) == []


def test_example_fits_on_fifteen_lines():
    assert len(example().splitlines()) <= 15
