# Two commands are enough: `make run` and `make test`. Both set up what they need, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUN_STAMP := $(VENV)/.installed-train
STAMP := $(VENV)/.installed
# The newest interpreter on this machine, for the far end of the supported range.
NEWEST := $(shell tools/newest-python)
NEWEST_VENV := .venv-newest
NEWEST_STAMP := $(NEWEST_VENV)/.installed
WORKERS ?= 2
# Each worker has a half and takes from another's end when it is done: what a file's tests share is made once, where by
# turns every worker would make it; and the end of the order (tests/conftest.py) are short files.
PYTEST := -m pytest -n $(WORKERS) --dist worksteal
# Tests start many processes that import the library; with compiled files beside the sources each starts half a second
# sooner. Set and empty is how Python reads "write them".
export PYTHONDONTWRITEBYTECODE :=

.PHONY: run setup test test-all test-newest lint format clean help

help:
	@echo "make run          set up, then capibara demo: train on 8 simulated devices, kill -9, resume, report"
	@echo "make test         set up, then the tests that take minutes: one case of each"
	@echo "make test-all     set up, then the whole test suite"
	@echo "make test-newest  what make test runs, under the newest Python (3.12+) and JAX on this machine"
	@echo "make lint         ruff and mypy"
	@echo "make format       ruff's fixes and formatting"
	@echo "make clean        remove the virtual environments and caches"

run: $(RUN_STAMP)
	$(BIN)/capibara demo

# Both ends of the supported range. With -j they are set up side by side, and beside lint.
setup: $(STAMP) $(NEWEST_STAMP)

test: $(STAMP)
	$(BIN)/python $(PYTEST) -m quick $(PYTEST_ARGS)

test-all: $(STAMP)
	$(BIN)/python $(PYTEST) $(PYTEST_ARGS)

test-newest: $(NEWEST_STAMP)
	$(NEWEST_VENV)/bin/python $(PYTEST) -m quick $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# A stamp is the last thing written, so an install that was cut short starts again. To run needs what to train needs;
# what the tests and linters need comes on top, into the same environment.
# Without compiling all of them: of these packages a run imports a part, and compiles that at its first import.
$(RUN_STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --upgrade-strategy only-if-needed -e '.[train]'
	@touch $@

$(STAMP): $(RUN_STAMP)
	$(BIN)/python -m pip install --quiet --upgrade-strategy only-if-needed -e '.[train,serve,dev]'
	@touch $@

$(NEWEST_STAMP): pyproject.toml
	$(NEWEST) -m venv $(NEWEST_VENV)
	$(NEWEST_VENV)/bin/python -m pip install --quiet --upgrade-strategy eager -e '.[train,serve,dev]'
	@touch $@

clean:
	rm -rf $(VENV) $(NEWEST_VENV) .mypy_cache .ruff_cache .hypothesis build dist
