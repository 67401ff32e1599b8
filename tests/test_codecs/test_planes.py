import numpy as np
import pytest
from fastcheck_codecs import CodecError
from fastcheck_codecs.planes import (
    Mode,
    NoRoomError,
    Sink,
    Source,
    get_plane,
    get_planes,
    put_plane,
    put_planes,
)
from hypothesis import given
from hypothesis import strategies as st
from numcodecs import zstd

RNG = np.random.default_rng(3)
SPARSE = np.where(RNG.random(5000) < 0.03, 200, 0).astype("u1")
PLANES = {
    Mode.ELIDED: np.zeros(5000, "u1"),
    Mode.RAW: RNG.integers(0, 256, 5000, dtype="u1"),
    Mode.SPARSE: SPARSE,
    Mode.ENTROPY: RNG.geometric(0.2, 5000).astype("u1"),
}


def stored(plane):
    memory = np.empty(plane.size + 64, "u1")
    sink = Sink(memory)
    put_plane(sink, plane)
    return Source(memory[: sink.position]).section()


@pytest.mark.parametrize("mode", PLANES)
def test_plane_mode_suits_the_data_and_is_restored(mode):
    plane = PLANES[mode]
    got, data = stored(plane)
    assert got is mode
    out = np.full_like(plane, 99)
    get_plane(got, data, out=out)
    np.testing.assert_array_equal(out, plane)


@pytest.mark.parametrize("mode", PLANES)
def test_plane_of_another_size_is_refused(mode):
    got, data = stored(PLANES[mode])
    if mode is Mode.ELIDED:
        data = np.zeros(8, "u1")
    with pytest.raises(CodecError):
        get_plane(got, data, out=np.empty(4999 if mode is not Mode.SPARSE else 4900, "u1"))


@pytest.mark.parametrize(
    "frame",
    [
        zstd.compress(bytes(1 << 20), 1),
        zstd.compress(bytes(5000), 1)[:-2],
        b"\x28\xb5\x2f\xfd",
        b"\x28\xb5\x2f\xfd\x00\x58\x01\x00\x00",
        zstd.compress(bytes(4999), 1),
        b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd",
    ],
    ids=["bomb", "cut", "magic alone", "no size", "too small", "skippable"],
)
def test_zstd_frame_not_of_exact_size_is_refused(frame):
    with pytest.raises(CodecError):
        get_plane(Mode.ENTROPY, np.frombuffer(frame, "u1"), out=np.empty(5000, "u1"))


def test_sparse_lengths_that_do_not_fit_are_refused():
    _, data = stored(SPARSE)
    for place in range(8):
        broken = data.copy()
        broken[place] ^= 0x41
        with pytest.raises(CodecError):
            get_plane(Mode.SPARSE, broken, out=np.empty(5000, "u1"))


def test_sink_full_raises_before_writing():
    memory = np.full(64, 7, "u1")
    with pytest.raises(NoRoomError):
        Sink(memory[:32]).section(Mode.RAW, 30)
    assert (memory[32:] == 7).all()


@given(
    st.sampled_from(["u1", "<u2", "<u4", "<u8"]), st.integers(1, 300), st.integers(0, 63), st.integers(0, 9)
)
def test_planes_any_words_are_restored(dtype, count, shift, seed):
    dtype = np.dtype(dtype)
    words = np.random.default_rng(seed).integers(0, 256, count * dtype.itemsize, dtype="u1").view(dtype)
    words = words >> dtype.type(shift % (8 * dtype.itemsize))
    before = words.tobytes()
    memory = np.empty(words.nbytes + 256, "u1")
    sink = Sink(memory)
    put_planes(sink, words)
    assert words.tobytes() == before
    out = np.full_like(words, 0x55)
    source = Source(memory[: sink.position])
    get_planes(source, out=out)
    source.finish()
    np.testing.assert_array_equal(out, words)
