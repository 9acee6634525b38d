# `make help` lists the targets. Everything runs from .venv, which is made on first use and again when the pins change.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin
RUNNABLE := $(VENV)/.runnable
INSTALLED := $(VENV)/.installed
# uv, where it is there, installs faster than pip; `UV= make ...` leaves it out. Neither compiles what the demo never imports.
UV ?= $(shell command -v uv)
PIP := $(if $(UV),$(UV) pip install --python $(BIN)/python,$(BIN)/python -m pip install --disable-pip-version-check --no-compile)
INSTALL := $(PIP) --quiet --constraint constraints.txt

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-all test-nightly test-seconds test-breaks test-newest test-gpu test-emulated test-others test-frameworks gpu-bundle eval tables docs style check checks types clean

help: ## List the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/\1\t\2/' | expand -t 12

venv: $(INSTALLED) ## Make .venv with the pinned packages (PYTHON=... chooses the interpreter)

# What trains. torch comes first and alone, so that nothing else decides which build of it is taken. With it comes
# setuptools, which builds this package: no isolated build environment has to be downloaded.
$(RUNNABLE): setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) setuptools torch
	$(INSTALL) --no-build-isolation --editable '.[recipes,plot]'
	@touch $@

# What tests and evaluates comes on top. All is compiled here: Python warns of some packages' code when it compiles it, and
# in a test a warning is an error. Templates and code for other Pythons, which do not compile, are no concern.
#
# DeepSpeed lies in a folder of its own, because Transformers imports it in each process that finds it. The tests of
# DeepSpeed give this folder to their own processes (tests/builders/deepspeed_runs.py).
DEEPSPEED := $(VENV)/deepspeed
COMPILE := $(BIN)/python -W ignore -m compileall -qq -j 0 $(VENV)/lib || true
$(INSTALLED): $(RUNNABLE)
	$(INSTALL) --no-build-isolation --editable '.[eval,test]'
	DS_BUILD_OPS=0 $(INSTALL) --no-build-isolation --no-deps --upgrade --target $(DEEPSPEED) \
		deepspeed einops hjson msgpack ninja py-cpuinfo
	@$(COMPILE)
	@touch $@

demo: $(RUNNABLE) ## Compare a small GPT-2 plainly, checkpointed and under a policy, then write a report (a minute)
	HF_HUB_OFFLINE=1 $(BIN)/adacc verify --model demo --batch-size 8 --seq-len 256 --exact --steps 8
	HF_HUB_OFFLINE=1 $(BIN)/accelerate launch --num_processes 1 --num_machines 1 --num_cpu_threads_per_process 2 \
		--mixed_precision no --dynamo_backend no recipes/gpt2_pile.py --disable_tqdm true

# One thread per worker: threads of several workers on the same cores slow each other down.
PYTEST := HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(BIN)/pytest -n $(WORKERS) --dist worksteal
test: $(INSTALLED) ## Run the fast tests, some 4 minutes (WORKERS=N processes)
	@$(PYTEST) -m "not slow and not gpu and not others"

# One run, so that modules are imported and tests collected once. tests/conftest.py puts files with slow tests first.
test-all: $(INSTALLED) ## Run the gate: all tests that a change must pass, some 9 minutes
	@$(PYTEST) -m "not nightly and not gpu and not others"

test-nightly: $(INSTALLED) ## Run all tests with all their cases, on new random examples (an hour)
	@$(PYTEST) -m "not gpu and not others" --hypothesis-profile fresh

test-seconds: $(INSTALLED) ## Run all tests, and write down how long they take (tests/test_seconds.txt)
	@$(PYTEST) --write-seconds

test-breaks: $(INSTALLED) ## Break the product in 63 places: does the gate notice? (15 minutes)
	@$(BIN)/python tests/breakages

# Another Python than that of the pins, with the newest releases that pip finds for it, as a user's own `pip install`
# takes them. TORCH=torch==2.13.0 takes another release of torch. The core needs neither TRL, PEFT nor Lightning.
OTHER := build/$(notdir $(PYTHON))
TORCH ?= torch
CORE := tests/test_imports.py tests/kernels tests/callbacks \
	$(addprefix tests/adacc_hf/,artifacts torch_glue tape head run solve)
$(OTHER)/.installed: setup.cfg
	rm -rf $(OTHER)
	$(PYTHON) -m venv $(OTHER)
	$(OTHER)/bin/python -m pip install --quiet 'setuptools>=70.1' $(TORCH)
	$(OTHER)/bin/python -m pip install --quiet --no-build-isolation --editable '.[plot]' \
		pytest pytest-timeout pytest-xdist hypothesis
	$(OTHER)/bin/python -W ignore -m compileall -qq -j 0 $(OTHER)/lib || true
	@touch $@

# The plan's JSON is parsed: a solver that prints into it would break scripts.
OTHER_PYTEST := HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(OTHER)/bin/python -m pytest -q
PLAN := plan --model demo --device rtx4090 --batch-size 64 --seq-len 256 --budget 400MiB --json
test-newest: $(OTHER)/.installed ## Run the core of the fast tests, a plan and the notebook with PYTHON=python3.13 and the newest releases for it
	@$(OTHER)/bin/python -W error -m compileall -qq -f adacc_hf callbacks eval kernels recipes
	@$(OTHER)/bin/adacc $(PLAN) | $(OTHER)/bin/python -c 'import json, sys; json.load(sys.stdin)["policy"]["plans"]'
	@$(OTHER_PYTEST) tests/recipes/test_first_hour.py
	@$(OTHER_PYTEST) -n $(WORKERS) --dist worksteal -m "not slow and not gpu and not others" $(CORE)

test-gpu: $(INSTALLED) ## Run the tests that need a CUDA device
	@HF_HUB_OFFLINE=1 $(BIN)/pytest -m gpu

test-emulated: $(INSTALLED) ## Run those tests on an emulated CUDA device (a C++ compiler is all it needs)
	@HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python tests/emulated_cuda -m pytest -m gpu \
		tests/adacc_hf/test_gpu.py tests/adacc_hf/compiler tests/callbacks/test_gpu.py \
		tests/eval/trials/test_gradients.py tests/eval/trials/test_trial.py

# pip takes a tag of a platform literally, so each is named that a wheel may have.
BUNDLE := build/gpu-bundle
BUNDLE_PYTHON := 3.12
BUNDLE_MIB := 40
gpu-bundle: ## Fetch the wheels that eval/repository/first_gpu.py needs on a bare x86-64 machine (BUNDLE_PYTHON=3.12)
	@rm -rf $(BUNDLE)
	@$(PYTHON) -m pip download --disable-pip-version-check --quiet --no-deps --only-binary=:all: \
		--implementation cp --python-version $(BUNDLE_PYTHON) \
		$(foreach tag,2_28 2_27 2_24 2_17 2_12 2_5,--platform manylinux_$(tag)_x86_64) \
		--platform manylinux2014_x86_64 --platform manylinux2010_x86_64 --platform manylinux1_x86_64 \
		--constraint constraints.txt --requirement eval/repository/gpu_wheels.txt --dest $(BUNDLE)
	@git rev-parse HEAD > $(BUNDLE)/COMMIT
	@du -sm $(BUNDLE) | awk '{print $$1 " MiB in $(BUNDLE)"; exit $$1 > $(BUNDLE_MIB)}'

# What is fetched stays out of .venv, in runs/, and so do the models and data that are made for it.
OTHERS := runs/others
FETCHED := $(OTHERS)/.fetched
$(FETCHED): $(INSTALLED) tests/others/packages.txt
	rm -rf $(OTHERS)/packages
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps --target $(OTHERS)/packages \
		--requirement tests/others/packages.txt
	@touch $@

test-others: $(FETCHED) ## Run others' scripts with the callback and without, and compare
	@HF_HUB_OFFLINE=1 $(BIN)/pytest -m others tests/others --ignore tests/others/test_frameworks.py

# Each in an environment of its own, with this package installed as a user would install it: with what it requires.
FRAMEWORKS := $(addprefix $(OTHERS)/,axolotl/.installed llamafactory/.installed ms_swift/.installed)
$(FRAMEWORKS): $(OTHERS)/%/.installed: tests/others/frameworks/%.txt setup.cfg
	rm -rf $(@D)
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet torch==2.13.0 'setuptools>=70.1' wheel
	$(@D)/bin/python -m pip install --quiet --requirement $<
	$(@D)/bin/python -m pip install --quiet --no-deps $$(sed -n '1s/^# //p' $<)
	$(@D)/bin/python -m pip install --quiet --no-build-isolation .
	@touch $@

test-frameworks: $(INSTALLED) $(FRAMEWORKS) ## Train with axolotl, LLaMA-Factory and ms-swift, with and without a policy
	@for each in $(dir $(FRAMEWORKS)); do \
		$$each/bin/python -m pip install --quiet --no-build-isolation --no-deps --force-reinstall . || exit 1; done
	@HF_HUB_OFFLINE=1 $(BIN)/pytest -m others tests/others/test_frameworks.py

# Goes on where it was cut short. EVAL_OPTIONS='--device cuda' measures on a GPU.
eval: $(INSTALLED) ## Run the measurements of eval/ at the demo's scale, into runs/eval
	HF_HUB_OFFLINE=1 $(BIN)/adacc eval all $(EVAL_OPTIONS)

tables: $(INSTALLED) ## Write the tables of README and docs/, and tables and plots next to records, from the JSON in eval/results
	$(BIN)/python -m adacc_hf.eval.repository.tables

# What makes the site comes on top of what trains. The tree of pages has them where the repository has them. That of
# modules gives the folders at the top level their place in the package, and kernels/ an __init__.py, to be found by.
# mkdocs counts as errors only the warnings that it shows: not with --quiet.
SITE := $(VENV)/.site
$(SITE): $(RUNNABLE)
	$(INSTALL) --no-build-isolation --editable '.[docs]'
	@touch $@

docs: $(SITE) ## Build the site from docs/ and the docstrings, into build/site; warnings are errors
	@rm -rf build/docs build/api
	@mkdir -p build/docs/eval/results build/api/adacc_hf/kernels
	@ln -s $(CURDIR)/README.md $(CURDIR)/CHANGELOG.md $(CURDIR)/CONTRIBUTING.md $(CURDIR)/docs build/docs
	@ln -s $(CURDIR)/eval/results/cpu build/docs/eval/results
	@ln -s $(CURDIR)/adacc_hf/* $(CURDIR)/callbacks build/api/adacc_hf
	@ln -s $(CURDIR)/kernels/* build/api/adacc_hf/kernels
	@touch build/api/adacc_hf/kernels/__init__.py
	@REPOSITORY="$$(sed -n '/^\[repository\]/,/^\[/ s/^url = *//p' setup.cfg)" NO_MKDOCS_2_WARNING=1 \
		$(BIN)/mkdocs build --strict
	@! grep -rnoE '(src="|<link [^>]*href=")https?://[^"]*' build/site --include='*.html' || \
		{ echo 'the site would load these from elsewhere: keep them in docs/'; exit 1; }

# mypy and mkdocs take a core each. Everything they read is installed before.
checks: $(INSTALLED) $(SITE) ## Check style, types and the site, some at the same time
	@$(MAKE) --no-print-directory check
	@$(MAKE) --no-print-directory --jobs 2 --output-sync types docs

style: $(INSTALLED) ## Format the code and fix what ruff can fix
	@$(BIN)/ruff format
	@$(BIN)/ruff check --fix

check: $(INSTALLED) ## Fail if `make style` would change or complain
	@$(BIN)/ruff format --check
	@$(BIN)/ruff check

# mypy finds modules by their folders: the links give the three that stand at the top level their place in the package.
types: $(INSTALLED) ## Check the product's types
	@mkdir -p build/types/adacc_hf
	@ln -sfn $(CURDIR)/adacc_hf/* $(CURDIR)/callbacks $(CURDIR)/kernels $(CURDIR)/eval build/types/adacc_hf
	@$(BIN)/mypy

clean: ## Remove .venv, caches and build leftovers; runs/ stays
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
