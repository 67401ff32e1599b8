"""Makes the benchmarks importable, which are not installed, and fakes what they read."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import checkpoints


def _losses(first, last):
    return np.linspace(first, last, checkpoints.STEPS).tolist()


@pytest.fixture
def cached_run(tmp_path):
    """Write a run into a cache: four weights of which all change by 1 bit, and a loss from 2 to `last`."""

    def write(name="vgg_sgd", *, last=0.5, count=4):
        folder = tmp_path / f"{name}-{checkpoints.RUNS[name].key}"
        folder.mkdir()
        values = np.random.default_rng(1).standard_normal(count).astype(np.float32)
        for phase in checkpoints.PHASES:
            for after in (0, *checkpoints.INTERVALS):
                changed = (values.view(np.uint32) ^ np.uint32(after)).view(np.float32)
                np.save(folder / f"{phase}_{after}_weights.npy", changed)
        report = {
            "losses": _losses(2.0, last),
            "uniform": 2.3,
            "parameters": count,
            "recipe": {"optimizer": "sgd"},
        }
        (folder / "run.json").write_text(json.dumps(report))
        return tmp_path

    return write
