# `make demo` and `make test` set up `.venv` first; they need Python 3.11 with pip and a network.
# Plain `pip install torch` is the CUDA build on some indexes; `make TORCH_INDEX=<index of CPU builds> test` avoids it.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3.11
TORCH_VERSION ?= 2.13.0
TORCH_INDEX ?=
DEMO_OUT ?= out/digits
DEMO_ARGS ?=
CHARTS_OUT ?= out/charts
CHARTS_ARGS ?=
PYTEST_ARGS ?=
PYTEST_WORKERS ?= 2

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1
export DS_BUILD_OPS := 0
export PYTHONUNBUFFERED := 1

.PHONY: help venv demo charts test quick lint format bench pages clean

help: ## this list
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/'

venv: $(INSTALLED) ## the environment, nothing else

$(INSTALLED): setup.cfg pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --progress-bar off $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) \
	    "torch==$(TORCH_VERSION)"
	$(BIN)/python -m pip install --quiet --progress-bar off -e '.[demo,dev]'
	touch $@

demo: $(INSTALLED) ## train the digits model on four CPU processes
	ACCELERATE_USE_CPU=true $(BIN)/accelerate launch --config_file examples/accelerate_configs/one_host_4cpu.yaml \
	    examples/train_digits_vlm.py --output_dir $(DEMO_OUT) $(DEMO_ARGS)

charts: $(INSTALLED) ## train the chart model on four CPU processes, arranged by workload
	ACCELERATE_USE_CPU=true $(BIN)/accelerate launch --config_file examples/accelerate_configs/one_host_4cpu.yaml \
	    examples/train_chart_vlm.py --output_dir $(CHARTS_OUT) $(CHARTS_ARGS)

test: lint ## all gates and all tests, PYTEST_WORKERS at a time
	$(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist worksteal $(PYTEST_ARGS)

quick: $(INSTALLED) ## the tests that start no ranks
	$(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist worksteal -m "not distributed and not slow and not gpu and not multi_gpu" $(PYTEST_ARGS)

lint: $(INSTALLED) ## ruff, codespell, pyright
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/pyright

format: $(INSTALLED) ## rewrite the code as `make lint` wants it
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(INSTALLED) ## speed against the stock Trainer, error of predictions
	$(BIN)/python benchmarks/trainer_overhead.py
	$(BIN)/python benchmarks/simulator_error.py
	$(BIN)/python benchmarks/context_parallel_balance.py
	$(BIN)/python benchmarks/sampler_overhead.py
	$(BIN)/python benchmarks/rank_balance.py
	$(BIN)/python benchmarks/scale.py
	$(BIN)/python benchmarks/microbatch_balance.py
	$(BIN)/python benchmarks/attention.py
	$(BIN)/python benchmarks/memory_error.py
	$(BIN)/python benchmarks/sharding.py
	$(BIN)/python benchmarks/sharded_simulation.py
	$(BIN)/python benchmarks/planner.py
	$(BIN)/python benchmarks/search_quality.py
	$(BIN)/python benchmarks/published_runs.py
	$(BIN)/python benchmarks/calibration.py
	$(BIN)/python benchmarks/sizes_at_scale.py
	$(BIN)/python benchmarks/templates.py
	$(BIN)/python benchmarks/async_save.py
	$(BIN)/python benchmarks/recovery.py
	$(BIN)/python benchmarks/chaos.py

pages: $(INSTALLED) ## the figures of README and docs, from the kept results
	$(BIN)/python benchmarks/pages.py

clean: ## the environment and what the tools left
	rm -rf $(VENV) build dist out runs *.egg-info .pytest_cache .ruff_cache .hypothesis
