"""What the documents name has to be there: commands, options, settings, pages; their code has to compile."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import dask
import distributed.cli.dask_scheduler
import pytest
import yaml

import fastcheck_dask
from fastcheck_dask import cli
from fastcheck_dask.config import settings
from fastcheck_dask.errors import ConfigError

ROOT = Path(__file__).parents[1]
PACKAGE = Path(fastcheck_dask.__file__).parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
PROGRAMS = {
    ("fastcheck",): cli.main,
    ("dask", "fastcheck"): cli.dask_group,
    ("dask", "scheduler"): distributed.cli.dask_scheduler.main,
}
OF_OTHERS = {"apt-get", "pip"}
SCHEMA = yaml.safe_load((PACKAGE / "fastcheck-schema.yaml").read_text())["properties"]["fastcheck"]
DEFAULTS = yaml.safe_load((PACKAGE / "fastcheck.yaml").read_text())["fastcheck"]


def named(found):
    """Return parameters of a test from ``(page, line, text)``, each under the name of its place."""
    return [
        pytest.param(text, id=f"{page.relative_to(ROOT)}:{line}-{number}")
        for number, (page, line, text) in enumerate(found)
    ]


def blocks(*languages):
    for page in PAGES:
        text = page.read_text()
        for match in re.finditer(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
            if match[1] in languages:
                yield page, text[: match.start()].count("\n") + 1, match[2]


def prose(page):
    """Return a page with its blocks of code left empty, so that lines keep their numbers."""
    text = page.read_text()
    return re.sub(r"^```.*?^```", lambda m: "\n" * m[0].count("\n"), text, flags=re.DOTALL | re.MULTILINE)


def printed_commands():
    for page, line, text in blocks("bash", ""):
        for number, one in enumerate(text.splitlines(), line + 1):
            if re.match(r"(fastcheck|dask|make|pip|apt-get) ", one):
                yield page, number, one


def spans():
    for page in PAGES:
        if page.name != "CHANGELOG.md":
            for number, line in enumerate(prose(page).splitlines(), 1):
                for text in re.findall(r"`([^`]+)`", line):
                    yield page, number, text.replace("\\|", "|")


def program_of(words):
    """Return the command that a line names, and what it is given."""
    for name, program in PROGRAMS.items():
        if tuple(words[: len(name)]) == name:
            found, rest = program, words[len(name) :]
            while isinstance(found, click.Group) and rest:
                assert rest[0] in found.commands, f"no command {rest[0]}, only {sorted(found.commands)}"
                found, rest = found.commands[rest[0]], rest[1:]
            return found, rest
    raise AssertionError(f"{words[0]} is not one of {sorted(PROGRAMS)}")


def options_of(command):
    if isinstance(command, click.Group):
        return {name for one in command.commands.values() for name in options_of(one)}
    return {"--help", *(name for one in command.params for name in (*one.opts, *one.secondary_opts))}


def keys_of(tree):
    """Return the keys of a schema, with dots between their parts."""
    for name, value in tree["properties"].items():
        if "properties" in value:
            yield from (f"{name}.{key}" for key in keys_of(value))
        else:
            yield name


def value_at(tree, key):
    for part in key.split("."):
        tree = tree[part]
    return tree


def rows(page, heading):
    """Return the cells of a table, without its head."""
    text = (ROOT / page).read_text()
    table = text[text.index(heading) :].split("\n\n")[0]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table.splitlines()[2:]]


def documented():
    """Return the key and the default of each setting, as the tables have them."""
    tables = [("", "docs/guides/settings.md", "| key | argument |")]
    tables.append(("storage.", "docs/guides/storage_nodes.md", "| key (`storage.`) |"))
    for prefix, page, heading in tables:
        for key, _, default, _ in rows(page, heading):
            yield from ((prefix + name, default) for name in re.findall(r"`([^`]+)`", key))


@pytest.mark.parametrize("line", named(printed_commands()))
def test_printed_command_is_accepted_with_its_options(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ckpts").mkdir()
    words = shlex.split(line, comments=True)
    for file in (word for word in words if word.endswith((".pem", ".key"))):
        (tmp_path / file).touch()
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    elif words[0] not in OF_OTHERS:
        command, rest = program_of(words)
        command.make_context(words[0], list(rest))


@pytest.mark.parametrize("text", named(one for one in spans() if re.match(r"(dask )?fastcheck ", one[2])))
def test_command_in_a_sentence_has_its_options(text):
    command, rest = program_of(text.split())
    assert {word.partition("=")[0] for word in rest if word.startswith("--")} <= options_of(command)


def test_options_in_sentences_are_options_of_some_command():
    known = options_of(cli.main)
    for page, line, text in spans():
        if text.startswith("python -m benchmarks"):
            program = (ROOT / (text.split()[2].replace(".", "/") + ".py")).read_text()
            assert all(f'"{option}"' in program for option in re.findall(r"--[\w-]+", text)), text
        elif page.parent.name != "benchmarks":
            missing = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", text)) - known
            assert not missing, f"{page.name}:{line} names {sorted(missing)}"


@pytest.mark.parametrize("code", named(blocks("python")))
def test_python_block_compiles(code):
    compile(code, "page", "exec", dont_inherit=True)


@pytest.mark.parametrize("text", named(blocks("yaml")))
def test_yaml_block_has_settings_that_there_are(text):
    (top,) = yaml.safe_load(text).items()
    if top[0] == "distributed":
        assert top[1]["comm"]["tls"].keys() <= dask.config.get("distributed.comm.tls").keys()
        return
    assert top[0] == "fastcheck"
    given = {f"{part}.{key}" for part, values in top[1].items() for key in values}
    assert given <= set(keys_of(SCHEMA))


def anchors(page):
    """Return what headings of a page can be linked by, as GitHub makes it."""
    for heading in re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
        yield re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_somewhere(page):
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", prose(page)):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in set(anchors(target)), link


def test_every_page_can_be_reached_from_the_index():
    found, waiting = set(), [ROOT / "docs/index.md"]
    while waiting:
        page = waiting.pop().resolve()
        if page.is_dir():
            waiting += page.glob("*.md")
        elif page.suffix == ".md" and page not in found:
            found.add(page)
            links = re.findall(r"\]\((?!https?:)([^)#\s]+)[^)]*\)", prose(page))
            waiting += [page.parent / link for link in links]
    assert found >= set(PAGES)


def test_settings_in_the_tables_are_those_of_the_schema():
    assert sorted(key for key, _ in documented()) == sorted(keys_of(SCHEMA))


@pytest.mark.parametrize("key", sorted(keys_of(SCHEMA)))
def test_default_in_the_table_is_that_of_the_packaged_file(key):
    value, default = value_at(DEFAULTS, key), dict(documented())[key]
    if value is None or value == []:
        assert not default.startswith("`")
    else:
        assert default == f"`{yaml.safe_dump(value).splitlines()[0]}`"


def test_arguments_in_the_table_are_those_of_the_manager():
    for _, cell, _, _ in rows("docs/guides/settings.md", "| key | argument |"):
        for argument in re.findall(r"`([^`]+)`", cell):
            with pytest.raises(ConfigError) as refused:
                settings(**{argument: object()})
            assert "there is no option" not in str(refused.value), argument


def test_variables_of_the_environment_are_settings():
    keys = {key.replace(".", "__").replace("-", "_").upper() for key in keys_of(SCHEMA)}
    for page in PAGES:
        assert set(re.findall(r"DASK_FASTCHECK__(\w+)", page.read_text())) <= keys, page
