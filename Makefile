# One entry point each; CI runs the same targets.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help setup check test test-matrix deploy red-team wheel docs notebooks bench bench-peers compare-base demo format clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(STAMP)  ## create .venv with the pinned dependencies

$(STAMP): pyproject.toml reproduction/pyproject.toml constraints.txt
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]' --editable ./reproduction
	touch $@

check: setup  ## ruff, mypy --strict, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: setup  ## the whole test suite, including doctests and slow tests
	$(BIN)/pytest -n 2 --dist worksteal --cov --cov-report=term:skip-covered --cov-fail-under=95

test-matrix: setup  ## tests that assert bits, with one machine factor changed at a time
	$(BIN)/python tools/test_matrix.py

deploy: setup  ## deployments that are killed, attacked and resumed on loopback (minutes)
	PARSIFL_DEPLOY=1 $(BIN)/pytest tests/flower/test_on_demand.py tests/flower/test_namespaces.py

red-team: setup  ## search for questions that isolate a patient, 2,500 for each family (minutes)
	PARSIFL_RED_TEAM=2500 $(BIN)/pytest -s tests/sites/deployment/test_adversary.py

wheel: setup  ## the wheel with its extras in a new environment: demo, and a run on Ray
	$(BIN)/python tools/check_wheel.py build/wheel

docs: setup  ## the documentation site in site/, with warnings as errors
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

notebooks: setup  ## the examples as notebooks, in notebooks/
	$(BIN)/jupytext --quiet --to ../notebooks//ipynb examples/*.py

bench: setup  ## ratios to plain PyTorch and to the hardware bound; needs an idle machine
	$(BIN)/python benchmarks/all.py build/bench

compare-base: setup  ## compare results bit for bit with those of the commit REF
	$(BIN)/python tools/compare_base.py $(REF)

bench-peers: setup  ## the same round in pfl, fluke and Flower's simulation
	mkdir -p build && $(BIN)/python benchmarks/peers/run.py build/peers.json

demo: setup  ## six algorithms on the digits data, with a report
	$(BIN)/parsifl demo --out runs/demo

format: setup  ## apply ruff's fixes and formatting
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove the environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .coverage
