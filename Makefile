PYTHON ?= python3
VENV ?= .venv
EXTRA ?= dev
JOBS ?= 2
ARGS ?=

BIN := $(VENV)/bin
SELECT :=
comma := ,
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

.NOTPARALLEL:
.PHONY: help train pipeline zero-table test test-full lint types unit format install clean

help: ## Show this
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo '  Variables: PYTHON=$(PYTHON) VENV=$(VENV) JOBS=$(JOBS) ARGS="for the example or for pytest"'

# Where there is a GPU, with a jax that uses it.
GPU := $(if $(shell nvidia-smi -L 2>/dev/null),$(comma)cuda13)
# The compiler for GPUs, which the tests bring, would look for one.
PLATFORM := $(if $(GPU),,JAX_PLATFORMS=cpu)
train: $(VENV)/.with-examples$(GPU) ## Train the example language model
	@$(PLATFORM) $(BIN)/python examples/train_lm.py $(ARGS)

pipeline: $(VENV)/.with-examples$(GPU) ## Train one in a pipeline, with tensor parallelism
	@$(PLATFORM) $(BIN)/python examples/pipeline_3d.py $(ARGS)

zero-table: $(VENV)/.with-examples$(comma)gpu-compile ## Compile the ZeRO paper's table for 64 H100s
	@$(BIN)/python examples/zero_table.py $(ARGS)

test: $(VENV)/.with-dev lint types unit ## Lint, format, types, doctests, tests

test-full: SELECT := -m "full or not full"
test-full: test ## The same with the whole products of options: slow

lint: $(VENV)/.with-dev
	@$(BIN)/ruff check --quiet --output-format concise
	@$(BIN)/ruff format --quiet --check || { echo 'Run: make format'; exit 1; }
	@echo 'lint and format: ok'

types: $(VENV)/.with-dev
	@out=$$($(BIN)/pyright --pythonpath $(BIN)/python) || { echo "$$out"; exit 1; }
	@echo 'types: ok'

unit: $(VENV)/.with-test ## Doctests and tests only
	@$(BIN)/python -m pytest -q -n $(JOBS) $(SELECT) --doctest-modules --doctest-glob=README.md \
	  tests zerojax $(wildcard README.md) $(ARGS)

format: $(VENV)/.with-dev ## Format the code and sort its imports
	@$(BIN)/ruff check --quiet --fix --exit-zero
	@$(BIN)/ruff format

install: $(VENV)/.with-$(EXTRA) ## Only install, with EXTRA=dev, test, examples, ...
	@:

clean: ## Remove the environments and the caches
	@rm -rf .venv .venv312 .pytest_cache .ruff_cache .hypothesis dist
	@find . -path './.*' -prune -o -type d -name __pycache__ -prune -exec rm -rf {} +

# Again whenever pyproject.toml changes. dev includes test, and test includes the other two.
$(VENV)/.with-%: pyproject.toml
	$(require_python)
	@echo 'installing zerojax[$*] into $(VENV) ...'
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --editable '.[$*]'
	@touch $(addprefix $(VENV)/.with-,$* $(if $(filter dev,$*),test examples examples$(comma)gpu-compile))

version = $(shell $(PYTHON) -c 'import sys; v = sys.version_info; \
  print("ok" if v >= (3, 11) else "is %d.%d" % v[:2])' 2>/dev/null)
require_python = $(if $(filter ok,$(version)),,$(error zerojax needs Python 3.11 or newer, and \
  $(PYTHON) $(or $(version),does not run). Name another: make $(MAKECMDGOALS) PYTHON=python3.12))
