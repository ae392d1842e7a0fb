# `make demo` and `make test` need nothing but Python 3.11+ and make; both keep their environment in .venv, and change
# nothing outside this folder.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

FAST_TESTS := src tests/unit/values tests/unit/plans tests/unit/costs tests/unit/choosing tests/unit/test_architecture.py \
	tests/unit/test_documentation.py tests/unit/test_release.py

.PHONY: help test test-all test-latest check quick-checks generated demo docs lock format clean fuzz soak flower battery
.DEFAULT_GOAL := test

# Hundreds of processes would compile the same modules again.
unexport PYTHONDONTWRITEBYTECODE

# One worker more than there are processors: many tests wait for processes of their own, and each worker imports and collects
# everything. Workers begin with neighbouring tests, which share what they set up, and take over from each other at the end.
NUM_WORKERS := $(shell $(PYTHON) -c "import os; print((os.cpu_count() or 1) + 1)")
PYTEST_OPTIONS := -m pytest -q -n $(NUM_WORKERS) --dist worksteal
PYTEST := $(BIN)/python $(PYTEST_OPTIONS)

PIP_INSTALL := -m pip install --quiet --disable-pip-version-check
# Every package in its version of constraints.txt, those that build this one included.
INSTALL := $(BIN)/python $(PIP_INSTALL) --constraint constraints.txt --no-build-isolation --editable

$(VENV)/python-made: constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP_INSTALL) --constraint constraints.txt hatchling hatch-fancy-pypi-readme editables
	touch $@

# The extras of pyproject.toml. A stamp is older than these two files only when what is to be installed may have changed.
$(VENV)/%-installed: pyproject.toml $(VENV)/python-made
	@echo "installing the packages of the extra '$*' (pyproject.toml) into $(VENV)"
	$(INSTALL) '.[$*]'
	touch $@

lock: $(VENV)/check-installed  ## Writes the newest versions that fit together to constraints.txt.
	$(BIN)/python checks/lock.py

# Nothing is locked here, and nothing is kept from an earlier run: what the ranges of pyproject.toml allow today.
LATEST := $(VENV)/latest
test-latest: $(VENV)/check-installed  ## All tests with the newest of everything; prints what differs from constraints.txt.
	$(PYTHON) -m venv --clear $(LATEST)
	$(LATEST)/bin/python $(PIP_INSTALL) --editable '.[test,test-all,demo]'
	$(BIN)/python checks/lock.py --compare $(LATEST)
	$(LATEST)/bin/python $(PYTEST_OPTIONS)

help:  ## What one can make.
	@sed -nE 's/^([a-z-]+):.*  ## (.*)/\1\t\2/p' Makefile | expand -t 14

demo: $(VENV)/demo-installed  ## Trains a classifier on 1, 2 and 4 devices and in 2 processes, to the same bits.
	$(BIN)/crossdevice demo

docs: $(VENV)/docs-installed  ## The documentation site, in build/docs; warnings and broken internal links are errors.
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --fresh-env --write-all --quiet docs build/docs
	@echo "open build/docs/index.html"

# What others get from the public index: a stamp spares the minute where nothing that matters has changed.
SHIPPED := pyproject.toml README.md LICENSE $(shell find src -name '*.py' -o -name '*.toml' -o -name '*.html' -o -name py.typed)

$(VENV)/extras-resolve: pyproject.toml constraints.txt checks/resolution.py checks/public_index.py $(VENV)/check-installed
	$(BIN)/python checks/resolution.py
	touch $@

$(VENV)/wheel-works: $(SHIPPED) $(wildcard checks/*.py) $(shell find docs -name '*.md') $(VENV)/check-installed
	$(BIN)/python checks/wheel.py
	touch $@

FROM_THE_INDEX := $(if $(OFFLINE),,$(VENV)/extras-resolve $(VENV)/wheel-works)

# `make check OFFLINE=1` leaves out what needs the public index.
check: quick-checks $(FROM_THE_INDEX)  ## Format, lint, types, layers, fast tests, extras and the wheel.
	$(if $(OFFLINE),@echo "OFFLINE: neither the extras nor the wheel were checked")

quick-checks: $(VENV)/check-installed $(VENV)/test-installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(PYTEST) -m 'not more' $(FAST_TESTS)

# The page that plays plans is tested in a real browser; without the right to install one its test says so and is skipped.
$(VENV)/browser-looked-for: $(VENV)/python-made
	{ command -v chromium && command -v chromedriver; } >/dev/null || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && \
		echo "installing chromium by apt-get" && apt-get update -qq && apt-get install -y -qq chromium chromium-driver >/dev/null; } || \
		echo "no Chromium with its driver here, and none could be installed"
	touch $@

# Three hosts are three networks of this machine; without the right to make them their test is skipped, too.
$(VENV)/network-looked-for: $(VENV)/python-made
	command -v ip >/dev/null || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && \
		echo "installing iproute2 by apt-get" && apt-get update -qq && apt-get install -y -qq iproute2 >/dev/null; } || \
		echo "no iproute2 here, and none could be installed"
	touch $@

# Traces are read by Perfetto's own trace processor; without Node.js that test says so and is skipped.
$(VENV)/trace-processor-looked-for: tests/perfetto/install_trace_processor.py $(VENV)/test-installed
	$(BIN)/python $< || echo "no trace processor here, and none could be installed"
	touch $@

LOOKED_FOR := $(addprefix $(VENV)/,browser-looked-for network-looked-for trace-processor-looked-for)

test: $(VENV)/test-installed  ## Every law, on NumPy and PyTorch, and two real launches; in minutes.
	$(PYTEST) --nothing-left -m 'not more' --durations=10

# Here more is installed: TensorFlow, JAX, Triton, transformers, timm and others into .venv; by root also Chromium and iproute2.
test-all: $(addsuffix -installed,$(addprefix $(VENV)/,test test-all demo docs)) $(LOOKED_FOR)  ## What `make test` leaves out: other libraries, the browser, three hosts, repetitions.
	$(PYTEST) --nothing-left -m more --durations=10

# Flower needs another uv than `check`: it gets an environment of its own.
$(VENV)/flower-installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)/flower
	$(VENV)/flower/bin/python $(PIP_INSTALL) --constraint constraints.txt torch pytest pytest-timeout
	$(VENV)/flower/bin/python $(PIP_INSTALL) --editable '.[flower]' 'flwr[simulation]'
	touch $@

flower: $(VENV)/flower-installed  ## The strategies for Flower, with the real one; other targets skip them.
	$(VENV)/flower/bin/python -m pytest -q tests/unit/integrations/test_flower.py tests/unit/integrations/test_flower_simulation.py

generated: $(VENV)/test-installed  ## Writes exports, contracts and tables that follow from the registries.
	$(BIN)/python checks/generated.py

format: $(VENV)/check-installed  ## Formats, and fixes what can be fixed automatically.
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:  ## Removes the environment and everything that was built.
	rm -rf $(VENV) dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis

battery: $(VENV)/test-installed  ## All of PyTorch's own tests of backends, on gloo and on ours, with 2 and 3 ranks: half an hour.
	CROSSDEVICE_WHOLE_BATTERY=1 $(BIN)/python -m pytest -q -m more tests/multiprocess/test_torch_battery.py

fuzz: $(VENV)/test-installed  ## Random calls against an independent model; FUZZ_SECONDS (600) or FUZZ_CASES, FUZZ_WORKERS (all cores) and FUZZ_SEED (fresh, printed).
	$(BIN)/python tests/fuzz

soak: $(VENV)/test-installed  ## Calls of all kinds for SOAK_SECONDS (3600): what grows or slows down is printed, and fails.
	$(BIN)/python tests/soak
