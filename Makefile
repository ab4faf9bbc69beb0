# `make serve` and `make test` do all set-up themselves: a virtual environment in .venv, installed once per change of pyproject.toml.
PYTHON ?= $(shell command -v python3.12 >/dev/null 2>&1 && python3.12 --version >/dev/null 2>&1 && echo python3.12 || echo python3)
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=

.PHONY: serve test test-all lint check install clean
.DEFAULT_GOAL := help

help:  ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(VENV)/.installed: pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing foretoken into $(VENV) (the first time: a few minutes, mostly torch) ..."
	@$(BIN)/python -m pip install --quiet --upgrade pip
	@PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --progress-bar on -e '.[dev,bench]'
	@mkdir -p .typing && ln -sfn .. .typing/foretoken
	@touch $@

install: $(VENV)/.installed  ## make the virtual environment and install the package

serve: install  ## serve the embedded model; options in ARGS, e.g. make serve ARGS="--port 9000"
	@$(BIN)/foretoken serve $(ARGS)

lint: install  ## ruff and pyright
	$(BIN)/ruff check .
	$(BIN)/pyright

test: lint  ## ruff, pyright and the tests (under 15 minutes on 2 cores)
	$(BIN)/python -m pytest -m "not slow" $(ARGS)

test-all: lint  ## everything, the slow checks too
	$(BIN)/python -m pytest $(ARGS)

clean:  ## remove the virtual environment and what builds left behind
	rm -rf $(VENV) .typing build dist *.egg-info
