# `make serve` and `make test` do all set-up themselves: a virtual environment in .venv, installed again when pyproject.toml, setup.py or
# the C++ sources change (the native executor is compiled on the way).
FIT := import ensurepip, sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for python in python3.12 python3.13 python3.11 python3; do $$python -c '$(FIT)' 2>/dev/null && break; done; echo $$python)
VENV := .venv
BIN := $(VENV)/bin
GPU_PYTHON ?= python3
ARGS ?=
WORKERS ?= 2
NATIVE := $(wildcard kernels/native/*.cpp kernels/native/*.h kernels/native/ops/*.h)

.PHONY: help serve test test-all lint sanitize gpu-check install clean
.DEFAULT_GOAL := help

help:  ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(VENV)/.installed: pyproject.toml setup.py $(NATIVE)
	@test -x $(BIN)/pip || { $(PYTHON) -c '$(FIT)' && $(PYTHON) -m venv --clear $(VENV); } || \
		{ echo "foretoken needs Python 3.11 or newer with its venv module (apt install python3-venv); name one: make PYTHON=python3.12"; exit 1; }
	@echo "Installing foretoken into $(VENV) (the first time: a few minutes, mostly torch; then seconds to compile) ..."
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

test: lint  ## ruff, pyright and the tests (15 minutes on 2 cores; WORKERS=0: in one process, for a debugger)
	$(BIN)/python -m pytest -m "not slow" -n $(WORKERS) --dist loadfile $(ARGS)

test-all: lint $(VENV)/.clients  ## everything, the slow checks and the clients too
	$(BIN)/python -m pytest $(ARGS)
	PYTHONPATH=$(CURDIR)/$(VENV)/clients-2 $(BIN)/python -m pytest tests/clients/test_openai.py tests/clients/test_instructor.py

# The clients that tests/clients run. Those of the extra clients-2 lie beside the others, for a run that looks there first. Without npm the
# test of Node's client is skipped.
$(VENV)/.clients: $(VENV)/.installed
	@echo "Installing the clients that are tested into $(VENV) (some minutes) ..."
	@PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --progress-bar on -e '.[dev,bench,clients]'
	@$(BIN)/python -m pip install --quiet --upgrade --no-deps --target $(VENV)/clients-2 'openai>=2,<3' 'instructor>=1.17' 'jiter<0.15'
	@if command -v npm >/dev/null; then npm install --silent --no-audit --no-fund --prefix $(VENV) openai@7; fi
	@touch $@

# A copy of the sources with a library of its own, so that the installed one stays as it is.
sanitize: install  ## the native executor's tests under AddressSanitizer and UndefinedBehaviorSanitizer
	@rm -rf build/sanitize && mkdir -p build/sanitize
	@cp -r __init__.py __main__.py server engine proposers kernels setup.py pyproject.toml README.md LICENSE build/sanitize/
	@rm -f build/sanitize/kernels/_native*.so && ln -sfn . build/sanitize/foretoken
	cd build/sanitize && $(CURDIR)/$(BIN)/python -W ignore setup.py --quiet build_ext --inplace --sanitize
	PYTHONPATH=build/sanitize ASAN_OPTIONS=detect_leaks=0:halt_on_error=1 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)" \
	$(BIN)/python -m pytest -p no:cacheprovider tests/kernels -k native $(ARGS)

# Nothing is installed: the machine's own Python, the sources through a link, and no native library. For a GPU machine without a network.
gpu-check:  ## tests and measures the GPU path in under 9 minutes; writes docs/benchmarks/gpu-*.md
	@mkdir -p build/gpu && ln -sfn ../.. build/gpu/foretoken
	PYTHONPATH=build/gpu $(GPU_PYTHON) -m foretoken.engine.bench.gpu_check $(ARGS)

clean:  ## remove the virtual environment and what builds left behind
	rm -rf $(VENV) .typing build dist *.egg-info
