# Everything runs in .venv, which `setup` makes; `demo` and `test` set themselves up. PYTHON=... picks another one.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# A third of the time tests wait, for processes and time limits, so there may be more of them than cores.
CORES := $(shell nproc 2>/dev/null || sysctl -n hw.ncpu 2>/dev/null || echo 2)
WORKERS ?= $(if $(filter 1 2,$(CORES)),3,4)
CONSTRAINTS := constraints.txt
OTHER_FLOWER := $(shell sed -nE 's/^also-tested = .*"flwr==([0-9.]+)".*/\1/p' pyproject.toml)
OLDEST_TORCH := $(shell sed -nE 's/^also-tested = .*"torch==([0-9.]+)".*/\1/p' pyproject.toml)
# The packages of extras that need not be in .venv.
extra = $(shell sed -nE 's/^$(1) = \[(.*)\].*/\1/p' pyproject.toml | tr -d '",')
RELEASE := build/release
BARE := build/bare
PURE_LAYERS := cluster edgecloud hierarchy pipeline sim thermal wire

export FLWR_TELEMETRY_ENABLED := 0
export FLWR_DISABLE_UPDATE_CHECK := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Else every process that a test starts compiles socflower anew, and every run the tests.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo picture figures papers site notebooks dist test scenarios coverage clusters api test-random test-slow test-cells test-matrix \
  other-flower test-flower test-torch test-arm test-sanitized lint proto bench clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(STAMP) ## make .venv with pinned packages and build the kernels (quick when nothing changed)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "socflower needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1)." \
	       "Name another one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "'$(PYTHON) -m venv' failed; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }

# Packages only; sources of socflower itself are used where they lie (an editable install).
$(STAMP): pyproject.toml $(CONSTRAINTS) $(shell find native -type f) | $(BIN)/python
	$(BIN)/python -m pip install -q -c $(CONSTRAINTS) scikit-build-core nanobind cmake ninja
	$(BIN)/python -m pip install -q -c $(CONSTRAINTS) --no-build-isolation -e '.[dev]'
	@touch $@

demo: setup ## predict every method, train the front on the embedded digits: tables and a report in out/demo
	$(BIN)/socflower demo

picture: setup ## draw the README's picture, light and dark, from docs/results/digits_seeds.json
	$(BIN)/python docs/draw_picture.py

figures: setup ## run what docs/draw_figures.py draws the figures of concepts from, and record the terminal
	$(BIN)/python docs/draw_figures.py
	$(BIN)/python docs/draw_figures.py terminal

PAPERS := $(basename $(notdir $(wildcard docs/papers/*.md)))
papers: setup ## write the pages of papers, from what `socflower paper` computes in an hour
	@for paper in $(PAPERS); do \
	  echo "== $$paper"; $(BIN)/socflower paper $$paper --json | $(BIN)/python docs/paper_pages.py; done

$(VENV)/.docs: $(STAMP)
	$(BIN)/python -m pip install -q -c $(CONSTRAINTS) $(call extra,docs)
	@touch $@

# Its banner tells of a successor of the theme.
site: $(VENV)/.docs ## build/site: the documentation as a site that also opens from disk
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

notebooks: $(VENV)/.docs ## execute the notebooks, and keep what they print and draw
	PATH="$(CURDIR)/$(BIN):$$PATH" python docs/run_notebooks.py

test: setup lint ## lint, then the tests
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

scenarios: setup ## every scenario's claims on five seeds, with their margins: docs/results/scenarios.json; takes hours
	@status=0; $(BIN)/socflower run scenarios --seeds 1,2,3,4,5 --out out/scenarios || status=$$?; \
	  cp out/scenarios/suite.json docs/results/scenarios.json; $(BIN)/python docs/generate_reference.py; exit $$status

# Not in `test`: tracing lines takes half as much processor time again.
coverage: setup ## the tests of the pure layers, which must cover 95 % of them
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m "few_cells or not slow" --cov --cov-report=term \
	  --cov-fail-under=95 $(addprefix tests/,$(PURE_LAYERS))

# Global generators are seeded once and not before each test: that would hide a test that draws from what others left.
test-random: setup ## the tests in random order, properties with other examples; prints its seed, SEED=... repeats it
	@seed=$${SEED:-$$RANDOM$$RANDOM}; echo "random order: make test-random SEED=$$seed"; \
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -p randomly --randomly-seed=$$seed \
	  --randomly-dont-reset-seed --hypothesis-profile=exploring --hypothesis-seed=$$seed

test-slow: setup coverage ## coverage, then the longer tests, and the cells that `few_cells` leaves out
	$(BIN)/python -m pytest -m slow -n $(WORKERS) --dist worksteal

test-cells: setup ## the cells that `few_cells` leaves out alone
	$(BIN)/python -m pytest -m "few_cells and slow" -n $(WORKERS) --dist worksteal

test-matrix: setup ## every cell of what goes together, and every scenario, also with other seeds; test-slow has some of each
	SOCFLOWER_CELLS=all $(BIN)/python -m pytest -m slow -n $(WORKERS) --dist worksteal \
	  tests/test_combinations.py tests/test_scenario_seeds.py tests/test_scenarios.py tests/thermal/fans/test_failsafe.py

other-flower: setup
	$(BIN)/python -m pip install -q --no-deps --upgrade --target build/flwr flwr==$(OTHER_FLOWER)

# On PYTHONPATH it comes before the one in .venv, in every process that a test starts.
test-flower: other-flower ## what touches Flower, with the other version of it that was tested
	export PYTHONPATH="$(CURDIR)/build/flwr"; \
	$(BIN)/python -c 'import flwr; assert flwr.__version__ == "$(OTHER_FLOWER)", flwr.__version__'; \
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile tests/engines tests/clients \
	  $(addprefix tests/strategies/test_,around.py flower_strategies.py outer_engines.py planned_rounds.py) \
	  tests/scenario/test_app_folder.py

# It pins sympy itself.
test-torch: ## what touches torch, with the oldest one that is allowed; pip may bring gigabytes of CUDA with it
	mkdir -p build
	sed -E 's/^torch==.*/torch==$(OLDEST_TORCH)/; /^sympy==/d' constraints.txt > build/oldest.txt
	$(MAKE) setup VENV=build/oldest CONSTRAINTS=build/oldest.txt
	build/oldest/bin/python -m pytest -n $(WORKERS) --dist loadfile \
	  $(addprefix tests/,training model_graph peers precision pipeline edgecloud workloads profiling)

test-arm: setup ## the int8 kernels on emulated ARM; needs g++-aarch64-linux-gnu and qemu-user
	PATH="$(CURDIR)/$(BIN):$$PATH" native/tests/run_arm.sh

test-sanitized: setup ## the int8 kernels under the address and undefined behaviour sanitizers
	PATH="$(CURDIR)/$(BIN):$$PATH" native/tests/run_sanitized.sh

clusters: setup ## write docs/reference/clusters.md: what plan says of each cluster file
	$(BIN)/python docs/cluster_plans.py

api: setup ## write socflower/__init__.pyi, the pages of reference and the tables of docs
	$(BIN)/python docs/generate_reference.py
	$(BIN)/python docs/combinations.py

# Two processes of mypy take half the time; on a loaded machine they may miss each other, which is exit status 2.
lint: setup ## ruff, its formatter, mypy and the import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --num-workers 2 || { [ $$? -eq 2 ] && $(BIN)/mypy; }
	$(BIN)/lint-imports

$(RELEASE)/.installed: pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(RELEASE)
	$(RELEASE)/bin/python -m pip install -q -c $(CONSTRAINTS) $(call extra,release)
	@touch $@

# In the bare environment there is the wheel, with the packages that it asks for, and nothing else.
dist: $(RELEASE)/.installed ## sdist, wheel and SBOM in dist/: checked, and the wheel run in a bare environment
	rm -rf dist $(BARE)
	PIP_CONSTRAINT="$(CURDIR)/$(CONSTRAINTS)" $(RELEASE)/bin/python -m build --outdir dist
	$(RELEASE)/bin/twine check --strict dist/*
	$(PYTHON) -m venv $(BARE)
	$(BARE)/bin/python -m pip install -q -c $(CONSTRAINTS) "$$(echo dist/*.whl)[demo]"
	cd $(BARE) && bin/socflower run broken_reply && bin/socflower new my-app
	$(RELEASE)/bin/cyclonedx-py environment --pyproject pyproject.toml --output-file dist/socflower.cdx.json $(BARE)/bin/python

proto: ## generate the messages of the streams anew, with code that old and new protobuf can run
	$(PYTHON) -m venv build/proto
	build/proto/bin/pip install -q grpcio-tools==1.67.1 setuptools
	build/proto/bin/python -m grpc_tools.protoc -I . --python_out=. --pyi_out=. socflower/edgecloud/stream/split.proto

bench: setup ## every benchmark against its peer, but for those of accuracy, which train for hours
	@for name in $$($(BIN)/socflower bench | grep -v accuracy); do \
	  echo "== $$name"; $(BIN)/python -m benchmarks $$name; done

clean: ## remove everything that was built
	rm -rf $(VENV) build dist out .coverage .coverage.* .hypothesis .import_linter_cache \
	  .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
