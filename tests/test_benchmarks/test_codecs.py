import sys

import numpy as np
import pytest

from benchmarks import checkpoints
from benchmarks.codec_cases import Case, Kind, Pair

# The coders of others are an extra of their own.
codecs = pytest.importorskip("benchmarks.codecs")
codec_coders = pytest.importorskip("benchmarks.codec_coders")
codec_processes = pytest.importorskip("benchmarks.codec_processes")


@pytest.mark.parametrize(
    ("kind", "dtype", "word"),
    [(Kind.WEIGHTS, "float32", np.uint32), (Kind.WEIGHTS_BF16, "bfloat16", np.uint16)],
)
def test_coders_return_the_very_bits_again_and_again(kind, dtype, word):
    rng = np.random.default_rng(1)
    base = rng.integers(0, 1 << 16, 70_000).astype(word)
    pair = Pair(base + rng.integers(0, 5, base.size).astype(word), base)
    kept = pair.current.copy(), pair.base.copy()
    coders = codec_coders.coders(pair, kind, dtype)
    assert {"delta", "index", "memcpy", "as saved", "ZipNN / xor"} <= {coder.name for coder in coders}
    for coder in coders:
        for _ in range(2):
            coder.prepare()
            assert np.array_equal(coder.decode(coder.encode()), kept[0]), coder.name
    assert np.array_equal(pair.current, kept[0])
    assert np.array_equal(pair.base, kept[1])


class Broken(codec_coders.Memcpy):
    name = "broken"

    def decode(self, payload):
        words = super().decode(payload)
        words[-1] ^= 1
        return words


def run_main(monkeypatch, cache, *arguments):
    monkeypatch.setattr(sys, "argv", ["codecs", "--no-training", "--cache", str(cache), *arguments])
    monkeypatch.setattr(codecs, "keep_memory", lambda: None)
    monkeypatch.setattr(codec_processes, "measure", lambda runs: None)
    return codecs.main()


def test_main_broken_round_trip_fails(monkeypatch, cached_run, capsys):
    monkeypatch.setattr(codecs, "coders", lambda pair, kind, dtype: [Broken(pair)])
    assert run_main(monkeypatch, cached_run(), "*/late/10") == 1
    assert "broken on vgg_sgd/weights/late/10" in capsys.readouterr().out


def test_main_goals_missed_succeeds(monkeypatch, cached_run):
    assert run_main(monkeypatch, cached_run("resnet_sgd", count=5000), "*/late/10", "--rounds", "1") == 0


@pytest.mark.slow
def test_processes_encode_all_chunks(monkeypatch, cached_run):
    monkeypatch.setattr(codec_processes, "_ROUNDS", 1)
    run = checkpoints.find("vgg_sgd", cached_run(count=2 << 20))
    scaling = codec_processes.measure([run])
    assert scaling.case == Case("vgg_sgd", "weights", "early", 10)
    assert scaling.one > 0
    assert scaling.cpu_gain > 0
