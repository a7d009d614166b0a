# Every target does its own set-up on a fresh machine, and a second call does only what changed.
#
# Which Python: by default one virtual environment, .venv, made with BASE_PYTHON and filled with the
# pins of requirements/. `make test PYTHON=python3` uses that interpreter as it is instead: nothing
# is installed into it, the library is built in place, and it must have torch >= 2.10 already.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

BASE_PYTHON ?= python3
ARGS ?=
VENV := .venv
STAMPS := build/stamps
REQUIRED_MODULES := torch setuptools ninja

ifeq ($(origin PYTHON),command line)
  PY := $(PYTHON)
  PY_READY := check-python
  DEMO_READY := check-python
  BUILT := $(STAMPS)/in-place
  BUILD_LIBRARY := $(PY) setup.py --quiet build_ext --inplace
  export PYTHONPATH := $(CURDIR)
else
  PY := $(VENV)/bin/python
  PY_READY := $(VENV)/.dev
  DEMO_READY := $(VENV)/.demo
  BUILT := $(STAMPS)/editable
  BUILD_LIBRARY := $(PY) -m pip install --quiet --no-build-isolation --no-deps --editable .
endif

CXX_SOURCES := $(shell find csrc tests -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' \
                                 -o -name '*.hip')
NATIVE_SOURCES := $(CXX_SOURCES) csrc/kernels.py setup.py tools/native_build.py

# FLASH_EXT_ARCHS and FLASH_EXT_ONLY choose what is built, so another choice is another build.
SELECTION := $(STAMPS)/selection
$(shell mkdir -p $(STAMPS); \
        echo '$(FLASH_EXT_ARCHS)|$(FLASH_EXT_ONLY)' | cmp -s - $(SELECTION) \
        || echo '$(FLASH_EXT_ARCHS)|$(FLASH_EXT_ONLY)' > $(SELECTION))

.PHONY: help
help:  ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: demo
demo: $(BUILT) | $(DEMO_READY)  ## trains a small GPT on a text, then the same with torch's attention (ARGS=...)
	@$(PY) examples/demo.py $(ARGS)

.PHONY: test
test: $(BUILT) $(STAMPS)/testing  ## all tests, or those of ARGS="tests/test_x.py -k name"
	@$(PY) -m pytest $(ARGS)

.PHONY: build
build: $(BUILT)  ## the library, installed editable into .venv

.PHONY: testing
testing: $(STAMPS)/testing  ## the pybind11 module that exposes csrc/common to the tests

.PHONY: lint
lint: $(VENV)/.dev  ## ruff, clang-format, the README's support table and docs/api.md; changes nothing
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/clang-format --dry-run --Werror $(CXX_SOURCES)
	@$(VENV)/bin/python tools/readme_tables.py --check
	@$(VENV)/bin/python tools/api_reference.py --check

.PHONY: format
format: $(VENV)/.dev  ## rewrites what lint complains about
	@$(VENV)/bin/ruff check --fix .
	@$(VENV)/bin/ruff format .
	@$(VENV)/bin/clang-format -i $(CXX_SOURCES)
	@$(VENV)/bin/python tools/readme_tables.py
	@$(VENV)/bin/python tools/api_reference.py

ARCH ?= cpu
.PHONY: wheel
wheel: | $(PY_READY)  ## a wheel in dist, ARCH=cpu or sm90, sm80, ...
	@$(PY) tools/wheel.py $(ARCH) $(ARGS)

.PHONY: kernels-all
kernels-all: | $(PY_READY)  ## every CUDA kernel of every architecture, with a report (needs nvcc)
	@$(PY) tools/kernel_report.py $(ARGS)

# Compiles for a second instruction set what an x86-64 build never does: the portable kernels, and
# the shared files with another ABI. Objects only; nothing is linked or run.
AARCH64_CXX ?= aarch64-linux-gnu-g++
AARCH64_DIR := build/aarch64
AARCH64_SOURCES := $(filter-out csrc/backend_gpu.cpp,$(wildcard csrc/*.cpp))
.PHONY: aarch64
aarch64: | $(PY_READY)  ## cross compiles the CPU library's sources (needs aarch64-linux-gnu-g++)
	@command -v $(AARCH64_CXX) >/dev/null \
	  || { echo "$(AARCH64_CXX) is missing: install g++-aarch64-linux-gnu"; exit 1; }
	@$(PY) csrc/kernels.py --archs cpu --machine aarch64 --out $(AARCH64_DIR)
	@flags=$$(PYTHONPATH=tools $(PY) -c 'import native_build as build; \
	    print(*build.CXX_FLAGS, "-Icsrc", f"-isystem {build.torch_paths()[0]}", \
	          f"-DTORCH_TARGET_VERSION={build.TORCH_TARGET_VERSION}")'); \
	  printf '%s\n' $(AARCH64_SOURCES) $(AARCH64_DIR)/*.cpp \
	  | xargs -P $$(nproc) -I{} bash -c 'echo "aarch64 {}"; \
	      $(AARCH64_CXX) '"$$flags"' -c {} -o $(AARCH64_DIR)/$$(basename {}).o'

.PHONY: clean
clean:  ## removes what was built, keeps .venv
	@rm -rf build dist *.egg-info flash_ext/*.so tests/native/*.so demo_loss.png
	@rm -rf .pytest_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

.PHONY: distclean
distclean: clean  ## removes .venv too
	@rm -rf $(VENV)

# A library built by hand, perhaps of fewer kernels, is newer than the stamp: it is built again.
LIBRARY := flash_ext/_C.abi3.so
$(BUILT): $(NATIVE_SOURCES) pyproject.toml $(SELECTION) $(or $(wildcard $(LIBRARY)),missing)
$(BUILT): | $(PY_READY)
	$(BUILD_LIBRARY)
	@mkdir -p $(STAMPS) && touch $@

.PHONY: missing
missing:

$(STAMPS)/testing: $(NATIVE_SOURCES) | $(PY_READY)
	$(PY) setup.py --quiet build_testing
	@mkdir -p $(STAMPS) && touch $@

$(VENV)/.dev: requirements/dev.txt
	@command -v $(CXX) >/dev/null || { echo "no C++ compiler: install g++ (or set CXX)"; exit 1; }
	@$(BASE_PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	  || { echo "$(BASE_PYTHON) is older than Python 3.10: set BASE_PYTHON"; exit 1; }
	$(BASE_PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements/dev.txt
	@touch $@

$(VENV)/.demo: requirements/demo.txt $(VENV)/.dev
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements/demo.txt
	@touch $@

.PHONY: check-python
check-python:
	@$(PY) -c 'import importlib.util, sys; \
	  missing = [m for m in "$(REQUIRED_MODULES)".split() if importlib.util.find_spec(m) is None]; \
	  missing and sys.exit(f"$(PY) has no {missing}: install them, or leave PYTHON out to use .venv"); \
	  import torch; \
	  tuple(map(int, torch.__version__.split(".")[:2])) < (2, 10) \
	  and sys.exit(f"$(PY) has torch {torch.__version__}: flash_ext needs 2.10 or later")'
