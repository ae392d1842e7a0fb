# `make demo` and `make test` need nothing but Python 3.11+ and make; both keep their environment in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

FAST_TESTS := src tests/unit/values tests/unit/plans tests/unit/costs tests/unit/choosing tests/unit/test_architecture.py \
	tests/unit/test_documentation.py tests/unit/test_release.py

.PHONY: help test check quick-checks demo docs format clean fuzz soak flower
.DEFAULT_GOAL := test

# Two workers more than there are processors: many tests wait for processes of their own. Workers begin with neighbouring
# tests, which share what they set up, and take over from each other at the end.
NUM_WORKERS := $(shell $(PYTHON) -c "import os; print((os.cpu_count() or 1) + 2)")
PYTEST = $(BIN)/python -m pytest -q -n $(NUM_WORKERS) --dist worksteal

PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --editable

# A stamp is older than pyproject.toml only when what is to be installed may have changed.
$(VENV)/python-made:
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/demo-installed: pyproject.toml $(VENV)/python-made
	$(PIP_INSTALL) '.[demo]'
	touch $@

$(VENV)/installed: pyproject.toml $(VENV)/python-made
	$(PIP_INSTALL) '.[test,check,demo,browser,integrations]'
	touch $@ $(VENV)/demo-installed

help:  ## What one can make.
	@sed -nE 's/^([a-z]+):.*  ## (.*)/\1\t\2/p' Makefile | expand -t 10

demo: $(VENV)/demo-installed  ## Trains a classifier on 4 logical CPU devices.
	$(BIN)/crossdevice demo

$(VENV)/docs-installed: pyproject.toml $(VENV)/python-made
	$(PIP_INSTALL) '.[docs]'
	touch $@

docs: $(VENV)/docs-installed  ## The documentation site, in build/docs; warnings and broken internal links are errors.
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --fresh-env --write-all --quiet docs build/docs
	@echo "open build/docs/index.html"

# What others get from the public index: a stamp spares the minute where nothing that matters has changed.
SHIPPED := pyproject.toml README.md LICENSE $(shell find src -name '*.py' -o -name '*.toml' -o -name '*.html' -o -name py.typed)

$(VENV)/extras-resolve: pyproject.toml checks/resolution.py checks/public_index.py $(VENV)/installed
	$(BIN)/python checks/resolution.py
	touch $@

$(VENV)/wheel-works: $(SHIPPED) $(wildcard checks/*.py) $(shell find docs -name '*.md') $(VENV)/installed
	$(BIN)/python checks/wheel.py
	touch $@

FROM_THE_INDEX := $(if $(OFFLINE),,$(VENV)/extras-resolve $(VENV)/wheel-works)

# `make check OFFLINE=1` leaves out what needs the public index.
check: $(VENV)/installed quick-checks $(FROM_THE_INDEX)  ## Format, lint, types, layers, fast tests, extras and the wheel.
	$(if $(OFFLINE),@echo "OFFLINE: neither the extras nor the wheel were checked")

quick-checks: $(VENV)/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(PYTEST) $(FAST_TESTS)

# The page that plays plans is tested in a real browser; without the right to install one its test says so and is skipped.
$(VENV)/browser-looked-for: $(VENV)/installed
	{ command -v chromium && command -v chromedriver; } >/dev/null || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && \
		apt-get update -qq && apt-get install -y -qq chromium chromium-driver >/dev/null; } || \
		echo "no Chromium with its driver here, and none could be installed"
	touch $@

# Three hosts are three networks of this machine; without the right to make them their test is skipped, too.
$(VENV)/network-looked-for: $(VENV)/installed
	command -v ip >/dev/null || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && \
		apt-get update -qq && apt-get install -y -qq iproute2 >/dev/null; } || \
		echo "no iproute2 here, and none could be installed"
	touch $@

# Traces are read by Perfetto's own trace processor; without Node.js that test says so and is skipped.
$(VENV)/trace-processor-looked-for: tests/perfetto/install_trace_processor.py $(VENV)/installed
	$(BIN)/python $< || echo "no trace processor here, and none could be installed"
	touch $@

LOOKED_FOR := $(addprefix $(VENV)/,browser-looked-for network-looked-for trace-processor-looked-for)

test: $(VENV)/installed $(LOOKED_FOR)  ## Everything that can run on this machine.
	$(PYTEST) --durations=10

# Flower needs another uv than `check`: it gets an environment of its own.
$(VENV)/flower-installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)/flower
	$(VENV)/flower/bin/python -m pip install --quiet --disable-pip-version-check 'torch==2.13.0' pytest pytest-timeout
	$(VENV)/flower/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[flower]' 'flwr[simulation]'
	touch $@

flower: $(VENV)/flower-installed  ## The strategies for Flower, with the real one; `make test` skips them where it is missing.
	$(VENV)/flower/bin/python -m pytest -q tests/unit/integrations/test_flower.py tests/unit/integrations/test_flower_simulation.py

format: $(VENV)/installed  ## Formats, and fixes what can be fixed automatically.
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:  ## Removes the environment and everything that was built.
	rm -rf $(VENV) dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis

fuzz: $(VENV)/installed  ## Random calls against an independent model; FUZZ_SECONDS (600) or FUZZ_CASES, FUZZ_WORKERS (all cores) and FUZZ_SEED (fresh, printed).
	$(BIN)/python tests/fuzz

soak: $(VENV)/installed  ## Calls of all kinds for SOAK_SECONDS (3600): what grows or slows down is printed, and fails.
	$(BIN)/python tests/soak
