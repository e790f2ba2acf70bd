# `make demo` and `make test` set up `.venv` first; they need Python 3.11 with pip and a network.
# Versions are those of `constraints/$(CONSTRAINTS).txt`: `tested`, or `oldest` (the lower bounds of setup.cfg); `newest` has
# no constraints. Each has an environment of its own.
# Plain `pip install torch` is the CUDA build on some indexes; `make TORCH_INDEX=<index of CPU builds> test` avoids it.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3.11
CONSTRAINTS ?= tested
TORCH_VERSION ?=
TORCH_INDEX ?=
DEMO_OUT ?= out/digits
DEMO_ARGS ?=
CHARTS_OUT ?= out/charts
CHARTS_ARGS ?=
PYTEST_ARGS ?=
PYTEST_WORKERS ?= 2
DEEP ?= none

VENV := $(if $(filter tested,$(CONSTRAINTS)),.venv,.venv-$(CONSTRAINTS))
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
DEMO_INSTALLED := $(VENV)/.installed-demo
PINS := $(if $(filter newest,$(CONSTRAINTS)),,constraints/$(CONSTRAINTS).txt)
PIP_INSTALL := $(BIN)/python -m pip install --quiet --progress-bar off --no-compile $(addprefix --constraint ,$(PINS))
TORCH := "torch$(addprefix ==,$(TORCH_VERSION))"

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1
export DS_BUILD_OPS := 0
export PYTHONUNBUFFERED := 1
unexport PYTHONDONTWRITEBYTECODE  # packages are compiled as they are first imported

.PHONY: help venv demo charts test tests test-deep test-newest releases update-constraints quick gpu lint format bench docs pages clean

help: ## this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 28

venv: $(INSTALLED) ## the environment, nothing else

# The demos need nothing of what tests need, some of which is slow to import.
# Releases beyond the ranges of setup.cfg are those that the newest environment is for.
$(INSTALLED): EXTRAS := demo,dev
$(DEMO_INSTALLED): EXTRAS := demo
$(INSTALLED) $(DEMO_INSTALLED): setup.cfg pyproject.toml $(PINS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) $(addprefix --index-url ,$(TORCH_INDEX)) $(TORCH)
	$(PIP_INSTALL) -e '.[$(EXTRAS)]'
	$(if $(PINS),,$(PIP_INSTALL) --upgrade $(TORCH) $$($(BIN)/python constraints/versions.py names))
	touch $@

demo: $(or $(wildcard $(INSTALLED)),$(DEMO_INSTALLED)) ## train the digits model on four CPU processes
	ACCELERATE_USE_CPU=true $(BIN)/accelerate launch --config_file examples/accelerate_configs/one_host_4cpu.yaml \
	    examples/train_digits_vlm.py --output_dir $(DEMO_OUT) $(DEMO_ARGS)

charts: $(or $(wildcard $(INSTALLED)),$(DEMO_INSTALLED)) ## train the chart model on four CPU processes, arranged by workload
	ACCELERATE_USE_CPU=true $(BIN)/accelerate launch --config_file examples/accelerate_configs/one_host_4cpu.yaml \
	    examples/train_chart_vlm.py --output_dir $(CHARTS_OUT) $(CHARTS_ARGS)

test: lint tests ## all gates and all tests but the deep ones, PYTEST_WORKERS at a time; DEEP=0 to 9 adds a tenth of those

tests: $(INSTALLED) ## `make test` without gates
	$(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist worksteal --deep $(DEEP) $(PYTEST_ARGS)

test-deep: $(INSTALLED) ## the deep tests: benchmarks, published tables, brute force, chaos, full products
	$(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist worksteal -m deep $(PYTEST_ARGS)

test-newest: ## the same with the newest releases; reports, and fails softly
	-$(MAKE) test CONSTRAINTS=newest
	$(MAKE) releases

releases: $(INSTALLED) ## which newer releases there are than the tested ones
	$(BIN)/python constraints/versions.py newer

update-constraints: ## constraints/*.txt anew, from the newest releases within the ranges of setup.cfg and its bounds
	rm -rf .venv-update .venv-bounds
	touch constraints/update.txt
	$(MAKE) venv CONSTRAINTS=update
	.venv-update/bin/python constraints/versions.py freeze > constraints/tested.txt
	.venv-update/bin/python constraints/versions.py bounds > constraints/bounds.txt
	$(MAKE) venv CONSTRAINTS=bounds TORCH_VERSION=
	.venv-bounds/bin/python constraints/versions.py freeze > constraints/oldest.txt
	rm -rf .venv-update .venv-bounds constraints/update.txt constraints/bounds.txt

quick: $(INSTALLED) ## the tests that start no ranks
	$(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist worksteal --deep none -m "not distributed and not slow and not gpu and not multi_gpu" $(PYTEST_ARGS)

gpu: ## what needs a GPU, with the environment that is active: tests, checks against the stock Trainer, times
	TRITON_INTERPRET=0 python -m pytest -m "gpu or multi_gpu" --deep all $(PYTEST_ARGS)
	python benchmarks/gpu_check.py
	python benchmarks/gpu_step.py
	python benchmarks/split_backward.py
	python benchmarks/attention_gpu.py --lengths 8192

lint: $(INSTALLED) ## ruff, codespell, pyright
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(INSTALLED) ## rewrite the code as `make lint` wants it
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(INSTALLED) ## speed against the stock Trainer, error of predictions
	$(BIN)/python benchmarks/trainer_overhead.py
	$(BIN)/python benchmarks/simulator_error.py
	$(BIN)/python benchmarks/context_parallel_balance.py
	$(BIN)/python benchmarks/packing_gain.py
	$(BIN)/python benchmarks/model_plans.py
	$(BIN)/python benchmarks/sampler_overhead.py
	$(BIN)/python benchmarks/rank_balance.py
	$(BIN)/python benchmarks/scale.py
	$(BIN)/python benchmarks/step_costs.py
	$(BIN)/python benchmarks/microbatch_balance.py
	$(BIN)/python benchmarks/attention.py
	$(BIN)/python benchmarks/memory_error.py
	$(BIN)/python benchmarks/sharding.py
	$(BIN)/python benchmarks/experts.py
	$(BIN)/python benchmarks/sharded_simulation.py
	$(BIN)/python benchmarks/planner.py
	$(BIN)/python benchmarks/search_quality.py
	$(BIN)/python benchmarks/placements.py
	$(BIN)/python benchmarks/disttrain.py --trained projectors encoder "language model" generator
	$(BIN)/python benchmarks/published_runs.py
	$(BIN)/python benchmarks/calibration.py
	$(BIN)/python benchmarks/sizes_at_scale.py
	$(BIN)/python benchmarks/templates.py
	$(BIN)/python benchmarks/async_save.py
	$(BIN)/python benchmarks/recovery.py
	$(BIN)/python benchmarks/chaos.py

docs: $(INSTALLED) ## the documentation as a site, in out/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

pages: $(INSTALLED) ## the figures of README and docs, from the kept results
	$(BIN)/python benchmarks/pages.py

clean: ## the environment and what the tools left
	rm -rf .venv .venv-* build dist out runs *.egg-info .pytest_cache .ruff_cache .hypothesis
