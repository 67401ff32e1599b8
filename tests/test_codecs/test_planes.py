import numpy as np
import pytest
from fastcheck_codecs import CodecError
from fastcheck_codecs.planes import get_plane, get_planes, put_plane, put_planes, survey
from fastcheck_codecs.sections import Mode, NoRoomError, Section, Sink, Source
from hypothesis import given
from hypothesis import strategies as st
from numcodecs import zstd

RNG = np.random.default_rng(3)
SPARSE = np.where(RNG.random(5000) < 0.03, 200, 0).astype("u1")
PLANES = {
    Mode.ELIDED: np.zeros(5000, "u1"),
    Mode.RAW: RNG.integers(0, 256, 5000, dtype="u1"),
    Mode.SPARSE: SPARSE,
    Mode.ENTROPY: RNG.geometric(0.07, 5000).astype("u1"),
    Mode.QUADS: np.where(RNG.random(5000) < 0.01, 9, RNG.integers(-1, 2, 5000)).astype("i1").view("u1"),
    Mode.NIBBLES: (RNG.standard_normal(5000) * 3).astype("i1").view("u1"),
}


def stored(plane):
    memory = np.empty(plane.size + 64, "u1")
    sink = Sink(memory)
    put_plane(sink, plane)
    return Source(memory[: sink.position]).section()


@pytest.mark.parametrize("mode", PLANES)
def test_plane_mode_suits_the_data_and_is_restored(mode):
    plane = PLANES[mode]
    section = stored(plane)
    assert section.mode is mode
    assert section.data.size < plane.size + (mode is Mode.RAW)
    room = np.full_like(plane, 99)
    np.testing.assert_array_equal(get_plane(section, room=room), plane)


def test_plane_of_small_unsigned_values_is_packed_from_zero_on():
    plane = RNG.integers(0, 15, 5000).astype("u1")
    assert stored(plane)[:2] == (Mode.NIBBLES, 0)


@pytest.mark.parametrize("places", [[0], [4999], [255], [256], [257], [511, 512, 1024], [0, 600, 4999]])
def test_plane_sparse_gaps_of_any_width_are_restored(places):
    plane = np.zeros(5000, "u1")
    plane[places] = 7
    section = stored(plane)
    assert section.mode is Mode.SPARSE
    np.testing.assert_array_equal(get_plane(section, room=np.empty_like(plane)), plane)


@given(st.sampled_from([1, 3, 15, 16]), st.integers(64, 400), st.floats(0, 1), st.integers(0, 9))
def test_plane_any_spread_is_restored(spread, count, zeros, seed):
    rng = np.random.default_rng(seed)
    plane = rng.integers(-spread, spread + 1, count).astype("i1").view("u1")
    plane[rng.random(count) < zeros] = 0
    np.testing.assert_array_equal(get_plane(stored(plane), room=np.full_like(plane, 9)), plane)


@pytest.mark.parametrize("count", [4000, 4900, 5100, 9000])
@pytest.mark.parametrize("mode", [mode for mode in PLANES if mode is not Mode.SPARSE])
def test_plane_of_another_size_is_refused(mode, count):
    section = stored(PLANES[mode])
    if mode is Mode.ELIDED:
        section = Section(mode, 0, np.zeros(8, "u1"))
    with pytest.raises(CodecError):
        get_plane(section, room=np.empty(count, "u1"))


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
        get_plane(Section(Mode.ENTROPY, 0, np.frombuffer(frame, "u1")), room=np.empty(5000, "u1"))


@pytest.mark.parametrize("mode", [Mode.SPARSE, Mode.QUADS, Mode.NIBBLES])
def test_listed_lengths_that_do_not_fit_are_refused(mode):
    section = stored(PLANES[mode])
    for place in range(8):
        broken = section.data.copy()
        broken[place] ^= 0x41
        with pytest.raises(CodecError):
            get_plane(section._replace(data=broken), room=np.empty(5000, "u1"))


def test_sparse_position_behind_the_end_is_refused():
    plane = np.zeros(5000, "u1")
    plane[4990:5000:3] = 1
    with pytest.raises(CodecError, match="with one at"):
        get_plane(stored(plane), room=np.empty(4995, "u1"))


def test_escapes_that_are_not_all_listed_are_refused():
    plane = PLANES[Mode.QUADS].copy()
    section = stored(plane)
    plane[100:110] = 200
    other = stored(plane)
    data = other.data.copy()
    data[:4] = section.data[:4]
    with pytest.raises(CodecError):
        get_plane(other._replace(data=data), room=np.empty(5000, "u1"))


def test_survey_of_noise_and_of_a_constant():
    low, high = survey(RNG.integers(0, 256, 70_000).astype("u2"))
    assert low.collisions == pytest.approx(1 / 256, rel=0.05)
    assert low.packing is None
    assert (high.collisions, high.packing) == (1, (Mode.QUADS, 255))
    assert survey(np.array([5], "u4"))[1].collisions == 0


def test_sink_full_raises_before_writing():
    memory = np.full(64, 7, "u1")
    with pytest.raises(NoRoomError):
        Sink(memory[:32]).section(Mode.RAW, 30)
    assert (memory[32:] == 7).all()


@given(
    st.sampled_from(["u1", "<u2", "<u4", "<u8"]),
    st.integers(1, 300),
    st.integers(0, 63),
    st.integers(0, 9),
    st.booleans(),
)
def test_planes_any_words_are_restored(dtype, count, shift, seed, signed):
    dtype = np.dtype(dtype)
    words = np.random.default_rng(seed).integers(0, 256, count * dtype.itemsize, dtype="u1").view(dtype)
    words = words >> dtype.type(shift % (8 * dtype.itemsize))
    if signed:
        words[::2] = -words[::2]
    before = words.tobytes()
    memory = np.empty(words.nbytes + 256, "u1")
    sink = Sink(memory)
    put_planes(sink, words, signed=signed)
    assert words.tobytes() == before
    out = np.full_like(words, 0x55)
    source = Source(memory[: sink.position])
    get_planes(source, out=out, signed=signed)
    source.finish()
    np.testing.assert_array_equal(out, words)
