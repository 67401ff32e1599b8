# Every command a developer needs. All of them work on a machine with nothing but Debian 12 and Python 3.11.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Tests wait for other processes most of the time; a file stays in one process.
TEST_PROCESSES ?= 2
BENCH_STAMP := $(VENV)/.bench-installed

.PHONY: venv demo test lint bench bench-codecs services clean

venv: $(STAMP)

$(STAMP): setup.cfg setup.py codecs/kernels.c constraints.txt
	@# Debian ships venv apart from Python.
	$(PYTHON) -c "import ensurepip" 2>/dev/null || { apt-get update -qq && apt-get install -y -qq --no-install-recommends python3-venv; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[torch,demo,test,lint]'
	touch $@

demo: venv
	$(BIN)/fastcheck demo

services:
	bash .ci/services

test: venv services lint
	@# The tests start thousands of processes: none shall compile anew what is on the disk.
	@# tests/conftest.py puts the files in order.
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: venv
	$(BIN)/python -m benchmarks.run

# Trains the networks when it first runs (about 20 minutes on one core); ZipNN is built, with a C compiler.
bench-codecs: $(BENCH_STAMP)
	$(BIN)/python -m benchmarks.codecs --write docs/benchmarks

$(BENCH_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[torch,demo,bench]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info codecs/fastcheck_codecs/_kernels*.so .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
