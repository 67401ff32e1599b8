import numpy as np
import pytest
from fastcheck_codecs import CodecError
from fastcheck_codecs.prefixes import ROW, get_index, get_table, put_index, put_table, references
from fastcheck_codecs.sections import Sink, Source

FLOATS = [("<u2", 5), ("<u2", 8), ("<u4", 8), ("<u8", 11)]


def written(put, words, **how):
    memory = np.empty(2 * words.nbytes + (1 << 18), "u1")
    sink = Sink(memory)
    before = words.tobytes()
    put(sink, words, **how)
    assert words.tobytes() == before
    return memory[: sink.position]


@pytest.mark.parametrize("count", [1, 2, 15, 16, 17, ROW - 1, ROW, ROW + 1, 3 * ROW + 5])
@pytest.mark.parametrize(("dtype", "bits"), FLOATS)
def test_index_random_bits_with_many_escapes_are_restored(dtype, bits, count):
    words = np.frombuffer(np.random.default_rng(count).bytes(count * np.dtype(dtype).itemsize), dtype)
    memory = written(put_index, words, exponent_bits=bits)
    out = np.full_like(words, 0x77)
    source = Source(memory)
    get_index(source, exponent_bits=bits, out=out)
    source.finish()
    np.testing.assert_array_equal(out, words)


def test_index_exponents_at_both_ends_are_restored():
    exponents = np.array([200] * 50 + [255, 254, 206, 205, 191, 190, 1, 0], "<u4")
    words = np.concatenate([exponents << 23, (exponents << 23) | 0x807FFFFF]).astype("<u4")
    out = np.empty_like(words)
    get_index(Source(written(put_index, words, exponent_bits=8)), exponent_bits=8, out=out)
    np.testing.assert_array_equal(out, words)


@pytest.mark.parametrize("dtype", ["u1", "u2"])
def test_references_follow_each_row_and_ignore_zeros(dtype):
    exponents = np.repeat([100, 60, 0, 200], ROW).astype(dtype)[: 3 * ROW + 10]
    exponents[::2] = 0
    assert references(exponents).tolist() == [105, 65, 5, 205]
    assert references(exponents[:0]).size == 0


@pytest.mark.parametrize("prefix_bits", range(7, 17))
@pytest.mark.parametrize("dtype", ["<u2", "<u4", "<u8"])
def test_table_every_prefix_width_is_restored(dtype, prefix_bits):
    words = np.frombuffer(np.random.default_rng(5).bytes(1001 * np.dtype(dtype).itemsize), dtype)
    out = np.full_like(words, 0x77)
    source = Source(written(put_table, words, prefix_bits=prefix_bits))
    get_table(source, prefix_bits=prefix_bits, out=out)
    source.finish()
    np.testing.assert_array_equal(out, words)


def test_table_single_prefix_needs_no_index():
    words = np.full(80_000, 0x3F800000, "<u4")
    assert written(put_table, words, prefix_bits=16).size < 100


@pytest.mark.parametrize("entries", [0, 513, 2**31])
def test_table_of_impossible_size_is_refused(entries):
    words = np.frombuffer(np.random.default_rng(5).bytes(2000), "<u2")
    memory = written(put_table, words, prefix_bits=9)
    memory[:4] = np.frombuffer(np.uint32(entries).tobytes(), "u1")
    with pytest.raises(CodecError):
        get_table(Source(memory), prefix_bits=9, out=np.empty_like(words))


def test_table_index_behind_its_end_is_refused():
    words = np.array([0x0000, 0x4000, 0x8000] * 100, "<u2")
    memory = written(put_table, words, prefix_bits=7)
    memory[16:92] = 0xFF
    with pytest.raises(CodecError, match="behind"):
        get_table(Source(memory), prefix_bits=7, out=np.empty_like(words))
