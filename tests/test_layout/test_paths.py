import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastcheck_dask.layout import values
from fastcheck_dask.layout.paths import LIMIT_BYTES, components, escape, is_safe, join

# Surrogates included: a key of a dict may be any text.
TEXT = st.one_of(
    st.text(st.characters(codec=None), max_size=12),
    st.text(".%/\\:_cz\x00\ud800", max_size=6),
    st.sampled_from(
        ["", ".", "..", "c", "zarr.json", "__init__", ".zarray", "%", "%63", "a" * 300, "ü" * 150]
    ),
)
KEYS = st.recursive(
    st.one_of(TEXT, st.integers(), st.booleans(), st.none(), st.floats(), st.binary(max_size=4)),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=4,
)


@given(TEXT)
def test_escape_of_any_text_is_a_safe_node_name(name):
    found = escape(name)
    assert "/" not in found
    assert is_safe(found)
    assert len(found.encode()) <= LIMIT_BYTES + 20


@given(st.lists(TEXT, unique=True, max_size=12))
def test_escape_of_different_names_differs(names):
    assert len({escape(name) for name in names}) == len(names)


@given(st.lists(KEYS, max_size=8), st.randoms(use_true_random=False))
def test_components_of_the_keys_of_a_dict_differ_and_are_safe(keys, random):
    keys = list(dict.fromkeys(keys))
    encoded = [values.encode_hashable(key, "") for key in keys]
    found = components(encoded)
    assert len(set(found)) == len(keys)
    assert all("/" not in name and is_safe(name) for name in found)
    assert components(encoded) == found
    for key, name in zip(keys, found, strict=True):
        if type(key) is str:
            assert name == escape(key), "a text key depends on itself alone"


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        (["model", "layers.0.weight"], ["model", "layers.0.weight"]),
        ([0, 1, 2], ["0", "1", "2"]),
        ([0, "0"], ["0%int", "0"]),
        ([-3, "x"], ["-3", "x"]),
        ([True, "True", None, 1.0], ["True%truth", "True", "None%none", "1.0%real"]),
        (["a/b", "a%2Fb"], ["a%2Fb", "a%252Fb"]),
    ],
)
def test_components_of_known_keys_are_frozen(keys, wanted):
    assert components(keys) == wanted


def test_components_of_keys_with_equal_bits_still_differ():
    """Two NaNs may be keys of one dict."""
    keys = [values.encode_hashable(float("nan"), "") for _ in range(3)]
    assert len(set(components(keys))) == 3
    assert len(set(components([values.encode_hashable(key, "") for key in (("a,b",), ("a", "b"))]))) == 2


def test_escape_of_long_names_with_one_beginning_differs():
    one, other = escape("x" * 300 + "1"), escape("x" * 300 + "2")
    assert one != other
    assert one.startswith("xxx")


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/a",
        "a/",
        "a//b",
        "..",
        "a/../b",
        "./a",
        "%parity/0",
        "a/c",
        "a/c/0",
        "zarr.json",
        "a\\b",
        "C:/x",
        "a\x00",
        *("__x", "x" * 300, "\ud800"),
    ],
)
def test_is_safe_with_unsafe_path_says_no(path):
    assert not is_safe(path)


def test_join_with_the_root_is_the_component():
    assert join("", "a") == "a"
    assert join("a", "b") == "a/b"
