from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastcheck_dask.errors import ConfigError
from fastcheck_dask.ids import (
    check_name,
    directory_name,
    is_url,
    new_token,
    normalised,
    parse_directory_name,
    run_id_for,
)

names = st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._=+-]{0,127}\Z")


@given(names)
def test_check_name_good_comes_back(name):
    assert check_name(name, "tag") == name


@pytest.mark.parametrize(
    "name", ["", "a/b", "..", ".hidden", "-x", "a b", "a\n", "a\0", "é", "x" * 129, None, 7, b"a", "a:b", "٣"]
)
def test_check_name_bad_says_what_is_wanted_and_what_came(name):
    with pytest.raises(ConfigError, match=re.escape(repr(name))) as caught:
        check_name(name, "a tag")
    assert str(caught.value).startswith("a tag must be 1 to 128")


def test_new_token_is_a_name_and_never_the_same():
    tokens = {new_token() for _ in range(100)}
    assert len(tokens) == 100
    assert all(re.fullmatch("[0-9a-f]{32}", check_name(token, "token")) for token in tokens)


@given(st.integers(0, 10**12), names)
def test_directory_name_parses_back(generation, tag):
    assert parse_directory_name(directory_name(generation, tag)) == (generation, tag)


@given(st.integers(0, 99_999_999), st.integers(0, 99_999_999), names, names)
def test_directory_name_text_order_is_commit_order(left, right, tag, other):
    if left != right:
        assert (directory_name(left, tag) < directory_name(right, other)) is (left < right)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "12-t",
        "00000012",
        "00000012-",
        "00000012-.t",
        "00000012-t/x",
        "00000012-t\n",
        "x00000012-t",
        "-0000012-t",
        "٠٠٠٠٠٠١٢-t",
        "000000012-t",
        ".fastcheck",
    ],
)
def test_parse_directory_name_of_something_else_is_none(name):
    assert parse_directory_name(name) is None


@given(st.text(max_size=30))
def test_parse_directory_name_any_text_is_none_or_spelled_exactly_so(text):
    found = parse_directory_name(text)
    assert found is None or directory_name(*found) == text


@pytest.mark.parametrize(
    ("location", "url"), [("s3://b/k", True), ("file:///x", True), ("/data", False), ("a:b", False)]
)
def test_is_url(location, url):
    assert is_url(location) is url


def test_normalised_one_place_has_one_spelling(tmp_path, monkeypatch):
    folder = tmp_path / "ckpts"
    folder.mkdir()
    (tmp_path / "link").symlink_to(folder)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    spellings = ["ckpts", "./ckpts/", "ckpts/../ckpts", "~/ckpts", "link", str(folder), f"file://{folder}"]
    assert {normalised(spelling) for spelling in spellings} == {str(folder)}
    assert normalised("s3://bucket/run//") == "s3://bucket/run"


def test_run_id_is_a_name_and_tells_places_apart(tmp_path):
    assert run_id_for(f"{tmp_path}/a") != run_id_for(f"{tmp_path}/b")
    assert run_id_for(f"{tmp_path}/x/run") != run_id_for(f"{tmp_path}/y/run")
    assert run_id_for(f"{tmp_path}/run-7").startswith("run-7-")
    for location in ("/", "/data/.hidden", "/data/é ü", f"/{'x' * 200}", "s3://bucket", "file:///tmp/a b"):
        assert check_name(run_id_for(location), "run") == run_id_for(location)


def test_normalised_url_has_one_spelling_and_its_options_do_not_name_the_run():
    spellings = [
        "s3://bucket/run/?region=eu&endpoint=http://h:9000",
        "s3://bucket/run?endpoint=http%3A%2F%2Fh%3A9000&region=eu",
    ]
    assert len({normalised(location) for location in spellings}) == 1
    assert len({run_id_for(location) for location in [*spellings, "s3://bucket/run"]}) == 1
    assert run_id_for("s3://bucket/run") != run_id_for("s3://other/run")
