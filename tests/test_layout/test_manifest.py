import dataclasses
import hashlib
import json
import os
import pathlib
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastcheck_dask.errors import CorruptDataError, UnknownFormatError
from fastcheck_dask.layout import manifest as module
from fastcheck_dask.layout.chunks import ArraySpec, chunk_shape_for
from fastcheck_dask.layout.manifest import Manifest, digest_of_manifest, parse_json
from fastcheck_dask.layout.notes import Notes, OlderGroup
from fastcheck_dask.layout.state import flatten, unflatten
from fastcheck_dask.layout.stripes import assign, parity_nbytes

FROZEN = pathlib.Path(__file__).parent / "frozen" / "manifest_v1.json"


def manifest_of(state, *, shards=2, parity=1, chunk_bytes=100):
    flat = flatten(state, chunk_bytes=chunk_bytes)
    sizes = {chunk.key: chunk.nbytes for spec in flat.arrays for chunk in spec.chunks}
    layout = assign(sizes, shards=shards, parity=parity) if shards else None
    keys = list(sizes) if layout is None else list(layout.position)
    return Manifest(
        run="run-1",
        generation=3,
        tag="epoch1_step7",
        token="0" * 32,
        created_unix=1.5,
        tree=flat.tree,
        arrays=flat.arrays,
        digests={key: hashlib.sha256(key.encode()).hexdigest()[:32] for key in keys},
        layout=layout,
        nodes=tuple(f"n{i}" for i in range(layout.nodes_wanted)) if layout else (),
    )


STATE = {
    "model": {"w": np.arange(100.0).reshape(10, 10), "b": np.arange(3.0)},
    "opt": [np.arange(77.0), 7, (None,)],
}
DATA = manifest_of(STATE).to_bytes()


def changed(**fields):
    return json.dumps(json.loads(DATA) | fields).encode()


def edited(edit):
    document = json.loads(DATA)
    edit(document)
    return json.dumps(document).encode()


STATES = st.dictionaries(
    st.text(max_size=4), st.integers(0, 60).map(lambda n: np.arange(float(n))), max_size=5
)


@given(STATES, st.integers(0, 4), st.integers(0, 2), st.integers(1, 300))
def test_manifest_of_any_state_comes_back_with_equal_bytes(state, shards, parity, chunk_bytes):
    manifest = manifest_of(state, shards=shards, parity=parity, chunk_bytes=chunk_bytes)
    data = manifest.to_bytes()
    found = Manifest.from_bytes(data)
    assert found == manifest
    assert found.to_bytes() == data
    assert found.raw_bytes == sum(found.sizes.values())
    for key in found.digests:
        stripe = None if manifest.layout is None else manifest.layout.position[key][0]
        size = manifest.sizes[key] if key in manifest.sizes else parity_nbytes(stripe, manifest.sizes)
        assert found.nbytes_of(key) == size


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_manifest_in_any_buffer_is_read(kind):
    assert Manifest.from_bytes(kind(DATA)).tag == "epoch1_step7"


def test_manifest_of_a_state_without_arrays_comes_back():
    manifest = manifest_of({"epoch": 7})
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest


def test_frozen_manifest_stays_readable_and_its_bytes_the_same():
    """Written once by version 1 of the format; never to be regenerated."""
    data = FROZEN.read_bytes().strip()
    manifest = Manifest.from_bytes(data)
    assert manifest.to_bytes() == data
    bits = {spec.path: np.full(spec.nbytes, 1, np.uint8) for spec in manifest.arrays}
    state = unflatten(manifest.tree, lambda spec: bits[spec.path], arrays=manifest.arrays)
    assert (manifest.run, manifest.generation, manifest.tag) == ("run-1", 12, "epoch3_step1200")
    assert [(s.path, s.dtype, s.shape, s.chunk_shape) for s in manifest.arrays] == [
        ("model/w", "bfloat16", (40, 10), (20, 10)),
        ("opt/state/0/exp_avg", "float32", (100,), (100,)),
    ]
    assert manifest.layout.keys_of(2) == ("%parity/0", "%parity/1")
    assert str(state["model"]["w"].dtype) == "torch.bfloat16"
    assert state["model"]["tied"] is state["model"]["w"]
    assert state["model"]["b"].tolist() == [1.0, -0.0, 2.5]
    assert type(state["model"]["b"]).__name__ == "Parameter"
    assert list(state["opt"]["state"]) == [0]
    assert state["numbers"] == (7, 2**70, True, None, 0.1, float("-inf"), 1j)
    assert state["dtype"] == state["model"]["w"].dtype
    assert state["scalar"] == np.float64(0.5)
    assert type(state["scalar"]) is np.float64
    assert state["keys"] == {0: "int", "0": "text", (1, b"x"): "tuple", None: "none"}


def with_derived():
    """Return a manifest with a float32 array, its bf16 cast, and an array for itself."""
    state = {"m": np.ones((36, 4), np.float32), "w": np.ones((36, 4), np.float16), "x": np.arange(90.0)}
    flat = flatten(state, chunk_bytes=100)
    source, cast, other = flat.arrays
    cast = dataclasses.replace(cast, dtype="bfloat16", chunk_shape=source.chunk_shape, source="m")
    arrays = (source, cast, other)
    sizes = {chunk.key: chunk.nbytes for spec in (source, other) for chunk in spec.chunks}
    layout = assign(sizes, shards=2, parity=True)
    keys = [c.key for spec in arrays for c in spec.chunks] + [s.parity_key for s in layout.stripes]
    digests = {key: hashlib.sha256(key.encode()).hexdigest()[:32] for key in keys}
    return dataclasses.replace(manifest_of(state), arrays=arrays, layout=layout, digests=digests)


def test_manifest_with_derived_array_comes_back_and_names_the_source_of_each_chunk():
    manifest = with_derived()
    data = manifest.to_bytes()
    assert json.loads(data)["version"] == 2
    found = Manifest.from_bytes(data)
    assert found == manifest
    assert found.to_bytes() == data
    assert found.sources == {f"w/c/{i}/0": f"m/c/{i}/0" for i in range(6)}
    assert found.derived_bytes == 36 * 4 * 2
    assert found.raw_bytes == 36 * 4 * 6 + 90 * 8
    assert found.nbytes_of("w/c/0/0") * 2 == found.nbytes_of("m/c/0/0")


NOTES = Notes({"loss": float("inf"), "top1": 0.5}, ("opt/exp_avg", "w"), ("mask",), unchanged=True)


def test_manifest_with_notes_comes_back_and_is_of_version_3():
    for plain in (manifest_of(STATE), with_derived()):
        manifest = dataclasses.replace(plain, notes=NOTES)
        data = manifest.to_bytes()
        assert json.loads(data)["version"] == 3
        assert Manifest.from_bytes(data) == manifest
        assert Manifest.from_bytes(data).to_bytes() == data


def test_frozen_manifest_with_notes_stays_readable_and_its_bytes_the_same():
    """Written once by version 3 of the format; never to be regenerated."""
    data = FROZEN.with_name("manifest_v3.json").read_bytes().strip()
    manifest = Manifest.from_bytes(data)
    assert manifest.to_bytes() == data
    assert manifest.notes == NOTES
    assert manifest.notes.flags == ("nonfinite", "unchanged")


def test_frozen_manifest_with_two_parity_shards_stays_readable_and_its_bytes_the_same():
    """Written once by version 4 of the format; never to be regenerated."""
    data = FROZEN.with_name("manifest_v4.json").read_bytes().strip()
    manifest = Manifest.from_bytes(data)
    assert manifest.to_bytes() == data
    assert (manifest.layout.shards, manifest.layout.parity, len(manifest.nodes)) == (2, 2, 4)
    assert manifest.layout.keys_of(2) == tuple(f"%parity/{s.id}" for s in manifest.layout.stripes)
    assert manifest.layout.keys_of(3) == tuple(f"%parity2/{s.id}" for s in manifest.layout.stripes)
    assert manifest.nbytes_of("%parity2/0") == manifest.nbytes_of("%parity/0") == 72


OLDER = {"embeddings": OlderGroup(3, "s3", 1.5)}


def test_frozen_manifest_with_older_groups_stays_readable_and_its_bytes_the_same():
    """Written once by version 5 of the format; never to be regenerated."""
    data = FROZEN.with_name("manifest_v5.json").read_bytes().strip()
    manifest = Manifest.from_bytes(data)
    assert manifest.to_bytes() == data
    assert json.loads(data)["version"] == 5
    assert manifest.notes == dataclasses.replace(NOTES, older=OLDER)


@pytest.mark.parametrize(
    "older",
    [
        7,
        ["g"],
        {"g": 7},
        {"g": {"generation": 1, "tag": "t"}},
        {"g": {"generation": -1, "tag": "t", "created_unix": 1}},
        {"g": {"generation": True, "tag": "t", "created_unix": 1}},
        {"g": {"generation": 1, "tag": 5, "created_unix": 1}},
        {"g": {"generation": 1, "tag": "t", "created_unix": "now"}},
    ],
)
def test_manifest_with_older_groups_that_cannot_be_is_refused(older):
    document = json.loads(FROZEN.with_name("manifest_v5.json").read_bytes())
    document["notes"]["older"] = older
    with pytest.raises(CorruptDataError):
        Manifest.from_bytes(json.dumps(document).encode())


@pytest.mark.parametrize("parity", [0, 1])
def test_manifest_with_at_most_one_parity_shard_is_one_that_older_readers_know(parity):
    document = json.loads(manifest_of(STATE, parity=parity).to_bytes())
    assert (document["version"], document["layout"]["parity"]) == (1, bool(parity))


def test_manifest_without_derived_arrays_is_one_that_older_readers_know():
    assert json.loads(DATA)["version"] == 1
    assert manifest_of(STATE).sources == {}


def test_frozen_manifest_with_derived_array_stays_readable_and_its_bytes_the_same():
    """Written once by version 2 of the format; never to be regenerated."""
    data = FROZEN.with_name("manifest_v2.json").read_bytes().strip()
    manifest = Manifest.from_bytes(data)
    assert manifest.to_bytes() == data
    assert [(s.path, s.dtype, s.source) for s in manifest.arrays] == [
        ("m", "float32", None),
        ("w", "bfloat16", "m"),
        ("x", "float64", None),
    ]


DERIVED_EDITS = {
    "source unknown": lambda d: d["arrays"][1]["derived"].update({"from": "y"}),
    "source itself": lambda d: d["arrays"][1]["derived"].update({"from": "w"}),
    "source of another dtype": lambda d: d["arrays"][0].update(dtype="int32"),
    "source no text": lambda d: d["arrays"][1]["derived"].update({"from": ["m"]}),
    "source missing": lambda d: d["arrays"][1]["derived"].pop("from"),
    "source derived, too": lambda d: d["arrays"][0].update(derived={"from": "w", "rule": "cast"}),
    "rule unknown": lambda d: d["arrays"][1]["derived"].update(rule="halve"),
    "rule missing": lambda d: d["arrays"][1]["derived"].pop("rule"),
    "no object": lambda d: d["arrays"][1].update(derived=None),
    "dtype of no cast": lambda d: d["arrays"][1].update(dtype="int16"),
    "shape other": lambda d: d["arrays"][1].update(shape=[35, 4]),
    "chunk shape other": lambda d: d["arrays"][1].update(chunk_shape=[7, 4]),
    "not derived and in no stripe": lambda d: d["arrays"][1].pop("derived"),
    "in a stripe": lambda d: d["layout"]["stripes"].append([99, ["w/c/0/0", None], "0" * 32]),
    "digest missing": lambda d: d["arrays"][1]["digests"].pop(),
}


@pytest.mark.parametrize("name", DERIVED_EDITS)
def test_manifest_whose_derived_array_cannot_be_one_raises_corrupt_data(name):
    document = json.loads(with_derived().to_bytes())
    DERIVED_EDITS[name](document)
    with pytest.raises(CorruptDataError):
        Manifest.from_bytes(json.dumps(document).encode())


@pytest.mark.parametrize("length", [0, 1, 10, len(DATA) // 2, len(DATA) - 1])
def test_manifest_cut_short_is_refused(length):
    with pytest.raises(UnknownFormatError):
        Manifest.from_bytes(DATA[:length])


class Touch:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (self.path,))


def test_manifest_that_is_a_pickle_is_refused_and_not_run(tmp_path):
    target = tmp_path / "touched"
    with pytest.raises(UnknownFormatError):
        Manifest.from_bytes(pickle.dumps(Touch(str(target))))
    assert not target.exists()


@pytest.mark.parametrize(
    "data",
    [
        *(b"\xff\xfe\x00", b"null", b"[]", b"3", b'"text"', b"{}", b"[" * 100_000, b'{"a":' * 100_000),
        *(
            b"9" * 100_000,
            b'{"format":"other"}',
            changed(format="fastcheck"),
            changed(version=6),
            changed(version="1"),
        ),
        *(DATA.replace(b"1.5", b"NaN"), DATA.replace(b"1.5", b"Infinity"), DATA + b"{}"),
    ],
    ids=map(str, range(16)),
)
def test_document_that_is_no_manifest_of_this_version_raises_unknown_format(data):
    with pytest.raises(UnknownFormatError):
        Manifest.from_bytes(data)


def test_name_that_stands_twice_is_refused_at_any_depth():
    for data in (
        DATA.replace(b'{"arrays"', b'{"run":"other","arrays"', 1),
        DATA.replace(b'"path":"opt/0"', b'"path":"x","path":"opt/0"'),
    ):
        assert data != DATA
        with pytest.raises(CorruptDataError, match="twice"):
            Manifest.from_bytes(data)


def alone(**fields):
    """Change the first array where no stripe contradicts the change."""

    def edit(document):
        document["arrays"][0].update(fields)
        document.update(layout=None, nodes=[])

    return edit


def set_path(path):
    return alone(path=path)


EDITS = {
    "array twice": lambda d: d["arrays"].append(d["arrays"][0]),
    "array inside another": lambda d: d["arrays"][1].update(path=d["arrays"][0]["path"] + "/x"),
    "path steps up": set_path("../../etc/passwd"),
    "path absolute": set_path("/etc/passwd"),
    "path of parity": set_path("%parity/0"),
    "path of a chunk": set_path("opt/0/c/0"),
    "path no text": set_path(3),
    "path empty": set_path(""),
    "digest missing": lambda d: d["arrays"][0]["digests"].pop(),
    "digest too many": lambda d: d["arrays"][0]["digests"].append("x"),
    "digest no text": lambda d: d["arrays"][0]["digests"].__setitem__(0, 3),
    "digests no list": lambda d: d["arrays"][0].update(digests=None),
    "shape negative": lambda d: d["arrays"][0].update(shape=[-1, 10]),
    "shape huge": lambda d: d["arrays"][0].update(shape=[2**61, 10]),
    "shape beyond numbers": lambda d: d["arrays"][0].update(shape=[10**400, 10]),
    "shape of many axes": lambda d: d["arrays"][0].update(shape=[2**61] * 10**5, chunk_shape=[1] * 10**5),
    "shape of truths": lambda d: d["arrays"][0].update(shape=[True, 10]),
    "shape of floats": lambda d: d["arrays"][0].update(shape=[10.0, 10]),
    "shape no list": lambda d: d["arrays"][0].update(shape=None),
    "chunk shape zero": lambda d: d["arrays"][0].update(chunk_shape=[0, 10]),
    "chunk shape not contiguous": alone(chunk_shape=[10, 1]),
    "chunk shape of other axes": lambda d: d["arrays"][0].update(chunk_shape=[100]),
    "dtype unknown": lambda d: d["arrays"][0].update(dtype="float33"),
    "dtype of objects": lambda d: d["arrays"][0].update(dtype="|O"),
    "dtype no text": lambda d: d["arrays"][0].update(dtype=["f"]),
    "dtype endless": lambda d: d["arrays"][0].update(dtype="f4," * 10**6),
    "generation negative": lambda d: d.update(generation=-1),
    "generation float": lambda d: d.update(generation=1.0),
    "generation truth": lambda d: d.update(generation=True),
    "generation huge": lambda d: d.update(generation=10**100),
    "time huge": lambda d: d.update(created_unix=10**400),
    "time text": lambda d: d.update(created_unix="1.5"),
    "run no text": lambda d: d.update(run=None),
    "tag steps up": lambda d: d.update(tag="../x"),
    "run of two parts": lambda d: d.update(run="a/b"),
    "tag missing": lambda d: d.pop("tag"),
    "tree missing": lambda d: d.pop("tree"),
    "arrays no list": lambda d: d.update(arrays=3),
    "array no object": lambda d: d.update(arrays=["x"]),
    "nodes too few": lambda d: d["nodes"].pop(),
    "nodes no text": lambda d: d.update(nodes=[1, 2, 3]),
    "nodes none": lambda d: d.update(nodes=None),
    "layout no object": lambda d: d.update(layout=[]),
    "layout missing": lambda d: d.update(layout=None),
    "shards zero": lambda d: d["layout"].update(shards=0, stripes=[]),
    "shards other": lambda d: d["layout"].update(shards=3),
    "parity a number": lambda d: d["layout"].update(parity=1),
    "parity of three": lambda d: d["layout"].update(parity=3),
    "parity a float": lambda d: d["layout"].update(parity=2.0),
    "parity no digests of two": lambda d: (d["layout"].update(parity=2), d["nodes"].append("n3")),
    "stripe missing": lambda d: d["layout"]["stripes"].pop(),
    "stripe twice": lambda d: d["layout"]["stripes"].append(d["layout"]["stripes"][0]),
    "stripe id twice": lambda d: d["layout"]["stripes"][1].__setitem__(0, d["layout"]["stripes"][0][0]),
    "stripe without members": lambda d: d["layout"]["stripes"].append([99, [None, None], "x"]),
    "stripe with unknown chunk": lambda d: d["layout"]["stripes"][0][1].__setitem__(0, "other/c/0"),
    "stripe digest missing": lambda d: d["layout"]["stripes"][0].__setitem__(2, None),
    "stripe too short": lambda d: d["layout"]["stripes"][0].pop(),
    "member no text": lambda d: d["layout"]["stripes"][0][1].__setitem__(0, 3),
}


SECOND_EDITS = {
    "digest missing": lambda layout: layout["stripes"][0][2].pop(),
    "digest too many": lambda layout: layout["stripes"][0][2].append("x"),
    "digest no text": lambda layout: layout["stripes"][0][2].__setitem__(1, None),
    "digests a text": lambda layout: layout["stripes"][0].__setitem__(2, "ab"),
    "one parity shard": lambda layout: layout.update(parity=True),
}


@pytest.mark.parametrize("name", SECOND_EDITS)
def test_manifest_with_two_parity_shards_that_contradicts_itself_raises_corrupt_data(name):
    document = json.loads(manifest_of(STATE, parity=2).to_bytes())
    assert document["version"] == 4
    SECOND_EDITS[name](document["layout"])
    with pytest.raises(CorruptDataError):
        Manifest.from_bytes(json.dumps(document).encode())


@pytest.mark.parametrize("name", EDITS)
def test_manifest_that_contradicts_itself_raises_corrupt_data(name):
    with pytest.raises(CorruptDataError):
        Manifest.from_bytes(edited(EDITS[name]))


def test_edits_start_from_arrays_that_they_can_contradict():
    """With the same chunk count and without stripes, only the shape of the chunks is wrong."""
    first = json.loads(DATA)["arrays"][0]
    assert (first["shape"], first["chunk_shape"], len(first["digests"])) == ([10, 10], [1, 10], 10)
    assert Manifest.from_bytes(edited(alone())).layout is None


def test_manifest_beyond_the_limit_is_refused_before_it_is_parsed(monkeypatch):
    monkeypatch.setattr(module, "LIMIT_BYTES", 10)
    monkeypatch.setattr(module, "parse_json", None)
    with pytest.raises(CorruptDataError, match="at most 10"):
        Manifest.from_bytes(DATA)


@given(st.data())
def test_manifest_with_any_bytes_replaced_is_read_or_corrupt(data):
    begin = data.draw(st.integers(0, len(DATA)))
    length = data.draw(st.integers(0, 20))
    mutated = DATA[:begin] + data.draw(st.binary(max_size=20)) + DATA[begin + length :]
    try:
        found = Manifest.from_bytes(mutated)
    except CorruptDataError:
        return
    found.check()
    assert Manifest.from_bytes(found.to_bytes()) == found


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)


@given(st.data())
def test_manifest_with_any_value_replaced_is_read_or_corrupt(data):
    document = json.loads(DATA)
    places = []

    def gather(node):
        for key in list(node if isinstance(node, dict) else range(len(node))):
            places.append((node, key))
            if isinstance(node[key], dict | list):
                gather(node[key])

    gather(document)
    node, key = places[data.draw(st.integers(0, len(places) - 1))]
    node[key] = data.draw(JSON)
    try:
        Manifest.from_bytes(json.dumps(document).encode())
    except CorruptDataError:
        return


def test_check_of_a_manifest_with_wrong_digests_raises():
    manifest = manifest_of(STATE)
    bad = dataclasses.replace(manifest, digests=dict(manifest.digests) | {"x": "y"})
    with pytest.raises(CorruptDataError, match="digests"):
        bad.check()


def test_error_says_where_the_manifest_lay():
    with pytest.raises(UnknownFormatError, match="s3://bucket/x"):
        Manifest.from_bytes(b"", where="s3://bucket/x")


def test_parse_json_keeps_large_numbers_exact():
    assert parse_json(b"1180591620717411303424", "x") == 2**70


def test_digest_of_manifest_is_that_of_its_bytes():
    assert digest_of_manifest(DATA) == hashlib.sha256(DATA).hexdigest()


def test_manifest_of_array_beyond_two_gib_counts_every_byte():
    spec = ArraySpec("w", "uint8", (2**31 + 17,), chunk_shape_for((2**31 + 17,), 1))
    manifest = dataclasses.replace(
        manifest_of({"a": 1}, shards=0), arrays=(spec,), digests={c.key: "d" for c in spec.chunks}
    )
    found = Manifest.from_bytes(manifest.to_bytes())
    assert found.raw_bytes == 2**31 + 17 == sum(found.sizes.values())
