# Two commands for a fresh machine: `make serve` and `make test`. Both set up .venv first.

PYTHON ?= python3
HOST ?= 127.0.0.1
PORT ?= 8765
MODEL ?=
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
NAMESPACE := build/ns/ramify

.PHONY: serve test check format clean

# Serve a model (the bundled one, or MODEL=DIR) with the browser chat at http://HOST:PORT/
serve: $(STAMP)
	$(BIN)/ramify serve $(if $(MODEL),--model "$(MODEL)") --host $(HOST) --port $(PORT) $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest -q $(ARGS)

# What CI runs after the tests: lint, format, types, import rules
check: $(STAMP) $(NAMESPACE)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pyright
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Ramify needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --editable '.[dev]'
	touch $@

# The folders are mapped to ramify.* by an import hook, which type checkers do not follow
$(NAMESPACE):
	mkdir -p $@
	for d in actors clients gpu protocol; do ln -sfn ../../../$$d $@/$$d; done

clean:
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
