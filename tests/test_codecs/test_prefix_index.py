import numcodecs
import numpy as np
import pytest
from fastcheck_codecs import CodecError, PrefixIndex
from fastcheck_codecs.header import Block, read_header


def blocks(payload):
    return [entry.block for entry in read_header(payload).entries]


@pytest.mark.parametrize("dtype", ["f4", "f8", "c8", "c16"])
def test_floats_get_an_index(dtype, moments):
    data = moments[:20_000].astype({"c8": "f4", "c16": "f8"}.get(dtype, dtype)).view(dtype)
    assert blocks(PrefixIndex().encode(data)) == [Block.INDEX]
    assert blocks(PrefixIndex(9).encode(data)) == [Block.TABLE]


def test_integers_get_byte_planes():
    data = np.arange(5000)
    for codec in (PrefixIndex(), PrefixIndex(9)):
        payload = codec.encode(data)
        assert blocks(payload) == [Block.PLANES]
        assert payload.size * 3 < data.nbytes


def test_bfloat16_bits_are_seen_as_such_when_said(moments):
    bits = (moments[:50_000].view("u4") >> 16).astype("u2")
    assert blocks(PrefixIndex(dtype="bfloat16").encode(bits)) == [Block.INDEX]
    assert blocks(PrefixIndex(dtype="torch.bfloat16").encode(bits)) == [Block.INDEX]
    assert blocks(PrefixIndex().encode(bits)) == [Block.PLANES]


def test_float8_takes_the_byte_path():
    data = np.random.default_rng(0).geometric(0.3, 4000).astype("u1")
    payload = PrefixIndex(dtype="float8_e4m3fn").encode(data)
    assert blocks(payload) == [Block.PLANES]
    assert payload.size * 2 < data.size


def test_table_that_gains_nothing_falls_back_to_raw():
    data = np.random.default_rng(0).integers(0, 1 << 32, 50_000, dtype="u4").view("f4")
    assert blocks(PrefixIndex(16).encode(data)) == [Block.RAW]


def test_half_zeros_are_cheap(moments):
    data = moments[:100_000].copy()
    data[::2] = 0
    assert PrefixIndex().encode(data).size < 0.8 * data.nbytes


@pytest.mark.parametrize("bits", [6, 17, "wide", None, 8.0])
def test_prefix_bits_out_of_range_are_refused(bits):
    with pytest.raises(CodecError, match="prefix_bits"):
        PrefixIndex(bits)


def test_config_builds_the_codec_again():
    codec = PrefixIndex(9, dtype="bfloat16")
    config = codec.get_config()
    assert config == {"id": "fastcheck.prefix_index", "prefix_bits": 9, "dtype": "bfloat16"}
    again = numcodecs.get_codec(config)
    assert isinstance(again, PrefixIndex)
    assert again == codec
    assert numcodecs.get_codec({"id": "fastcheck.prefix_index"}) == PrefixIndex()
