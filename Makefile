# Every target makes its virtual environment by itself and reuses it. `make help` lists them.
#   make test PYTHON=python3.12    another Python, in .venv-3.12
#   make serve ARGS="--model demo-gemma"
#   make serve EXTRA=tpu           on a TPU VM: jax with libtpu
.DEFAULT_GOAL := help
SHELL := /bin/bash

ifeq ($(origin PYTHON),undefined)
PYTHON := python3
VENV ?= .venv
else
# A pyenv shim runs only while its version is selected; the Python behind it always does.
override PYTHON := $(or $(shell $(PYTHON) -c 'import sys; print(sys.executable)' 2>/dev/null), \
  $(lastword $(sort $(wildcard $(shell pyenv root 2>/dev/null)/versions/*/bin/$(PYTHON)))),$(PYTHON))
VENV ?= .venv-$(or $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null),unknown)
endif
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --quiet --editable
ARGS ?=
EXTRA ?=
# Without the demo models, long runs and outside implementations: .ci/run has a step for each of them.
QUICK := not slow and not demo and not soak and not oracle

.PHONY: help serve test check format bench proto links clean

help: ## what there is to make
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-8s%s\n", $$1, $$2}' $(MAKEFILE_LIST)

serve: $(VENV)/.installed$(addprefix -,$(EXTRA)) ## serve the demo model: gRPC on 9000, HTTP on 8000
	@$(BIN)/jetserve serve $(ARGS)

test: $(VENV)/.installed-dev ## the quick tests
	@$(BIN)/python -m pytest -m "$(QUICK)" $(ARGS)

check: $(VENV)/.installed-dev links ## lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	cd build/links && $(abspath $(BIN))/mypy --config-file $(CURDIR)/pyproject.toml -p jetserve

format: $(VENV)/.installed-dev ## rewrite the sources as `check` wants them
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

bench: $(VENV)/.installed-dev ## measure; ARGS="--quick" is one step of each, ARGS="--help" tells more
	@$(BIN)/python -m tests.bench $(ARGS)

proto: $(VENV)/.installed-dev links ## regenerate the Python code of server/protos/*.proto
	cd build/links && $(abspath $(BIN))/python -m grpc_tools.protoc -I . --python_out=. --pyi_out=. jetserve/server/protos/*.proto

links: $(VENV)/.installed-dev ## the package tree for tools that cannot read package-dir
	@$(BIN)/python -m tests.links

clean: ## remove what was built, environments too
	rm -rf build dist *.egg-info .venv .venv-[0-9]* .mypy_cache .pytest_cache .ruff_cache

# A stamp stands for what pip was last asked to install; it is stale when pyproject.toml is newer or Python is gone.
define MAKE_VENV
test -x $(BIN)/python || { \
  $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
    echo "jetserve needs Python 3.11 or newer; $(PYTHON) is not one that runs here. Name another: make PYTHON=python3.12" >&2; exit 1; }; \
  echo "making $(VENV)"; $(PYTHON) -m venv --clear $(VENV); }
endef
NO_PYTHON := $(shell test -x $(BIN)/python || echo NO_PYTHON)

.PHONY: NO_PYTHON
NO_PYTHON:

$(VENV)/.installed $(VENV)/.installed-tpu: pyproject.toml $(NO_PYTHON)
	@$(MAKE_VENV)
	@echo "installing jetserve into $(VENV); the first time takes minutes"
	@$(PIP) '.$(if $(EXTRA),[$(EXTRA)])'
	@touch $@

$(VENV)/.installed-dev: pyproject.toml $(NO_PYTHON)
	@$(MAKE_VENV)
	@echo "installing jetserve and its development tools into $(VENV); the first time takes minutes"
	@$(PIP) '.[dev]'
	@touch $(VENV)/.installed $@
