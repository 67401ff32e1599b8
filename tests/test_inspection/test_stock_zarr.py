"""Stock zarr reads every tensor, in a process that knows nothing but the codecs."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest
import torch

from fastcheck_dask.inspection import open_checkpoint

_READER = """
import hashlib, json, os, sys, zarr

def opened(where, endpoint):
    if endpoint is None:
        return where
    from obstore.store import S3Store
    from zarr.storage import ObjectStore
    options = {"config": {"endpoint": endpoint}, "client_options": {"allow_http": True}}
    return ObjectStore(S3Store("checkpoints", prefix=where, **options), read_only=True)

where, endpoint, consolidated = json.loads(sys.argv[1])
group = zarr.open_group(opened(where, endpoint), mode="r", use_consolidated=consolidated)
arrays = {name: found for name, found in group.members(max_depth=None) if hasattr(found, "dtype")}
print(json.dumps({
    name: [a.attrs["fastcheck"]["dtype"], hashlib.sha256(a[...].tobytes()).hexdigest()]
    for name, a in arrays.items()
}))
print(json.dumps([name for name in ("fastcheck_dask", "torch", "dask") if name in sys.modules]), flush=True)
os._exit(0)  # obstore's asynchronous calls, which zarr makes, may abort an interpreter that winds down
"""


def read_by_zarr(location: str, directory: str, *, consolidated: bool):
    """Return what zarr sees, by array: true dtype, digest of the values."""
    parts = urlsplit(location)
    endpoint = parse_qs(parts.query).get("endpoint", [None])[0]
    where = f"{parts.path.strip('/') if endpoint else location}/{directory}"
    done = subprocess.run(
        [sys.executable, "-c", _READER, json.dumps([where, endpoint, consolidated])],
        capture_output=True, text=True, env=dict(os.environ), check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    arrays, modules = map(json.loads, done.stdout.splitlines()[-2:])
    assert modules == []
    return arrays


def state(step: int):
    weights = torch.randn(50, 70, generator=torch.Generator().manual_seed(step))
    found = {
        "w": weights,
        "half": weights.bfloat16(),
        "eighth": weights.to(torch.float8_e4m3fn),
        "flags": weights > 0,
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "text": np.array(["ab", "cde"] * 99),
        "big": np.arange(300, dtype=">f4"),
        "complex": np.arange(200, dtype=np.complex64),
        "inline": np.int16([1, -2, 3]),
    }
    return {"model": found | ({"added": weights * 2} if step > 1 else {}), "step": step}


@pytest.mark.parametrize("consolidated", [True, False])
def test_every_tensor_is_read_and_new_ones_are_not_hidden(location, checkpoints, consolidated):
    checkpoints.save(location, "t1", generation=1, state=state(1))
    checkpoints.save(location, "t2", generation=2, state=state(2))
    for directory in ("00000001-t1", "00000002-t2"):
        seen = read_by_zarr(location, directory, consolidated=consolidated)
        wanted = open_checkpoint(location, directory)
        assert set(seen) == set(wanted)
        assert ("model/added" in seen) == (directory == "00000002-t2")
        for name, (dtype, digest) in seen.items():
            values = wanted[name].numpy()
            assert dtype == wanted[name].dtype
            assert digest == hashlib.sha256(values.tobytes()).hexdigest(), name
