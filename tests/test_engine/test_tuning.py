"""Tuning on the checkpoints of a network that was really trained."""

from __future__ import annotations

import io
import itertools
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from fastcheck_codecs import PrefixIndex
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from torch import nn

from fastcheck_dask.engine import tuning, tuning_plot, tuning_report
from fastcheck_dask.engine.derive import as_cast
from fastcheck_dask.engine.encode import digest
from fastcheck_dask.errors import CheckpointNotFoundError, ConfigError, CorruptDataError, UnrecoverableError
from fastcheck_dask.ids import directory_name
from fastcheck_dask.layout.chunks import ArraySpec, Chunk
from fastcheck_dask.layout.leaves import copy_bits
from fastcheck_dask.layout.manifest import Manifest
from fastcheck_dask.layout.state import flatten
from fastcheck_dask.tiers.checkpoint_folder import CheckpointFolder
from fastcheck_dask.tiers.object_store import open_store


def publish(folder, generation, tag, state, *, casts=()):
    """Commit a state, encoded as a save without nodes does it; `casts` are those of array "m"."""
    flat = flatten(state, chunk_bytes=64 * 1024)
    by_path = {spec.path: spec for spec in flat.arrays}
    arrays = tuple(as_cast(s, by_path["m"]) if s.path in casts else s for s in flat.arrays)
    directory, digests = directory_name(generation, tag), {}
    for spec, source in zip(arrays, flat.sources, strict=True):
        bits = np.empty(spec.nbytes, np.uint8)
        copy_bits(source, bits)
        for chunk in spec.chunks:
            raw = bits[chunk.offset : chunk.offset + chunk.nbytes]
            digests[chunk.key] = digest(raw)
            folder.write_chunk(directory, chunk.key, PrefixIndex(dtype=chunk.dtype).encode(raw))
    manifest = Manifest("run", generation, tag, f"token-{generation}", 1.5, flat.tree, arrays, digests)
    folder.write_metadata(manifest)
    folder.publish(manifest)
    return directory


def train(steps):
    """Yield the losses and the states of a small classifier under AdamW."""
    torch.manual_seed(0)
    points = torch.randn(512, 64)
    classes = (points[:, :8].sum(1) > 0).long()
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for _ in range(steps):
        loss = nn.functional.cross_entropy(model(points), classes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "seen": torch.arange(500)}
        yield loss.item(), state


def folder_at(path):
    return CheckpointFolder(open_store(str(path)))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with three checkpoints of one training; the last two are one step apart."""
    where = tmp_path_factory.mktemp("trained")
    losses = []
    for step, (loss, state) in enumerate(train(40), 1):
        losses.append(loss)
        if step in (10, 39, 40):
            publish(folder_at(where), {10: 1, 39: 2, 40: 3}[step], f"step{step}", state)
    assert losses[-1] < losses[0] / 2, "not a training"
    return where


@pytest.fixture(scope="module")
def found(trained: Path) -> tuning.Tuning:
    return tuning.tune(folder_at(trained))


def test_tune_newest_measures_every_kind_against_the_one_before(found):
    assert (found.generation, found.tag, found.before) == (3, "step40", "step39")
    assert [curve.kind for curve in found.curves] == ["weights", "momenta", "second moments"]
    for curve in found.curves:
        assert list(curve.prefix) == [*range(7, 17), "auto"]
        assert list(curve.delta) == ["whole", "xor", "difference", "auto"]
        assert curve.sampled_bytes == curve.total_bytes == curve.prefix["auto"].raw_bytes
        for measured in (*curve.prefix.values(), *curve.delta.values()):
            assert 0 < measured.encoded_bytes <= 1.001 * measured.raw_bytes + 64 * 20
            assert measured.encode_seconds > 0
            assert measured.decode_seconds > 0
    assert found.other_bytes == 500 * 8


def test_tune_trained_weights_are_smallest_as_delta_and_momenta_by_auto(found):
    weights, momenta, _ = found.curves
    smallest = min(weights.delta, key=lambda name: weights.delta[name].encoded_bytes)
    assert smallest != "whole"
    assert weights.sent_as_delta_bytes > weights.sampled_bytes / 2
    assert momenta.prefix["auto"].ratio > 1.1
    best = momenta.best_prefix_bits
    assert all(
        momenta.prefix[best].encoded_bytes <= momenta.prefix[bits].encoded_bytes for bits in range(7, 17)
    )
    assert sum(momenta.auto_blocks.values()) > 0.99 * momenta.sampled_bytes


def test_tune_oldest_by_tag_has_nothing_before(trained):
    found = tuning.tune(folder_at(trained), tag="step10")
    assert (found.generation, found.before) == (1, None)
    assert all(not curve.delta for curve in found.curves)


def test_tune_sample_is_bounded_and_taken_of_every_kind(trained):
    found = tuning.tune(folder_at(trained), tag="step10", sample_bytes=96 * 1024)
    assert sum(curve.sampled_bytes for curve in found.curves) <= 96 * 1024
    assert all(curve.sampled_bytes > 8 * 1024 for curve in found.curves)


def test_tune_reads_only(trained):
    def files():
        return {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in trained.rglob("*")}

    before = files()
    tuning.tune(folder_at(trained), sample_bytes=64 * 1024)
    assert files() == before


@pytest.mark.parametrize("tag", [None, "x"])
def test_tune_empty_folder_says_there_is_none(tmp_path, tag):
    with pytest.raises(CheckpointNotFoundError, match="no committed checkpoint"):
        tuning.tune(folder_at(tmp_path), tag=tag)


def test_tune_unknown_tag_names_the_others(trained):
    with pytest.raises(CheckpointNotFoundError, match="step40, step39, step10"):
        tuning.tune(folder_at(trained), tag="step41")


def test_tune_without_floats_says_so(tmp_path):
    publish(folder_at(tmp_path), 1, "t", {"n": np.arange(1000)})
    with pytest.raises(UnrecoverableError, match="no tensors of floats"):
        tuning.tune(folder_at(tmp_path))


def test_tune_too_small_sample_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="64 bytes"):
        tuning.tune(folder_at(tmp_path), sample_bytes=10)


@pytest.mark.parametrize("swap", [False, True])
def test_tune_damaged_chunk_is_an_error_that_names_it(tmp_path, swap):
    folder = folder_at(tmp_path)
    rng = np.random.default_rng(0)
    directory = publish(folder, 1, "t", {"a": rng.normal(size=900), "b": rng.normal(size=900)})
    path, other = (tmp_path / directory / name / "c" / "0" for name in "ab")
    data = bytearray(other.read_bytes() if swap else path.read_bytes())
    if not swap:
        data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptDataError, match="a/c/0"):
        tuning.tune(folder)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.complex64])
def test_tune_any_float_dtype_is_measured(tmp_path, dtype):
    folder = folder_at(tmp_path)
    values = torch.randn(3000, generator=torch.Generator().manual_seed(0)).to(dtype)
    for generation in (1, 2):
        publish(folder, generation, f"t{generation}", {"w": values + (generation - 1) * 1e-3})
    (curve,) = tuning.tune(folder).curves
    assert curve.total_bytes == values.nbytes
    assert curve.delta["auto"].encoded_bytes <= 1.25 * min(m.encoded_bytes for m in curve.delta.values())


def test_tune_dtypes_of_one_kind_are_measured_apart(tmp_path):
    folder = folder_at(tmp_path)
    values = torch.randn(3000, generator=torch.Generator().manual_seed(0))
    publish(folder, 1, "t", {"master": values, "model": {"w": values.bfloat16()}})
    curves = tuning.tune(folder).curves
    assert [curve.name for curve in curves] == ["weights, bfloat16", "weights, float32"]
    assert [curve.total_bytes for curve in curves] == [6000, 12_000]


def test_tune_tensor_of_another_shape_before_has_no_delta(tmp_path):
    folder = folder_at(tmp_path)
    for generation in (1, 2):
        publish(folder, generation, f"t{generation}", {"w": np.linspace(0, 1, 1000 * generation)})
    found = tuning.tune(folder)
    assert (found.before, found.curves[0].delta) == (None, {})


def test_measure_codec_that_changes_a_bit_is_an_error():
    class Wrong(PrefixIndex):
        def decode(self, buf, out=None):
            found = super().decode(buf, out)
            out[7] ^= 1
            return found

    sample = tuning._Sample("w", "float32", np.ones(100, np.float32).view(np.uint8), None)
    with pytest.raises(CorruptDataError, match=r"w: .*did not give back"):
        tuning.measure([sample], lambda _: Wrong())


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("model/layers.0.weight", "weights"),
        ("model/v", "weights"),
        ("optimizer/state/0/exp_avg", "momenta"),
        ("optimizer/state/0/momentum_buffer", "momenta"),
        ("opt/3/exp_avg_sq", "second moments"),
        ("opt_state/v/dense/kernel", "second moments"),
        ("exp_avg", "weights"),
    ],
)
def test_kind_of_path(path, kind):
    assert tuning.kind_of(path) == kind


@given(st.lists(st.integers(1, 20_000_000), min_size=1, max_size=60), st.integers(64, 2**27))
def test_spread_any_sizes_keeps_to_the_budget_and_takes_something(sizes, budget):
    chunks = [Chunk(f"w/c/{n}", "w", "float64", 0, 8 * size) for n, size in enumerate(sizes)]
    pieces = tuning.spread(chunks, budget)
    assert pieces
    assert sum(stop - start for _, start, stop in pieces) <= budget
    assert all(0 <= start < stop <= chunk.nbytes and start % 64 == 0 for chunk, start, stop in pieces)
    assert len({chunk.key for chunk, _, _ in pieces}) == len(pieces)


def test_spread_tight_budget_takes_from_all_over():
    chunks = ArraySpec("w", "uint8", (100 * 2**20,), (2**20,)).chunks
    taken = [int(chunk.key.split("/")[-1]) for chunk, _, _ in tuning.spread(chunks, 10 * 2**20)]
    assert len(taken) == 16
    assert {later - earlier for earlier, later in itertools.pairwise(taken)} == {6, 7}


def test_show_names_the_best_prefix_and_what_auto_took(found):
    console = Console(record=True, width=200, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        tuning_report.show(console, found)
        text = console.export_text()
    for curve in found.curves:
        assert re.search(rf"Best P for {curve.name}: {curve.best_prefix_bits} \(ratio \d\.\d+\)", text)
    assert "XorDelta on weights, float32 against step39" in text
    assert len(re.findall(r"^ +auto +\d+\.\d{3} +\d+\.\d\d +\d+\.\d\d", text, re.MULTILINE)) == 6


def test_tune_casts_are_measured_and_said_not_to_be_sent(tmp_path):
    master = torch.randn(40_000, generator=torch.Generator().manual_seed(1))
    state = {"m": master, "w": master.bfloat16(), "other": (master * 2).bfloat16()}
    publish(folder_at(tmp_path), 1, "t", state, casts={"w"})
    found = tuning.tune(folder_at(tmp_path), sample_bytes=2**16)
    assert found.derived_bytes == 80_000
    assert {curve.dtype: curve.total_bytes for curve in found.curves} == {
        "float32": 160_000,
        "bfloat16": 160_000,
    }
    console = Console(record=True, width=200, file=io.StringIO())
    tuning_report.show(console, found)
    assert "0.1 MB are casts of float32 tensors" in console.export_text()


def test_draw_makes_a_png(found, tmp_path):
    tuning_plot.draw(tmp_path / "curve.png", found)
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
