# make train | test | sanitize | bench | lint | gpu | setup | clean
#
# Each sets up .venv by itself, once: the stamps below say what it was made from. No root, and no network but the package index.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
PIP_OPTIONS ?=
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
BUILT := $(VENV)/.built
SOURCES := $(shell find csrc -name '*.cpp' -o -name '*.h' -o -name '*.inc' 2>/dev/null)
CPP_FILES = $(shell find csrc tests/native -name '*.cpp' -o -name '*.h' -o -name '*.inc' -o -name '*.cu' -o -name '*.cuh')
PYTHON_DIRECTORIES := ddpcomm kernels tests bench examples tools setup.py

# Ranks of `make train`: two, or as many as there are GPUs if those are more.
RANKS ?= $(shell gpus=$$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU ' || true); echo $$(( gpus > 2 ? gpus : 2 )))
COMPARE ?=
ARGUMENTS ?=

.PHONY: help setup train test sanitize bench lint format gpu clean

help:
	@echo 'make train   trains a small GPT on $(RANKS) ranks; COMPARE=1: beside torch DDP; ARGUMENTS="--steps 100" and others'
	@echo 'make test    all tests that need no GPU; ARGUMENTS="-k name" and others go to pytest'
	@echo 'make sanitize  csrc/ under the address, undefined behaviour and thread sanitizers, and fuzzing'
	@echo 'make lint    style, types, formatting, import rules'
	@echo 'make bench   the short form of every benchmark, into docs/results'
	@echo 'make gpu     the tests that need an NVIDIA GPU'
	@echo 'make setup   only .venv; make clean removes it and all that was built'

setup: $(BUILT)

$(INSTALLED): pyproject.toml setup.py constraints.txt tools/extras.py
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 10) and "ddpcomm needs Python 3.10 or newer; make PYTHON=...")'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_OPTIONS) -c constraints.txt -e ".[$$($(BIN)/python tools/extras.py)]"
	touch $@

# Only the extension is built again when its sources change. What pip has just built is not.
$(BUILT): $(INSTALLED) $(SOURCES)
	extension="$$(ls -t ddpcomm/_native*.so | head -1)"; \
	test -z "$$(find csrc setup.py -type f -newer "$$extension" -print -quit)" || $(BIN)/python setup.py --quiet build_ext --inplace
	touch $@

# Shares the cores out among the ranks; torchrun would give each rank one core, with a warning.
train: setup
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-$$(( $$(nproc) > $(RANKS) ? $$(nproc) / $(RANKS) : 1 ))} \
	$(BIN)/torchrun --standalone --nproc-per-node $(RANKS) -m examples.train_gpt $(if $(COMPARE),--compare) $(ARGUMENTS)

test: setup
	$(BIN)/python -m pytest -m 'not gpu' $(ARGUMENTS)

bench: setup
	$(BIN)/python -m bench $(ARGUMENTS)

# The sanitizers are part of `make test`, too; here the fuzzing goes on for longer.
sanitize: setup
	DDPCOMM_FUZZ_ROUNDS=$${DDPCOMM_FUZZ_ROUNDS:-5000000} $(BIN)/python -m pytest tests/native $(ARGUMENTS)

lint: setup
	$(BIN)/ruff check $(PYTHON_DIRECTORIES)
	$(BIN)/ruff format --check $(PYTHON_DIRECTORIES)
	$(BIN)/mypy -p ddpcomm -p bench -p examples -p tools
	$(if $(CPP_FILES),$(BIN)/clang-format --dry-run --Werror $(CPP_FILES))
	$(BIN)/python -m tools.check_imports
	$(BIN)/python -m tools.check_sources

format: setup
	$(BIN)/ruff check --fix $(PYTHON_DIRECTORIES)
	$(BIN)/ruff format $(PYTHON_DIRECTORIES)
	$(if $(CPP_FILES),$(BIN)/clang-format -i $(CPP_FILES))

gpu: setup
	$(BIN)/python -m pytest -m gpu tests/gpu $(ARGUMENTS)

clean:
	rm -rf $(VENV) build dist *.egg-info ddpcomm/_native*.so .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
