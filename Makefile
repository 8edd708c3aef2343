# Two commands for a fresh machine: `make serve` and `make test`. Both set up .venv first; `make serve`
# installs what serving needs, the others add the tools for tests and checks.

PYTHON ?= python3
HOST ?= 127.0.0.1
PORT ?= 8765
MODEL ?=
# the least that the server logs; info tells of each session
LOG ?= warning
ARGS ?=
# processes that share the tests: one more than there are cores, as many tests wait; at most 8
JOBS ?= $(shell n=$$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2); echo $$((n < 7 ? n + 1 : 8)))
# a test that hangs says where, and fails with its process
HANGS := -o faulthandler_timeout=300 -o faulthandler_exit_on_timeout=true
VENV := .venv
BIN := $(VENV)/bin
SERVING := $(VENV)/.installed
TESTING := $(VENV)/.installed-dev
ENGINE := src/ramify-engine
# without setuptools' advice on folders that are named like a package: it says nothing that concerns this clone
PIP := PYTHONWARNINGS='ignore:Editable installation' $(BIN)/python -m pip

# the chat page's tools: for its tests, and to build it
PAGE := clients/web/page
PAGE_TOOLS := $(if $(shell command -v npm 2>/dev/null),$(PAGE)/node_modules/.package-lock.json)

.PHONY: serve setup test check lint types pyright imports check-web format clean page

# Serve a model (the bundled one, or MODEL=DIR) with the browser chat at http://HOST:PORT/
serve: $(SERVING)
	@$(BIN)/ramify serve $(if $(MODEL),--model "$(MODEL)") --host $(HOST) --port $(PORT) --log-level $(LOG) $(ARGS)

# Bytecode is kept (where the environment forbids it too): what one of the processes has compiled, and where
# pytest has rewritten assertions, the other processes and all servers that tests start only read
test: export PYTHONDONTWRITEBYTECODE :=
test: $(TESTING) $(PAGE_TOOLS)
	$(if $(PAGE_TOOLS),,@echo "No npm here: the chat page is not tested, nor compared with its sources.")
	$(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal $(HANGS) $(ARGS)

# What the tests need, without running them
setup: $(TESTING) $(PAGE_TOOLS)

# What CI runs after the tests: lint, format, types, import rules. `make -j2 -O check`: two of them at a time
check: types pyright imports lint

lint: $(TESTING)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(TESTING)
	$(BIN)/mypy
	$(BIN)/mypy tests/clients/program/typed.py

pyright: $(TESTING)
	$(BIN)/pyright

imports: $(TESTING)
	$(BIN)/lint-imports

# The JavaScript client: types, then tests. Needs Node 20 and npm, which fetches TypeScript and the AI SDK
check-web:
	@if ! command -v npm > /dev/null; then \
		echo "SKIPPED: the JavaScript client is not checked, there is no npm" >&2; \
	elif ! (cd clients/web && npm ci --silent --no-audit --no-fund); then \
		echo "SKIPPED: the JavaScript client is not checked, npm cannot fetch TypeScript and the AI SDK" >&2; \
	else \
		cd clients/web && npm run check && npm test; \
	fi
	@if [ -n "$(UI)" ]; then cd tests/e2e/assistant_ui && npm ci --silent --no-audit --no-fund; \
	else echo "SKIPPED: tests with assistant-ui are not prepared (make check-web UI=1)" >&2; fi

# Build the chat page from its sources (clients/web/page) to what the server gives out (clients/web/site)
page: $(PAGE)/node_modules/.package-lock.json
	cd $(PAGE) && npm run build

format: $(TESTING)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(SERVING): pyproject.toml $(ENGINE)/pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Ramify needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	@test -x $(BIN)/python || { echo "Making a virtual environment in $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@$(PIP) install --quiet --upgrade pip
	@echo "Installing what serving needs, 1.4 GB or more: this takes minutes"
	@$(PIP) install --quiet --editable '.[serve]' --editable $(ENGINE)
	@touch $@

$(TESTING): $(SERVING)
	@echo "Installing the tools for tests, 1.3 GB or less"
	@$(PIP) install --quiet --editable '.[serve,dev]' --editable $(ENGINE)
	@touch $@

$(PAGE)/node_modules/.package-lock.json: $(PAGE)/package-lock.json
	cd $(PAGE) && npm ci --silent && touch node_modules/.package-lock.json || echo "SKIPPED: the chat page is not tested, npm cannot fetch its tools" >&2

clean:
	rm -rf build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
