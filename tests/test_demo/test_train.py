from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastcheck_dask.demo.train import digest_of

torch = pytest.importorskip("torch")
pytest.importorskip("sklearn")

#: Trains four steps, and the last of them once more after another training was restored to the third.
CODE = """
import copy, sys
from fastcheck_dask.demo.train import prepare
training = prepare(sys.argv[1], seed=5, quick=True)
for _ in range(3):
    training.step()
state = copy.deepcopy(training.state())
print(training.digests())
training.step()
print(training.digests())
training = prepare(sys.argv[1], seed=99, quick=True)
training.restore(state)
training.step()
print(training.digests())
"""


@pytest.mark.slow
@pytest.mark.parametrize("model", ["vgg", "gpt"])
def test_training_restored_goes_on_bit_for_bit(model):
    # In a process of its own, because it changes torch's settings; one, because torch takes long to import.
    command = [sys.executable, "-c", CODE, model]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    third, fourth, restored = done.stdout.splitlines()
    assert "weights" in fourth
    assert restored == fourth
    assert third != fourth


def test_training_that_is_to_be_killed_goes_no_further_however_late_that_comes(tmp_path):
    arguments = ["--model", "vgg", "--quick", "--steps", "14", "--seed", "5", "--save-every", "2"]
    places = ["--checkpoint-dir", str(tmp_path / "ckpts"), "--local-dir", str(tmp_path / "local")]
    command = [sys.executable, "-m", "fastcheck_dask.demo.train", *arguments, *places, "--stay-at", "5"]
    told = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            told.append(json.loads(line))
            # Much longer than a step takes.
            if (told[-1].get("tag"), told[-1].get("level")) == ("step0004", "object"):
                process.kill()
    assert [event["step"] for event in told if event["event"] == "step"] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.tensor([0.0]), torch.tensor([-0.0])),
        (torch.zeros(2), torch.zeros(2, 1)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
        ([1, [2]], [[1], 2]),
        ({"a": 1}, {"b": 1}),
        ((1,), [1]),
        (1, True),
        (1, 1.0),
        (0.0, -0.0),
    ],
)
def test_digest_of_what_differs_differs(one, other):
    assert digest_of(one) != digest_of(other)


@given(st.lists(st.floats(allow_nan=False)))
def test_digest_of_equal_tensors_is_equal(values):
    one = torch.tensor(values, dtype=torch.float64)
    strided = torch.stack([one, one], dim=1)[:, 0]
    assert digest_of({"x": one}) == digest_of({"x": strided})
