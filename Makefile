# Every target makes .venv by itself and reuses it.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: serve test check bench proto links clean

serve: $(VENV)/.installed
	$(BIN)/jetserve serve $(ARGS)

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m "not slow and not demo and not soak and not oracle" $(ARGS)

check: $(VENV)/.installed-dev links
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	cd build/links && ../../$(BIN)/mypy --config-file ../../pyproject.toml -p jetserve

bench: $(VENV)/.installed-dev
	$(BIN)/python -m tests.bench $(ARGS)

links: $(VENV)/.installed-dev
	$(BIN)/python -m tests.links

$(VENV)/.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@

clean:
	rm -rf build dist $(VENV)
