# `make demo` sets up a virtual environment, trains a model and shows the run. `make help` lists the rest.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Exact, and installed before everything else: a plain `torch` pulls the newest release with gigabytes of CUDA.
TORCH := torch==2.13.0
VLLM_VENV := .venv-vllm
VLLM_READY := $(VLLM_VENV)/.ready
VERIFIERS_VENV := .venv-verifiers
VERIFIERS_READY := $(VERIFIERS_VENV)/.ready

# Where this is set, every process of every test would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup setup-vllm setup-verifiers demo test test-long test-vllm test-verifiers test-ray test-browser docs \
	reference lint bench crash-quick crash soak-ray soak-runs soak-judges soak
.DELETE_ON_ERROR:

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY) ## the virtual environment in .venv, with the versions of constraints.txt

# The stamp is written last: an interrupted setup is done again. What is written in C is compiled by pip.
$(READY): pyproject.toml constraints.txt $(wildcard penstock/*/*.c)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed; $(PYTHON) is $$($(PYTHON) --version 2>&1). Use make PYTHON=python3.12"; exit 1; }
	@rm -f $@
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev,math,gym,ray,serve,lora,plot,docs]'
	@touch $@

setup-vllm: $(VLLM_READY) ## vLLM for this CPU, in an environment of its own: .venv-vllm, with the versions of constraints-vllm.txt

# An environment of its own: vLLM needs an older transformers. Its packages are listed in full and installed without
# their dependencies, so that neither CUDA nor libraries for images and sound come with them.
$(VLLM_READY): constraints-vllm.txt
	@rm -f $@
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet $(TORCH)
	$(VLLM_VENV)/bin/python -m pip install --quiet --no-deps -r constraints-vllm.txt
	$(VLLM_VENV)/bin/python -m pip install --quiet --no-deps -e .
	@touch $@

setup-verifiers: $(VERIFIERS_READY) ## verifiers, in an environment of its own: .venv-verifiers, with the versions of constraints-verifiers.txt

# Without Penstock: what plays there needs verifiers and the standard library.
$(VERIFIERS_READY): constraints-verifiers.txt
	@rm -f $@
	$(PYTHON) -m venv $(VERIFIERS_VENV)
	$(VERIFIERS_VENV)/bin/python -m pip install --quiet --no-deps -r constraints-verifiers.txt
	@touch $@

demo: $(READY) ## train a model with the recipe quickstart, into runs/quickstart (-2, -3, ...)
	$(BIN)/penstock train quickstart --curve

# All cores at work: one test process per core and one more, for the tests that wait; and one thread in each, because
# threads that wait for a core that another process holds are worse than none. In the order of the tree: the long files
# come first, so that no core is left alone with one of them at the end.
WORKERS := $(shell expr $$(nproc 2> /dev/null || echo 2) + 1)
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations 10

OTHER_TIERS := --ignore tests/vllm --ignore tests/verifiers --ignore tests/cluster --ignore tests/browser --ignore tests/docs

test: $(READY) ## all tests but the heavy tiers: test-long, crash-quick, test-ray, test-vllm, test-verifiers, test-browser, docs
	$(PYTEST) tests $(OTHER_TIERS) -m 'not crash_tier and not long_tier and not soak_tier'

test-long: $(READY) ## simulations, simulated crashes and random conversations at their full size, and the tests that take tens of seconds
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --durations 25 tests $(OTHER_TIERS) --size full -m 'long_tier or sized'

test-vllm: $(READY) $(VLLM_READY) ## the tests with a real vLLM
	$(BIN)/python -m pytest tests/vllm

test-verifiers: $(READY) $(VERIFIERS_READY) ## the tests with a real verifiers
	$(BIN)/python -m pytest tests/verifiers

# One process: its tests share a cluster of three nodes.
test-ray: $(READY) ## the tests with a real Ray: three nodes on this machine
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/cluster -m 'not soak_tier'

# The browser is the system's: Playwright's own downloads are not taken.
test-browser: $(READY) ## the page in headless Chromium
	@command -v chromium > /dev/null || { apt-get update -qq && apt-get install -y -qq chromium > /dev/null; } || \
		{ echo "Chromium is needed: apt-get install chromium"; exit 1; }
	$(BIN)/python -m pytest tests/browser

# The line that is turned off is about the next major version of mkdocs, which constraints.txt does not install.
docs: $(READY) ## the documentation as a site in build/site; every link and command in it is tried
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/docs
	@echo "build/site/index.html"

reference: $(READY) ## docs/reference.md from the code: every field, every metric
	$(BIN)/python docs/make_reference.py

lint: $(READY) ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY) $(VLLM_READY) ## every benchmark, also against TRL, transformers and vLLM; figures in bench.json
	@$(BIN)/python benchmarks/all.py

crash-quick: $(READY) ## failing disks, signals, and 60 kills of real runs: nothing may be lost, skipped or doubled
	$(BIN)/python -m pytest tests/crash -m crash_tier
	@$(BIN)/python tests/crash/runner.py --kills 60

crash: $(READY) ## the same with 500 kills
	@$(BIN)/python tests/crash/runner.py --kills 500

soak-ray: $(READY) ## 20 random kills of actors over one run on a local cluster
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/cluster -m soak_tier
	@OMP_NUM_THREADS=1 $(BIN)/python tests/cluster/soak.py --kills 20

soak-runs: $(READY) ## whole runs of recipes, and with train ranks in processes of their own: learning, kills, resumes
	$(BIN)/python -m pytest tests/e2e -m soak_tier

soak-judges: $(READY) ## 10,000 calls of judges of every kind, half of them bad
	$(BIN)/python -m pytest tests/unit/judger -m soak_tier

soak: test-long crash soak-ray soak-runs soak-judges ## every tier that can be made larger, at its largest
