# The entry points for people and for CI alike. `make` alone lists them.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
# auto: the CUDA build where nvidia-smi finds a GPU, else the CPU build. On a login node without GPUs say TORCH=cuda.
TORCH ?= auto
# More for pytest, as in: make test ARGS='-k planner -x'
ARGS ?=
# Tests at a time, by files. Some start several ranks, and some wait for Slurm, so it need not be the number of cores.
WORKERS ?= 2

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/setup-done-$(TORCH)

.PHONY: help setup demo check test test-long drills slurm-packages parity bench bench-planner bench-engine clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "  make setup TORCH=cpu|cuda      choose the torch build (auto: CUDA where there is a GPU)"
	@echo "  make test ARGS='-k planner'    hand arguments to pytest"

setup: $(STAMP) ## Create .venv and install everything

$(STAMP): pyproject.toml .ci/install_torch.sh
	[[ -x $(BIN)/python ]] || $(PYTHON) -m venv $(VENV)
	@# install_torch.sh asks pip for a dry run; an older pip downloads the whole wheel to answer one.
	$(BIN)/python -m pip install --quiet 'pip>=24'
	.ci/install_torch.sh $(BIN)/python $(TORCH)
	$(BIN)/python -m pip install --quiet --editable '.[train,optimizers,fp8,parquet,slurm,k8s,wandb,tensorboard,mlflow,plot,dev]'
	@touch $@

demo: setup ## Plan, submit, preempt and resume a real small run on this machine
	$(BIN)/python recipes/demo.py

check: setup ## Lint, format and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

test: setup slurm-packages ## Run the tests, with a real Slurm where the machine can have one, and the drills' short form
	$(BIN)/python -m pytest -m 'not long' -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

test-long: setup slurm-packages ## Run the tests that `make test` leaves out: drills that take their time
	$(BIN)/python -m pytest -m long $(ARGS)

# Less of it: make drills ARGS='--kills 20 --requests 8'. The page in docs: ARGS='--write docs/survival.md'.
drills: setup ## Hurt real runs by the hundred: kills, signals, damaged files, full disks, other sizes; print a table
	@$(BIN)/python -m tests.drills.campaign $(ARGS)

# Root on a machine with apt gets Slurm. Elsewhere the Slurm tests skip and say why; in CI that would be a failure.
slurm-packages:
	@if [[ $$(id -u) == 0 ]] && command -v apt-get >/dev/null; then \
		slurm/install_packages.sh || { echo 'Slurm could not be installed.' >&2; [[ $${CI:-} != true ]]; }; \
	fi

# One row: make parity ARGS='zero3 tp2'. The page beside the benchmarks: ARGS='--write benchmarks/results/parity.md'.
parity: setup ## Train every layout beside one plain process, and print how far they differ
	@$(BIN)/python -m tests.engine.parity $(ARGS)

bench: setup ## Measure every figure that the README claims
	@for script in benchmarks/*.py; do echo "== $$script"; $(BIN)/python "$$script"; done

# TRUTH is a directory of measured runs in CSV files; without it the benchmark says what it wants and ends well.
bench-planner: setup ## Compare the planner with runs that others measured: make bench-planner TRUTH=DIR
	@$(BIN)/python benchmarks/planner_accuracy.py $(if $(TRUTH),--truth "$(TRUTH)") $(ARGS)

bench-engine: setup ## Time the training loop beside the barest ones; on a GPU also its use and memory beside the plan
	@$(BIN)/python benchmarks/engine_speed.py $(ARGS)

clean: ## Remove .venv, caches and builds; never runs/
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './runs/*' -prune -exec rm -rf {} +
