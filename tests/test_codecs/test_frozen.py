"""The format is frozen: payloads written once by version 1 are decoded by every later version.

The files are never written again. What encodes to them is computed without random numbers, whose
streams may change between versions of numpy.
"""

from pathlib import Path

import numpy as np
import pytest
from fastcheck_codecs import PrefixIndex, XorDelta, is_delta, is_identity
from fastcheck_codecs.bitops import fingerprint
from fastcheck_codecs.header import FORMAT_VERSION, Block, read_header
from fastcheck_codecs.sections import Mode

FROZEN = Path(__file__).parent / "frozen"


def noise(count):
    """Bits of a 64-bit linear congruential generator, upper half: the same everywhere."""
    state = np.cumprod(np.full(count, 6364136223846793005, "u8")) * np.uint64(1442695040888963407)
    return (state >> np.uint64(33)).astype("<u4")


def floats(count):
    bits = noise(count)
    return ((np.uint32(120) - (bits >> np.uint32(28))) << np.uint32(23)) | (bits & np.uint32(0x807FFFFF))


def inputs():
    words = floats(1003)
    words[::50] = 0
    base = words - (noise(1003) >> np.uint32(20))
    flags = (noise(3000) % np.uint32(40) == 0).astype("u1")
    odd = words.view("u1")[:4001]
    double = (words.astype("<u8") << np.uint64(29)) | noise(1003)
    upper = (words >> np.uint32(16)).astype("<u2")
    holed = np.where(noise(5003) % np.uint32(4) == 0, np.uint32(0), floats(5003))
    return {
        "planes": (XorDelta(dtype="float32"), words),
        "sparse": (XorDelta(dtype="bool"), flags),
        "packed": (XorDelta(dtype="uint32"), (noise(2000) % np.uint32(15)) * np.uint32(0x10001)),
        "quads": (
            XorDelta(base=base, residual="difference", dtype="float32"),
            base + noise(1003) % np.uint32(3) - np.uint32(1),
        ),
        "raw": (XorDelta(dtype="uint32"), noise(300) ^ (noise(300) << np.uint32(9))),
        "zeros": (PrefixIndex(dtype="float32"), np.zeros(100, "<u4")),
        "empty": (XorDelta(dtype="float32"), np.zeros(0, "<u4")),
        "xor": (XorDelta(base=base, residual="xor", dtype="float32"), words),
        "difference": (XorDelta(base=base, residual="difference", dtype="float32"), words),
        "plain": (
            XorDelta(base=words - (noise(1003) >> np.uint32(3)), residual="difference", dtype="float32"),
            words,
        ),
        "glance": (
            XorDelta(base=np.tile(base, 20), residual="difference", dtype="float32"),
            np.tile(words, 20),
        ),
        "tail": (XorDelta(base=base.view("u1")[:4001], residual="difference", dtype="float32"), odd),
        "identity": (XorDelta(base=words, dtype="float32"), words.copy()),
        "index_float32": (PrefixIndex(dtype="float32"), words),
        "index_float64": (PrefixIndex(dtype="float64"), double),
        "index_bfloat16": (PrefixIndex(dtype="bfloat16"), upper),
        "index_float16": (PrefixIndex(dtype="float16"), (upper & np.uint16(0x8FFF)) | np.uint16(0x1000)),
        "table": (PrefixIndex(9, dtype="float32"), words),
        "holed_index": (PrefixIndex(dtype="float32"), holed),
        "holed_planes": (XorDelta(base=floats(5003) - holed, dtype="float32"), floats(5003)),
        "two_blocks": (PrefixIndex(dtype="float32"), np.tile(floats(256), 2100)[: (1 << 19) + 77]),
    }


INPUTS = inputs()


@pytest.mark.parametrize("name", INPUTS)
def test_frozen_payload_decodes_to_the_same_bits(name):
    codec, data = INPUTS[name]
    payload = (FROZEN / f"{name}.bin").read_bytes()
    assert codec.decode(payload).tobytes() == data.tobytes()
    assert payload[:5] == b"FCKZ\x01"


@pytest.mark.parametrize("name", INPUTS)
def test_encoding_today_decodes_and_names_its_version(name):
    codec, data = INPUTS[name]
    payload = codec.encode(data)
    assert codec.decode(payload).tobytes() == data.tobytes()
    assert payload[4] == FORMAT_VERSION
    frozen = (FROZEN / f"{name}.bin").read_bytes()
    assert is_delta(payload) == is_delta(frozen)
    assert is_identity(payload) == is_identity(frozen) == (name == "identity")


def test_frozen_delta_of_a_large_base_has_its_fingerprint():
    header = read_header(np.fromfile(FROZEN / "glance.bin", "u1"))
    base = np.ascontiguousarray(INPUTS["glance"][0]._base)
    assert header.base_fingerprint == fingerprint(base) != 0


def test_frozen_files_are_all_checked():
    assert {path.stem for path in FROZEN.glob("*.bin")} == set(INPUTS)


def test_frozen_files_use_every_block_kind_and_mode():
    blocks, modes = set(), set()
    for path in FROZEN.glob("*.bin"):
        payload = np.frombuffer(path.read_bytes(), "u1")
        header = read_header(payload)
        blocks |= {entry.block for entry in header.entries}
        if len(header.entries) == 1 and header.entries[0].block is Block.PLANES:
            position = 48
            while position < payload.size:
                modes.add(Mode(int(payload[position])))
                position += 8 + -(-int(payload[position + 4 : position + 8].view("<u4")[0]) // 8) * 8
    assert blocks == set(Block)
    assert modes == set(Mode)
