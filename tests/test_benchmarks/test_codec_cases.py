import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from benchmarks import checkpoints, codec_cases
from benchmarks.codec_cases import Case, Feed, Kind, Pair


@pytest.mark.parametrize("feed", list(Feed))
@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
@given(data=st.data())
def test_restore_undoes_residual(feed, dtype, data):
    current, base = (data.draw(arrays(dtype, 9)) for _ in range(2))
    stored = codec_cases.residual(feed, Pair(current, base), out=np.zeros_like(current)).copy()
    got = codec_cases.restore(feed, stored, base, out=np.zeros_like(current))
    assert np.array_equal(got, current)


def test_residual_longer_than_a_part_covers_all_parts():
    base = np.arange(300_000, dtype=np.uint32)
    got = codec_cases.residual(Feed.DIFFERENCE, Pair(base - 3, base), out=np.zeros_like(base))
    assert set(got) == {5}


def test_bound_of_noise_is_one_and_of_small_changes_is_more():
    rng = np.random.default_rng(1)
    base = rng.integers(0, 1 << 32, 200_000, np.uint32)
    noise = rng.integers(0, 1 << 32, 200_000, np.uint32)
    assert codec_cases.bound(Pair(noise, base)) == pytest.approx(1, abs=0.01)
    # The low byte is noise, the three above never change.
    assert codec_cases.bound(Pair(base ^ (noise & 255), base)) == pytest.approx(4, abs=0.05)


def test_load_large_state_returns_a_spread_sample(cached_run):
    found = checkpoints.find("vgg_sgd", cached_run(count=5 << 20))
    pair = codec_cases.load(Case("vgg_sgd", "weights", "early", 100), found)
    assert pair.current.nbytes == codec_cases.SAMPLE_NBYTES
    assert set(np.unique(pair.current ^ pair.base)) == {100}
    whole = found.load("early", 0, "weights").view(np.uint32)
    assert pair.base[0] == whole[0]
    assert pair.base[-1] == whole[-1]


def test_load_small_state_returns_all_of_it(cached_run):
    found = checkpoints.find("vgg_sgd", cached_run())
    assert codec_cases.load(Case("vgg_sgd", "weights", "late", 1), found).current.size == 4


def test_split_has_held_out_cases_of_each_kind():
    fields = {"weights": Kind.WEIGHTS, "weights_bf16": Kind.WEIGHTS_BF16, "exp_avg_sq": Kind.SECOND_MOMENT}
    for field, kind in fields.items():
        case = Case("gpt_bf16", field, "late", 10)
        assert case.kind is kind
        assert not case.is_tuned
    assert Case("gpt_fp32", "weights", "late", 10).is_tuned
    assert not Case("gpt_fp32", "weights", "early", 10).is_tuned


def test_of_run_gives_every_interval_of_weights(cached_run):
    found = checkpoints.find("vgg_sgd", cached_run())
    names = [case.name for case in codec_cases.of_run(found)]
    assert names[0] == "vgg_sgd/weights/early/1"
    assert len(names) == 6
