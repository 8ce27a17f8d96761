# make setup | demo | test | test-all | lint | types | check | vs-kvpress | clean
# Everything runs in .venv, which is made on first use. PYTHON=... chooses the interpreter (3.11 or later).

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.kvassay-ready
# The torch that the numbers in the README were made with; another one works, and gives other last bits.
TORCH ?= torch==2.13.0
PEERS ?= .venv-kvpress

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all lint types check vs-kvpress clean

help: ## List the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(READY) ## Make the virtual environment

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "error: $(PYTHON) is older than Python 3.11; choose another with PYTHON=..." >&2; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	touch $@

demo: $(READY) ## Judge a dozen policies on two small real models (fetches them once, 330 MB)
	$(BIN)/kvassay demo

test: $(READY) ## Fast tests: no model is needed
	$(BIN)/python -m pytest

test-all: $(READY) ## All tests this machine can run
	$(BIN)/python -m pytest -m "not vllm and not gpu"

lint: $(READY) ## Style and room order
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(READY) ## Static types
	$(BIN)/mypy

check: lint types test ## What must pass before a commit

vs-kvpress: $(READY) ## Time the same grid through kvpress, which gets an environment of its own
	test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check "kvpress==0.5.*"
	$(BIN)/kvassay models fetch smollm2-135m
	$(BIN)/python benchmarks/vs_kvpress.py --peer $(PEERS)/bin/python

clean: ## Remove what was built; runs and fetched models stay
	rm -rf $(VENV) $(PEERS) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -not -path './.git/*' -type d -prune -exec rm -rf {} +
