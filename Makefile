# Two commands do everything: `make demo` and `make test`. `make help` lists the rest.

PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=
# One more than the cores that the tests are meant for: those of several processes often wait.
PROCESSES ?= 3

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

# Without stored bytecode, each process compiles all of the modules that it imports: that takes three
# times as long as to import them.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test lint style types suite format docs docs-serve package bench charts soak chaos contract clean

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.demo ## install, then train a classifier over several virtual CPU devices
	@$(BIN)/python -m distribax demo

# mypy runs beside the tests, which often wait; what ruff finds is told at once.
test: style ## lint, types and all tests
	@$(MAKE) --no-print-directory --jobs 2 types suite

lint: style types ## ruff (lint and format) and mypy

style: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.test
	$(BIN)/mypy

suite: $(VENV)/.test
	$(BIN)/python -m pytest --numprocesses $(PROCESSES) --dist loadgroup --no-loadscope-reorder \
	  $(PYTEST_ARGS)

format: $(VENV)/.test ## fix what ruff can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.docs ## build the web site into site/, and test it: links, and a browser if there is one
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	DISTRIBAX_SITE=site $(BIN)/python -m pytest -m site tests/docs $(PYTEST_ARGS)

docs-serve: $(VENV)/.docs ## show the web site at http://127.0.0.1:8000, and again at each change
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs serve

package: $(VENV)/.test ## build the wheel and the source archive into dist/, and check them
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*

bench: $(VENV)/.test ## print and save the benchmark table
	$(BIN)/python -m benchmarks.run

charts: $(VENV)/.test ## measure again, and draw, what the charts in docs/images show
	$(BIN)/distribax bench --peers --json docs/images/bench.json --svg docs/images/bench.svg
	$(BIN)/python docs/benchmark_chart.py

soak: $(VENV)/.test ## the long tests
	DISTRIBAX_CONTRACT=all $(BIN)/python -m pytest -m soak --timeout 1800 $(PYTEST_ARGS)

chaos: $(VENV)/.test ## kill and stop hundreds of workers and servers; nothing may be lost
	$(BIN)/python -m pytest -m chaos -s --timeout 3600 $(PYTEST_ARGS)

contract: $(VENV)/.test ## all cases: every size and mode, and the contract in 2 x 1 and 2 x 2 workers and devices
	DISTRIBAX_CONTRACT=all $(BIN)/python -m pytest --numprocesses 2 tests/multidevice tests/unit/variables \
	  $(PYTEST_ARGS)
	DISTRIBAX_CONTRACT=all $(BIN)/python -m pytest -m soak tests/multiprocess/contract $(PYTEST_ARGS)
	$(BIN)/python -m pytest --numprocesses 2 -m thorough $(PYTEST_ARGS)
	DISTRIBAX_COMPILE=as-users $(BIN)/python -m pytest --numprocesses 2 tests/multidevice tests/unit/variables \
	  $(PYTEST_ARGS)

clean: ## remove the virtual environment and all caches
	rm -rf $(VENV) build dist site .mypy_cache .pytest_cache .ruff_cache .xla_cache .hypothesis
	find src tests benchmarks examples -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

# The stamps are files in the virtual environment: nothing is installed again until pyproject.toml
# changes. The package itself is installed editable, so that a change of the code needs no step.

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "distribax needs Python 3.11 or newer; try: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -m venv --clear $(VENV) || \
	  { echo "No virtual environment could be made; on Debian: apt install python3-venv" >&2; exit 1; }
	@touch $@

$(VENV)/.demo: $(VENV)/.made pyproject.toml
	$(call install,.)
	@touch $@

$(VENV)/.test: $(VENV)/.made pyproject.toml
	$(call install,.[test])
	@touch $@ $(VENV)/.demo

$(VENV)/.docs: $(VENV)/.made pyproject.toml
	$(call install,.[test$(comma)docs])
	@touch $@ $(VENV)/.test $(VENV)/.demo

comma := ,

# Shows one line per package; pip writes its warnings and errors by itself. Python compiles the
# modules that are used when they are imported: compiling all of them takes longer than the demo.
define install
	@echo "Installing into $(VENV); this happens once:"
	@$(PIP) install --no-compile --progress-bar off --editable '$(1)' | awk ' \
	  /^ *(Downloading|Processing|Using cached) .*\.whl( |$$)/ { \
	    sub(/^ *(Downloading|Processing|Using cached) /, ""); sub(/^[^ ]*\//, ""); \
	    split($$1, name, "-"); size = $$2 ~ /^\([0-9]/ ? $$2 " " $$3 : ""; \
	    print "  " name[1], name[2], size; fflush() } \
	  /^Installing collected packages/ { print "Unpacking them ..."; fflush() } \
	  /^Successfully installed/ { done = 1 } \
	  END { exit !done }'
endef
