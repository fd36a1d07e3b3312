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

.PHONY: quickstart quick test full check lint types everything gate docs dashboard clients clean gpu gpu-end gpu-quick
.DELETE_ON_ERROR:

# Measured here, then dry-run: where no fake device can be built (no compiler), refshard says what to install.
quickstart: $(VENV)/.run
	@echo "Takes about 3 minutes on two fast cores, 6 on slow ones. First: six strategies measured on this machine."
	$(BIN)/refshard run quickstart
	@echo; echo "Second: a dry run of Llama 3 8B with FSDP2 on 8 H100s (the first builds the fake GPU, about 30 s)."
	@echo "$(BIN)/refshard dryrun --cluster dgx-h100 -- docs/examples/train_fsdp2.py"
	@$(BIN)/refshard dryrun --cluster dgx-h100 -- docs/examples/train_fsdp2.py || { test $$? -eq 2 && \
		echo "The measured half is done; the line above says what the dry run needs."; }

check: lint types test

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.test
	$(BIN)/mypy

# Three tiers; CONTRIBUTING.md has the rule.
quick: $(VENV)/.test
	$(PYTEST) --tier quick tests

test: $(VENV)/.test
	$(PYTEST) --tier test --numprocesses $(shell expr $(JOBS) + 1)  # some wait now and then

# FULL_PART=2/16 runs what `make test` runs, and the second sixteenth of the files with tests marked full.
everything: $(VENV)/.hta
	$(PYTEST) $(if $(FULL_PART),--tier test --full-part $(FULL_PART),--tier full)

# Operators, collectives, bytes and losses of the engine beside what was accepted: one launch of each case. And what
# the same code does on a GPU: dry runs, of the engine and of the documentation's example.
gate: $(VENV)/.run
	$(BIN)/refshard gate --portable
	$(BIN)/refshard gate --portable --suite gate_cuda
	$(BIN)/refshard gate -- docs/examples/train_fsdp2.py

# The documentation site, in site/index.html: it opens from disk and needs no network. --quiet would hide warnings from
# --strict.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# The published pages, from profiles/recorded: dry runs of Llama 3 8B on H100s with their picture for the README, a
# measured comparison on CPUs, and one of its traces. The picture needs Debian's chromium.
PUBLISHED := dashboards/published
MEASURED := profiles/recorded/xeon-2-cores/engine_network
dashboard: $(VENV)/.test
	$(BIN)/refshard report profiles/recorded/dryrun/llama3_8b_h100 --out $(PUBLISHED)/llama3-8b-h100.html
	$(BIN)/python dashboards/picture.py $(PUBLISHED)/llama3-8b-h100.html v0-tradeoff \
		"Llama 3 8B on 8 H100s, selective checkpointing (dry run)<br><sup>Shaded: within 3 % of the fastest, the model's error</sup>" $(PUBLISHED)/llama3-8b-h100.png
	$(BIN)/refshard report $(MEASURED) --out $(PUBLISHED)/measured.html
	$(BIN)/refshard trace $(MEASURED)/traces/fsdp2-tuned-*.json.gz --html $(PUBLISHED)/trace.html

# Frameworks from PyPI under the dry run, each in an environment of its own in .clients: 40 minutes, and 23 GB of disk.
# Of some of them: make clients CLIENTS="torchtitan trl". Where the index serves CUDA builds of torch, set
# PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu.
clients: $(VENV)/.test
	$(BIN)/python -m tests.clients.run $(CLIENTS)

# The first hour on a machine with GPUs (docs/how-to/machines.md): pieces of at most GPU_PIECE_S seconds each, whose results lie in
# GPU_OUT. A piece that has ended well leaves NAME.done; `make gpu` again does what is missing, and goes on with the suite.
GPU_OUT ?= runs/gpu
GPU_PIECE_S ?= 540
GPU_SUITE ?= $(shell test "$$(nvidia-smi --list-gpus 2>/dev/null | wc -l)" -ge 8 && echo gpu_8 || echo gpu_1)
GPU_TESTS ?= -m gpu tests/gpu
GPU_CALIBRATION ?= --device cuda --rounds 1
GPU_BLOCKS ?= --long
GPU_PIECES := $(addprefix $(GPU_OUT)/,doctor.done tests.done dryrun.done suite.done calibration.done blocks.done traces.done)
GPU_MISSING = $(basename $(notdir $(filter-out $(wildcard $(GPU_PIECES)),$(GPU_PIECES))))
PIECE := timeout --foreground --signal=INT --kill-after=60 $(GPU_PIECE_S)

define GPU_README
Written by `make gpu` with the suite $(GPU_SUITE); docs/how-to/machines.md says how to read it. NAME.done: that piece ended well.

doctor.txt, doctor.json        what this machine is, what can run here, and what is wrong
tests.log, tests.xml           pytest -m gpu
dryrun.log                     how the Python for dry runs was made, where one of its own is needed
suite/, suite.log              the suite's run: records.jsonl, dashboard.html and traces
suite-dryrun/                  the dry runs that preceded it, if they could run
calibration.toml, .log         the machine's compute and collectives, for plans and emulated cases
blocks.json, blocks.log        the engine's and FSDP2's blocks side by side
traces.html, traces.log        where the time of the traced steps went
endef
export GPU_README

gpu: $(VENV)/.test
	-@$(MAKE) --no-print-directory --keep-going --jobs=1 $(GPU_PIECES)
	@$(MAKE) --no-print-directory gpu-end

gpu-end:
	@echo "$$GPU_README" > $(GPU_OUT)/README.txt
	tar --create --gzip --file $(GPU_OUT).tar.gz --directory $(dir $(GPU_OUT)) $(notdir $(GPU_OUT))
	@$(if $(GPU_MISSING),echo "not done: $(GPU_MISSING); see the logs in $(GPU_OUT). \`make gpu\` goes on with them."; exit 1)

$(GPU_PIECES): | $(VENV)/.test $(GPU_OUT)
$(GPU_OUT):
	mkdir -p $@
$(GPU_PIECES): SHELL := /bin/bash
$(GPU_PIECES): .SHELLFLAGS := -o pipefail -c

$(GPU_OUT)/doctor.done:
	$(BIN)/refshard doctor --json > $(@D)/doctor.json; $(BIN)/refshard doctor | tee $(@D)/doctor.txt
	@touch $@

$(GPU_OUT)/tests.done:
	$(PIECE) $(BIN)/python -m pytest $(GPU_TESTS) --junitxml=$(@D)/tests.xml | tee $(@D)/tests.log
	@touch $@

# Dry runs need torch's CPU build, in an environment of its own where torch here is a CUDA build.
$(GPU_OUT)/dryrun.done:
	$(BIN)/python -c "from refshard.fakecuda.build import check; check()" 2> $(@D)/dryrun.log || { \
		$(PYTHON) -m venv .dryrun && $(PIECE) .dryrun/bin/python -m pip --disable-pip-version-check install \
		--extra-index-url https://download.pytorch.org/whl/cpu --constraint constraints.txt --editable . 2>&1 \
		| tee --append $(@D)/dryrun.log && \
		.dryrun/bin/python -c "from refshard.fakecuda.build import check; check()" 2>> $(@D)/dryrun.log; }
	@touch $@

$(GPU_OUT)/suite.done:
	$(PIECE) $(BIN)/refshard run $(if $(wildcard $(@D)/suite/records.jsonl),--resume $(@D)/suite,$(GPU_SUITE) --out \
		$(@D)/suite) 2>&1 | tee --append $(@D)/suite.log
	@touch $@

$(GPU_OUT)/calibration.done:
	$(PIECE) $(BIN)/refshard calibrate $(GPU_CALIBRATION) --out $(@D)/calibration.toml 2>&1 | tee $(@D)/calibration.log
	@touch $@

$(GPU_OUT)/blocks.done:
	$(PIECE) $(BIN)/python -m pytest suites/bench_blocks.py -s $(GPU_BLOCKS) --benchmark-json=$(@D)/blocks.json \
		| tee $(@D)/blocks.log
	@touch $@

# Again where the run has gone on since.
$(GPU_OUT)/traces.done: $(wildcard $(GPU_OUT)/suite/records.jsonl)
	$(PIECE) $(BIN)/refshard trace $(@D)/suite --html $(@D)/traces.html 2>&1 | tee $(@D)/traces.log
	@touch $@

# Ten minutes on one GPU, from this tree as it is: nothing is installed, so that it runs without a network on a torch that
# is there. Without a GPU, a rehearsal on the fake device. GPU_PYTHON: an environment's in $(VENV), else the machine's own.
GPU_PYTHON ?= $(firstword $(wildcard $(BIN)/python) $(PYTHON))
gpu-quick:
	PYTHONPATH=$(CURDIR):$$PYTHONPATH $(GPU_PYTHON) -m tests.gpu.quick --out runs/gpu-quick

full: lint types everything gate docs

clean:
	rm -rf $(VENV) build dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis

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

# In the environment of the tests, where there is one: .ci/run makes both.
$(VENV)/.docs: $(VENV)/.run
	@echo "installing what the documentation site needs into $(VENV)"
	$(INSTALL) ".[docs]"
	@touch $@
