"""What is installed is what is there, and importing it costs no framework."""

from __future__ import annotations

import ast
import configparser
import importlib
import importlib.metadata
import importlib.resources
import re
import subprocess
import sys
from pathlib import Path

import numcodecs
import pytest

import fastcheck_dask
from fastcheck_dask.version import __version__

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def setup_cfg():
    found = configparser.ConfigParser()
    found.read(ROOT / "setup.cfg", encoding="utf-8")
    return found


def lines(text):
    return [line.strip() for line in text.strip().splitlines() if line.strip()]


def folders_with_init(top, beneath):
    return {".".join(path.parent.relative_to(beneath).parts) for path in (beneath / top).rglob("__init__.py")}


def test_packages_listed_are_the_folders_on_disk(setup_cfg):
    listed = lines(setup_cfg["options"]["packages"])
    on_disk = folders_with_init("fastcheck_dask", ROOT) | folders_with_init(
        "fastcheck_codecs", ROOT / "codecs"
    )
    assert sorted(listed) == sorted(on_disk)


def test_every_folder_with_modules_is_a_package():
    for top in (ROOT / "fastcheck_dask", ROOT / "codecs" / "fastcheck_codecs"):
        for module in top.rglob("*.py"):
            assert (module.parent / "__init__.py").exists(), module


def test_codecs_folder_is_no_package():
    assert not (ROOT / "codecs" / "__init__.py").exists()


@pytest.mark.parametrize("package", ["fastcheck_dask", "fastcheck_codecs"])
def test_package_data_listed_are_there_and_py_typed_is_shipped(setup_cfg, package):
    listed = lines(setup_cfg["options.package_data"][package])
    assert "py.typed" in listed
    for name in listed:
        assert importlib.resources.files(package).joinpath(name).is_file()
    kinds = {path.name for path in Path(importlib.resources.files(package)).iterdir() if path.is_file()}
    assert {name for name in kinds if not name.endswith((".py", ".pyc", ".so"))} == set(listed)


def entry_points(setup_cfg):
    for group, text in setup_cfg["options.entry_points"].items():
        for line in lines(text):
            name, target = (part.strip() for part in line.split("=", 1))
            yield group, name, target


def test_entry_points_listed_resolve(setup_cfg):
    found = list(entry_points(setup_cfg))
    assert {group for group, _, _ in found} == {
        "console_scripts",
        "dask_cli",
        "numcodecs.codecs",
        "zarr.codecs",
    }
    for _, name, target in found:
        module, _, attribute = target.partition(":")
        assert callable(getattr(importlib.import_module(module), attribute)), name


def test_entry_points_installed_are_those_listed(setup_cfg):
    installed = {
        (point.group, point.name, point.value)
        for point in importlib.metadata.distribution("fastcheck-dask").entry_points
    }
    assert installed == set(entry_points(setup_cfg))


@pytest.mark.parametrize("codec", ["fastcheck.xor_delta", "fastcheck.prefix_index"])
def test_codec_is_found_by_numcodecs_in_a_fresh_process(codec):
    assert numcodecs.get_codec({"id": codec}).codec_id == codec
    code = f"import numcodecs; print(numcodecs.get_codec({{'id': {codec!r}}}).codec_id)"
    assert run_python(code) == codec


def run_python(code):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_fastcheck_dask_imports_no_framework():
    code = (
        "import sys, fastcheck_dask\n"
        "names = ('torch', 'tensorflow', 'lightning', 'transformers', 'sklearn', 'matplotlib')\n"
        "print([name for name in names if name in sys.modules])"
    )
    assert run_python(code) == "[]"


@pytest.mark.parametrize("module", ["fastcheck_dask.agent.encoder", "fastcheck_dask.agent.process"])
def test_import_of_agent_processes_imports_no_torch(module):
    assert run_python(f"import sys, {module}; print('torch' in sys.modules)") == "False"


def test_import_fastcheck_codecs_needs_nothing_of_the_system():
    code = (
        "import sys, fastcheck_codecs\n"
        "print(sorted({name.split('.')[0] for name in sys.modules} & "
        "{'fastcheck_dask', 'dask', 'distributed', 'kazoo', 'torch'}))"
    )
    assert run_python(code) == "[]"


def test_version_is_one_everywhere(setup_cfg):
    assert re.fullmatch(r"\d+\.\d+\.\d+", __version__)
    assert fastcheck_dask.__version__ == __version__ == importlib.metadata.version("fastcheck-dask")
    assert setup_cfg["metadata"]["version"] == "attr: fastcheck_dask.version.__version__"


def test_public_names_are_there_and_sorted():
    assert fastcheck_dask.__all__ == sorted(fastcheck_dask.__all__)
    assert all(hasattr(fastcheck_dask, name) for name in fastcheck_dask.__all__)


def test_requirements_cover_every_import(setup_cfg):
    """A module that is imported at the top and is not required would be missing in a fresh installation."""
    names = {"google-crc32c": "google_crc32c", "scikit-learn": "sklearn"}
    required = {
        names.get(name, name)
        for name in (
            re.split(r"[<>=!\[ ]", line)[0] for line in lines(setup_cfg["options"]["install_requires"])
        )
    }
    own = {"fastcheck_dask", "fastcheck_codecs"} | set(sys.stdlib_module_names)
    optional = {"torch", "sklearn", "matplotlib", "obstore", "bokeh", "prometheus_client"}
    #: Come with dask.
    with_dask = {"yaml"}
    for top in (ROOT / "fastcheck_dask", ROOT / "codecs" / "fastcheck_codecs"):
        for path in top.rglob("*.py"):
            if "integrations" in path.parts or "testing" in path.parts:
                continue
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                imported = set()
                if isinstance(node, ast.Import):
                    imported = {alias.name.split(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    imported = {node.module.split(".")[0]}
                assert imported <= own | required | optional | with_dask, (path, imported)
