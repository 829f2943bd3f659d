# Two commands: `make run` starts Descant, `make test` checks everything.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: run test

run: .venv/installed
	$(BIN)/descant $(ARGS)

test: .venv/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest

# Each stamp is newer than pyproject.toml, so nothing is installed again until that file changes.
.venv/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 10) else "Descant needs Python 3.10 or newer, this is " + sys.version.split()[0] + ". Try: make PYTHON=python3.12 " + "run")'
	$(PYTHON) -m venv .venv

.venv/installed: pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

.venv/installed-test: pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	touch $@ .venv/installed
