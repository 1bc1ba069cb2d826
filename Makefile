# make demo   set up, then draw perplexity against length for the embedded checkpoint
# make test   set up, then run the tests
# make check  set up, then lint, types, tests
# make clean  remove what set-up and the demo made

PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
BIN := $(VENV)/bin

.PHONY: setup demo test lint check clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml $(CONSTRAINTS)
	@echo "== set-up: creating $(VENV) and installing rope_patch with its dependencies (a few minutes, once)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e ".[dev]"
	@touch $@

demo: setup
	@echo "== demo: perplexity against length on the embedded checkpoint (about two minutes)"
	$(BIN)/python recipes/perplexity.py recipes/configs/demo.yaml

test: setup
	@echo "== tests, one process per core with one thread each (more would only wait for each other)"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto

lint: setup
	@echo "== lint and types"
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

check: lint test

clean:
	rm -rf $(VENV) runs build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache
