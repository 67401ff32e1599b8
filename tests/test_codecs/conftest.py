"""Data that resembles training state, from fixed seeds."""

import numpy as np
import pytest


@pytest.fixture(scope="session")
def weights():
    """Two generations of float32 weights, a little over two blocks."""
    rng = np.random.default_rng(1)
    base = (rng.standard_normal(600_001) * 0.02).astype(np.float32)
    return base, base + (rng.standard_normal(base.size) * 1e-4).astype(np.float32)


@pytest.fixture(scope="session")
def moments():
    """An optimizer moment whose scale changes from row to row; float32, a little over two blocks."""
    rng = np.random.default_rng(2)
    scale = np.exp2(rng.integers(-5, 0, 600_001 // 1000 + 1)).repeat(1000)[:600_001]
    return (rng.standard_normal(600_001) * scale).astype(np.float32)
