# The entry points for people and for CI alike. `make` alone lists them.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
# A process that may not write byte code compiles the package and its tests each time: a sixth of the time of `make test`.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3
# auto: the CUDA build where nvidia-smi finds a GPU, else the CPU build. On a login node without GPUs say TORCH=cuda.
TORCH ?= auto
# More for pytest, as in: make test ARGS='-k planner -x'
ARGS ?=
# Tests at a time, by files. Many wait for Slurm or for processes that end, so it may be more than the cores.
WORKERS ?= 4
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# Folders of tests/, or how their names begin, as in: make test-long AREA='slurm drills'
AREA ?=

# Where unit tests are; tests/unit.py leaves out of these what needs torch or a process.
UNIT := tests/launch tests/plan tests/rundir tests/spec tests/tracking tests/worker tests/test_extras.py tests/test_packaging.py \
	tests/test_reasons.py tests/test_safe_files.py tests/test_workflows.py

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/setup-done-$(TORCH)

# What `make setup` installs and `make lock` pins.
EXTRAS := train,optimizers,fp8,parquet,vision,data,remote,slurm,k8s,wandb,tensorboard,mlflow,hub,plot,sample,mcp,docs,reference,dev

.PHONY: help setup lock docs demo check unit test test-k8s test-slurm test-long test-costs test-oldest test-newest drills bug-injection release slurm-packages parity bench bench-planner bench-engine gpu gpu-wheels clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "  make setup TORCH=cpu|cuda      choose the torch build (auto: CUDA where there is a GPU)"
	@echo "  make test ARGS='-k planner'    hand arguments to pytest"

setup: $(STAMP) ## Create .venv and install everything

STEP = @printf '%(%T)T  %s\n' -1

$(STAMP): pyproject.toml constraints.txt .ci/install_torch.sh .ci/s3_server.txt
	$(STEP) 'set-up, 4 to 8 minutes. 1 of 4: pip in $(VENV), under a minute'
	@[[ -x $(BIN)/python ]] || $(PYTHON) -m venv $(VENV)
	@# install_torch.sh asks pip for a dry run; an older pip downloads the whole wheel to answer one.
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt 'pip>=24' hatchling
	$(STEP) '2 of 4: torch, 1 to 3 minutes; the CUDA build has several gigabytes'
	@.ci/install_torch.sh $(BIN)/python $(TORCH)
	$(STEP) '3 of 4: the other libraries and ScaleTrain, 2 to 4 minutes'
	@# Not isolated: the build uses the hatchling of the constraints too.
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt editables
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[$(EXTRAS)]'
	@# The S3 server of the tests needs libraries in other versions.
	$(STEP) '4 of 4: an S3 server for the tests, under a minute'
	@[[ -x $(VENV)/s3-server/bin/python ]] || $(PYTHON) -m venv $(VENV)/s3-server
	@$(VENV)/s3-server/bin/python -m pip install --quiet --requirement .ci/s3_server.txt
	@touch $@
	$(STEP) 'set up'

lock: setup ## Write constraints.txt anew, with the newest versions that pyproject.toml admits
	$(BIN)/python .ci/lock.py '$(EXTRAS)'

# Not --quiet: mkdocs then counts no warning, and --strict finds none.
docs: setup ## Build the documentation site into build/site, with all links checked
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

demo: setup ## Plan, submit, preempt and resume a real small run on this machine
	$(BIN)/python recipes/demo.py

check: setup ## Lint, format and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

unit: setup ## Run the tests that need neither torch nor a process, in half a minute
	$(BIN)/python -m pytest -p tests.unit -n $(WORKERS) $(UNIT) $(ARGS)

test-oldest: ## Run the unit tests with the oldest Python found and the oldest libraries that pyproject.toml admits
	@PYTHON='$(PYTHON)' .ci/unit_elsewhere.sh oldest $(UNIT)

test-newest: ## Run the unit tests with the newest Python found and the libraries of constraints.txt
	@PYTHON='$(PYTHON)' .ci/unit_elsewhere.sh newest $(UNIT)

test: setup slurm-packages ## Run the tests, with a real Slurm where the machine can have one, and the drills' short form
	$(PYTEST) -m 'not long and not kubernetes and not slurm_site' $(ARGS)

test-costs: setup slurm-packages ## Run the tests one at a time, and print the CPU seconds and started processes of each file
	$(PYTEST) -n 0 -p tests.costs --costs=files -m 'not long and not kubernetes and not slurm_site' $(ARGS)

# Not part of CI. CONTRIBUTING.md has the variables of both, and how to start a cluster with kind.
test-k8s: setup ## Run the suite for a real cluster: that of the current kubeconfig context, in a namespace of its own
	$(BIN)/python -m pytest -m kubernetes tests/kubernetes_cluster $(ARGS)

test-slurm: setup ## Run the suite for a real Slurm site: small, short jobs in the partition SCALETRAIN_SLURM_PARTITION
	$(BIN)/python -m pytest -m slurm_site tests/slurm_site $(ARGS)

test-long: setup slurm-packages ## Run what `make test` leaves out, and all examples of properties; AREA='slurm drills' for some
	$(PYTEST) -m 'long or hypothesis' $(foreach area,$(AREA),$(wildcard tests/$(area)*)) $(ARGS)

# Some of them: make bug-injection ARGS='momentum labels'. The page: make bug-injection ARGS='--write docs/injected-bugs.md'.
bug-injection: setup ## Train small runs with an injected bug, and healthy ones, and print what the diagnosis finds
	@$(BIN)/python -m tests.diagnosis.injected_bugs $(ARGS)

# Less of it: make drills ARGS='--kills 20 --requests 8', or parts by name: ARGS='vision-kills elastic'.
# The page in docs: ARGS='--write docs/survival.md', which keeps the sections of parts that do not run.
drills: setup ## Hurt real runs by the hundred: kills, signals, damaged files, full disks, other sizes; print a table
	@$(BIN)/python -m tests.drills.campaign $(ARGS)

# Root on a machine with apt gets Slurm. Elsewhere the Slurm tests skip and say why; in CI that would be a failure.
slurm-packages:
	@if [[ $$(id -u) == 0 ]] && command -v apt-get >/dev/null; then \
		slurm/install_packages.sh || { echo 'Slurm could not be installed.' >&2; [[ $${CI:-} != true ]]; }; \
	fi

# One row: make parity ARGS='zero3 tp2'; networks for images: ARGS=vision.
# The page beside the benchmarks: ARGS='--write benchmarks/results/parity.md'.
parity: setup ## Train every layout beside one plain process, and print how far they differ
	@$(BIN)/python -m tests.engine.parity $(ARGS)

bench: setup ## Measure every figure of docs/overhead.md
	@for script in benchmarks/*.py; do echo "== $$script"; $(BIN)/python "$$script"; done

# TRUTH is a directory of measured runs in CSV files; without it the benchmark says what it wants and ends well.
bench-planner: setup ## Compare the planner with runs that others measured: make bench-planner TRUTH=DIR
	@$(BIN)/python benchmarks/planner_accuracy.py $(if $(TRUTH),--truth "$(TRUTH)") $(ARGS)

bench-engine: setup ## Time the training loop beside the barest ones; on a GPU also its use and memory beside the plan
	@$(BIN)/python benchmarks/engine_speed.py $(ARGS)

# One machine with a GPU and torch: docs/engine.md. Pieces by name, rows by text: make gpu ARGS='steps saves --only 1B'.
# The wheels are used where there is no .venv; their folder must be there then, for nothing is downloaded.
GPU_WHEELS ?= build/gpu-wheels
gpu: ## Measure one GPU within 25 minutes, offline: speed, memory, parity, checkpoints, resume, beside their targets
	@python=$(CURDIR)/$(BIN)/python; \
	if [[ ! -x $$python ]]; then \
		python=$(CURDIR)/build/gpu/venv/bin/python; \
		$(PYTHON) benchmarks/gpu/wheels.py install '$(GPU_WHEELS)' build/gpu/venv; \
	fi; \
	PYTHONPATH=$(CURDIR)/benchmarks:$(CURDIR) $$python -m gpu $(ARGS)

gpu-wheels: setup ## Gather the packages that `make gpu` needs where there is no network (for another Python: ARGS=3.13)
	@$(BIN)/python benchmarks/gpu/wheels.py gather '$(GPU_WHEELS)' $(ARGS)

release: ## Build wheel, sdist, requirements with hashes and SBOM into dist/, and try them on every Python found
	@.ci/release.sh

clean: ## Remove .venv, caches and builds; never runs/
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './runs/*' -prune -exec rm -rf {} +
