# `make` lists what can be made. Everything is installed into .venv, by the versions in constraints.txt.

PYTHON ?= python3
ARGS ?=

# The run that `make train` starts when nothing else is said; ARGS comes later and wins.
LAPTOP = experiment=laptop

BIN = .venv/bin
# What to install, from pyproject.toml: nothing is built from this checkout.
DEPENDENCIES = import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"], sep="\n")
DEV = import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["dev"], sep="\n")
INSTALL = $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --requirement /dev/stdin

.SILENT:
.PHONY: help setup setup-dev train million drill test lint ci clean clean-venv

help:
	echo "make train      prepare the corpus, then train   (overrides: make train ARGS=\"train.steps=200 model=debug\")"
	echo "make million    train on a document of a million tokens, over four processes: half an hour   (minutes: ARGS=--quick)"
	echo "make drill      kill a training run 100 times at random moments and resume it: does the same come of it?   (minutes: ARGS=--quick)"
	echo "make test       run the tests"
	echo "make setup      create .venv with what training needs   (another Python: make setup PYTHON=python3.12)"
	echo "make setup-dev  the same, with the tools for tests and lint"
	echo "make lint       check style and which folder imports which"
	echo "make ci         lint and test, what .ci/run calls"
	echo "make clean      remove caches   (clean-venv: and .venv; corpora/ and runs/ stay)"

setup: .venv/setup.stamp
setup-dev: .venv/setup-dev.stamp

$(BIN)/python:
	command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) not found: install Python 3.11 or newer, or make PYTHON=/path/to/python" >&2; exit 1; }
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "$(PYTHON) is $$($(PYTHON) -V 2>&1), Longhaul needs 3.11 or newer: make PYTHON=python3.11 (or later)" >&2; exit 1; }
	$(PYTHON) -m venv .venv || { echo "$(PYTHON) cannot create .venv (on Debian and Ubuntu: apt install python3-venv)" >&2; rm -rf .venv; exit 1; }

.venv/setup.stamp: pyproject.toml constraints.txt | $(BIN)/python
	echo "Installing into .venv (PyTorch is 1 GB, or several with CUDA: a few minutes the first time)…"
	$(BIN)/python -c '$(DEPENDENCIES)' | $(INSTALL)
	touch $@

.venv/setup-dev.stamp: .venv/setup.stamp
	echo "Installing the tools for tests and lint into .venv…"
	$(BIN)/python -c '$(DEV)' | $(INSTALL)
	touch $@

# On the CPU also where there is a GPU: the first run shows the ring, with two processes on any machine.
train: export CUDA_VISIBLE_DEVICES =
train: setup
	$(BIN)/python -m data.prepare $(ARGS)
	$(BIN)/python train.py $(LAPTOP) $(ARGS)

# A benchmark: real runs of train.py, whose losses and memory it judges.
million: setup
	$(BIN)/python benchmarks/million.py $(ARGS)

# A benchmark, too: figures and criteria.
drill: setup
	$(BIN)/python benchmarks/drill.py $(ARGS)

# Unit tests on all cores, one thread each; the others start processes of their own.
test: setup-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/unit -q -n auto --durations=10 --durations-min=2
	$(BIN)/python -m pytest tests/distributed -q --durations=15 --durations-min=2

lint: setup-dev
	$(BIN)/ruff check --quiet .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/lint-imports --no-logo

ci: lint test

clean:
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +
	rm -rf .pytest_cache .ruff_cache .import_linter_cache .hypothesis build ./*.egg-info

clean-venv: clean
	rm -rf .venv
