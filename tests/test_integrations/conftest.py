"""What the tests of the integrations share."""

from __future__ import annotations

import importlib.util
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

SCRIPT = Path(__file__).with_name("trainer_process.py")


@pytest.fixture(scope="session")
def trainer() -> Iterator[ModuleType]:
    """Return the module of small trainings, which is also a script."""
    spec = importlib.util.spec_from_file_location("trainer_process", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(autouse=True)
def same_threads_and_generators() -> Iterator[None]:
    """One thread, known generators, and both as they were afterwards."""
    threads = torch.get_num_threads()
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    torch.set_num_threads(1)
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    torch.set_num_threads(threads)
