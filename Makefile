# Two commands: `make quickstart` and `make test`. Both set up .venv by themselves, with the pinned set of constraints.txt.

PYTHON ?= python3
VENV ?= .venv
# How many processes share the tests; a file's tests stay in one, where they share what the file launches.
JOBS ?= 2
# Of pip; .ci/run leaves modules to be compiled as they are imported, which most of what is installed never is.
INSTALL_OPTIONS ?=
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip --disable-pip-version-check --quiet install $(INSTALL_OPTIONS) \
	--constraint constraints.txt --editable
PYTEST := $(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder

# Measured runs that dashboards/published shows on one page.
MEASURED := $(addprefix profiles/recorded/epyc-2-cores/,quickstart engine_network validation validation_network when_to_shard)

.PHONY: quickstart quick test full check lint types everything gate dashboard clients clean
.DELETE_ON_ERROR:

quickstart: $(VENV)/.run
	$(BIN)/refshard run suites/quickstart.toml

check: lint types test

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.test
	$(BIN)/mypy

# Three tiers, by markers; CONTRIBUTING.md has the rule.
quick: $(VENV)/.test
	$(PYTEST) -m "not processes and not full" tests

test: $(VENV)/.test
	$(PYTEST) -m "not full" --numprocesses $(shell expr $(JOBS) + 1)  # some wait now and then

everything: $(VENV)/.hta
	$(PYTEST)

# Operators, collectives, bytes and losses of the engine beside what was accepted: one launch of each case. And what
# the same code does on a GPU: dry runs.
gate: $(VENV)/.run
	$(BIN)/refshard gate --portable
	$(BIN)/refshard gate --portable --suite gate_cuda

# The published pages, from profiles/recorded: dry runs of Llama 3 8B on H100s, and what a real machine measured.
dashboard: $(VENV)/.run
	$(BIN)/refshard report profiles/recorded/dryrun/llama3_8b_h100 --out dashboards/published/index.html
	$(BIN)/refshard report $(MEASURED) --out dashboards/published/measured.html

# Frameworks from PyPI under the dry run, each in an environment of its own in .clients: half an hour, and 10 GB of disk.
# Of some of them: make clients CLIENTS="torchtitan trl". Where the index serves CUDA builds of torch, set
# PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu.
clients: $(VENV)/.test
	$(BIN)/python -m tests.clients.run $(CLIENTS)

full: lint types everything gate

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# Each installs all that those above it do.
$(VENV)/.run: $(VENV)/bin/python pyproject.toml constraints.txt
	@echo "installing refshard into $(VENV) (a minute or two)"
	$(INSTALL) .
	@touch $@

$(VENV)/.test: $(VENV)/bin/python pyproject.toml constraints.txt
	@echo "installing refshard and what its tests need into $(VENV) (a minute or two)"
	$(INSTALL) ".[test]"
	@touch $(VENV)/.run $@

$(VENV)/.hta: $(VENV)/bin/python pyproject.toml constraints.txt
	@echo "installing refshard, what its tests need and HTA into $(VENV) (a few minutes)"
	$(INSTALL) ".[test,hta]"
	@touch $(VENV)/.run $(VENV)/.test $@
