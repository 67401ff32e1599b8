import collections
import dataclasses
import datetime
import decimal
import enum
import json
import math
import pathlib
import struct
import uuid
import zoneinfo

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from fastcheck_dask.errors import CorruptDataError, UnknownFormatError, UnsupportedLeafError
from fastcheck_dask.layout import leaves, values

ENCODERS = values.encoders(torch)
ZONES = st.one_of(
    st.none(),
    st.builds(
        datetime.timezone,
        st.timedeltas(datetime.timedelta(hours=-23), datetime.timedelta(hours=23)),
    ),
    st.just(datetime.timezone(datetime.timedelta(hours=1), "CET")),
)
SCALARS = st.one_of(
    *(npst.from_dtype(np.dtype(code)) for code in "?bBhHiIlLefdFD"),
    npst.from_dtype(np.dtype("<M8[ns]")),
    npst.from_dtype(np.dtype("<m8[s]")),
    npst.from_dtype(np.dtype("<U4")),
    npst.from_dtype(np.dtype("|S4")),
)
TEXT = st.text(st.characters(codec=None), max_size=20)
PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**80), 2**80),
    st.floats(),
    st.complex_numbers(),
    TEXT,
    st.binary(max_size=20),
    st.binary(max_size=20).map(bytearray),
    SCALARS,
    st.datetimes(timezones=ZONES),
    st.times(timezones=ZONES),
    st.dates(),
    st.timedeltas(),
    st.uuids(),
    st.builds(range, st.integers(-9, 9), st.integers(-9, 9), st.integers(1, 3)),
    st.builds(slice, st.none() | st.integers(), st.none() | st.integers(), st.none() | st.integers()),
    st.frozensets(st.integers() | TEXT | st.tuples(st.integers(), TEXT), max_size=5),
    st.sets(st.integers() | TEXT | st.frozensets(st.integers(), max_size=2), max_size=5),
    st.builds(pathlib.PurePosixPath, st.text("ab/. ", max_size=9)),
    st.builds(pathlib.PureWindowsPath, st.text("ab\\/.C: ", max_size=9)),
)


def passed(value):
    """Encode, go through JSON text, and decode."""
    node = ENCODERS[type(value)](value, "x")
    return values.decode(json.loads(json.dumps(node, allow_nan=False, sort_keys=True)))


def same(one, other):
    """Equal in type and, for numbers, in every bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.generic):
        return one.dtype == other.dtype and one.tobytes() == other.tobytes()
    if isinstance(one, float):
        return struct.pack(">d", one) == struct.pack(">d", other)
    if isinstance(one, complex):
        return same(one.real, other.real) and same(one.imag, other.imag)
    if isinstance(one, datetime.datetime | datetime.time):
        return (
            one == other and one.tzinfo == other.tzinfo and one.fold == other.fold and str(one) == str(other)
        )
    return one == other


@given(PLAIN)
def test_plain_value_comes_back_with_type_and_bits(value):
    assert same(value, passed(value))


@pytest.mark.parametrize(
    "value",
    [
        *(0, -1, 2**53 - 1, 2**53, 2**53 + 1, -(2**70), 2**70, True, False, None),
        *(0.1, -0.0, math.inf, -math.inf, 5e-324, struct.unpack(">d", bytes.fromhex("fff0dead0000beef"))[0]),
        *(complex(math.nan, -0.0), "", "\ud800", "\ud800\udc00", "\U00010000", "\x00", b"", bytearray(), ...),
        *(np.float64(0.1), np.int64(3), np.bool_(True), np.longdouble(1) / 3, np.datetime64("NaT")),
        *(np.datetime64("2020-01-01T00", "h"), np.timedelta64(3, "D"), np.str_("a\x00")),
        *(np.str_(""), np.bytes_(b"a\0")),
        *(pathlib.Path("/a/b"), pathlib.Path(), uuid.UUID(int=7), range(9, 0, -2), slice("a", None)),
        datetime.datetime(2026, 10, 25, 2, 30, tzinfo=datetime.UTC, fold=1),
        *(torch.Size([2, 3]), torch.Size([]), torch.bfloat16, torch.device("cuda:3"), torch.device("cpu")),
        *(set(), frozenset(), frozenset([frozenset([(1, ("a", None))])])),
    ],
    ids=ascii,
)
def test_corner_value_comes_back_with_type_and_bits(value):
    assert same(value, passed(value))


def test_number_beyond_the_decimal_limit_of_python_comes_back():
    assert passed(10**5000) == 10**5000


class Color(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 1


@dataclasses.dataclass
class Config:
    lr: float = 0.1


class Name(str):
    __slots__ = ()


@pytest.mark.parametrize(
    ("value", "advice"),
    [
        (Color.RED, ".value"),
        (Level.LOW, ".value"),
        (Config(), "asdict"),
        (collections.namedtuple("Point", "x")(1), "_asdict"),
        (torch.nn.Linear(1, 1), "state_dict"),
        (np.random.default_rng(), "bit_generator.state"),
        (np.random.RandomState(1), "get_state"),
        (print, "functions"),
        (Name("x"), "convert"),
        (decimal.Decimal(1), "convert"),
        (object(), "convert"),
        (np.longlong(1), "item"),
        (np.void(b"ab"), "item"),
        (torch.Generator(), "convert"),
    ],
)
def test_refusal_of_foreign_value_names_path_type_and_advice(value, advice):
    error = values.refusal(value, "a/b")
    assert error.path == "a/b"
    assert type(value).__qualname__ in error.got
    assert advice in error.advice


@pytest.mark.parametrize(
    "value", [np.longlong(1), datetime.datetime(2026, 1, 1, tzinfo=zoneinfo.ZoneInfo("UTC"))]
)
def test_value_that_would_change_its_type_is_refused(value):
    encoder = ENCODERS.get(type(value))
    if encoder is not None:
        with pytest.raises(UnsupportedLeafError):
            encoder(value, "x")


@pytest.mark.parametrize("value", [[1], {}, bytearray(b"x"), Color.RED, slice(1), (1, [2])])
def test_key_that_could_not_come_back_is_refused(value):
    with pytest.raises(UnsupportedLeafError):
        values.encode_hashable(value, "x")


def test_keys_nested_too_deep_are_refused_and_those_below_come_back():
    deep = frozenset()
    deepest = ()
    for _ in range(values.MAX_KEY_DEPTH):
        deepest = (deepest,)
    assert values.decode_hashable(values.encode_hashable(deepest, "x")) == deepest
    with pytest.raises(UnsupportedLeafError, match="deeper"):
        values.encode_hashable((deepest,), "x")
    for _ in range(50):
        deep = frozenset([deep])
    with pytest.raises(UnsupportedLeafError, match="deeper"):
        values.encode_hashable(deep, "x")


def test_set_is_encoded_the_same_whatever_its_order():
    one, other = {0, 8}, {8, 0}
    assert list(one) != list(other), "the order of a set depends on its history"
    assert ENCODERS[set](one, "") == ENCODERS[set](other, "")


@pytest.mark.parametrize(
    "node",
    [
        *({"t": "pickle", "v": "gASV"}, {"t": 3, "v": 1}, {"t": ["int"], "v": 1}, {"v": 1}, {}, [1]),
        *({"t": "int", "v": "ff", "more": 1}, {"t": "int"}),
        *(
            {"t": "numpy", "v": ["O", "00"]},
            {"t": "numpy", "v": ["f4,f4", "00" * 8]},
            {"t": "torch.dtype", "v": "load"},
        ),
    ],
)
def test_node_of_unknown_kind_or_field_raises_unknown_format(node):
    with pytest.raises(UnknownFormatError):
        values.decode(node)


DAMAGED = [
    *(("int", p) for p in (None, 3, "", "0x10", "1_0", "é", [])),
    *(("float", p) for p in (None, "00", 1.0, "zz" * 8, [])),
    *(("str", p) for p in (None, "zz", 3, "ff")),
    *(("bytes", p) for p in (None, "###", 3, "YQ", ["YQ=="])),
    *(("bytearray", p) for p in (None, 10**12)),
    *(
        ("numpy", p)
        for p in (None, [], ["float32", "00"], ["float32", 3], ["|V2", "0000"], [None, "00"], [["f"], ""])
    ),
    *(
        ("datetime", p)
        for p in (None, [], [2026, 13, 1, 0, 0, 0, 0, 0, None], [2026, 1, 1, 0, 0, 0, 0, 0, [[1e9]]])
    ),
    *(("date", p) for p in (None, [1], [True, 1, 1], [10**20, 1, 1])),
    *(("time", p) for p in (None, [25, 0, 0, 0, 0, None], [1, 0, 0, 0, 0, [[0, 0, 0], 3]])),
    *(("timedelta", p) for p in (None, [10**30, 0, 0], ["1", 0, 0])),
    *(("range", p) for p in (None, [0, 1], [0, 1, 0], [0, 1.0, 1])),
    *(("slice", p) for p in (None, [1, 2], [[], None, None])),
    *(("set", p) for p in (None, 3, [1, 1], [[1]], [{"t": "bytearray", "v": ""}])),
    *(("path", p) for p in (None, ["Path", "x"], ["PosixPath", 3], ["PosixPath"], [["PosixPath"], "x"])),
    *(("uuid", p) for p in (None, "zz", 3)),
    *(("ellipsis", p) for p in (0, [])),
    *(("complex", p) for p in (None, "00")),
    *(("torch.Size", p) for p in (None, ["x"], [1.5])),
    *(("torch.device", p) for p in (None, "nowhere", "cuda:-7", 3)),
    *(("torch.dtype", p) for p in (None, 3, "a.b")),
    *(("numpy.str", p) for p in (None, 3)),
]


@pytest.mark.parametrize(("kind", "payload"), DAMAGED, ids=map(str, range(len(DAMAGED))))
def test_node_with_damaged_payload_raises_corrupt_data(kind, payload):
    with pytest.raises(CorruptDataError):
        values.decode({"t": kind, "v": payload})


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["<f4", "00"]),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["t", "v", "k"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.sampled_from(sorted(values._DECODERS)), JSON)
def test_node_of_known_kind_with_any_payload_is_read_or_corrupt(kind, payload):
    try:
        values.decode({"t": kind, "v": payload})
    except CorruptDataError:
        return


@pytest.mark.parametrize("number", [math.inf, math.nan])
def test_json_number_out_of_range_raises_corrupt_data(number):
    with pytest.raises(CorruptDataError):
        values.decode(number)


def test_encoders_without_torch_know_no_torch_type():
    assert not [kind for kind in values.encoders(None) if kind.__module__.startswith("torch")]
    assert leaves.loaded_torch() is torch
