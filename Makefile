# The two commands a newcomer needs: `make quickstart` and `make test`. `make help` lists the rest.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
WORKERS ?= 2# processes that run tests at the same time; tests that start ranks start more
PIP := $(BIN)/python -m pip --disable-pip-version-check
SHELL := /bin/bash

.DEFAULT_GOAL := help
.PHONY: help every-extra quickstart quickstart-asr quickstart-units quickstart-tts quickstart-grpo test test-browser test-operators test-fast test-all test-ray parity oracle-5 fuzz lint docs site check-generated check-proofs smoke bench bench-serving bench-peers bench-profile bench-torch bench-speaking layouts validate-examples clean

help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## /  make \1\t/' | expand -t 26

$(VENV)/.python:
	@$(PYTHON) -c '' 2> /dev/null || { echo "error: '$(PYTHON)' does not run here; name a Python 3.10, 3.11 or 3.12 that does:" \
	    "make $(MAKECMDGOALS) PYTHON=python3.11, or PYTHON=/path/to/python" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; ok = (3, 10) <= sys.version_info[:2] <= (3, 12); \
	    sys.exit(0 if ok else f"error: ERNIEKit needs Python 3.10, 3.11 or 3.12, and $(PYTHON) is {sys.version.split()[0]}; try: make $(MAKECMDGOALS) PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.cpu: $(VENV)/.python pyproject.toml
	@echo "Installing PaddlePaddle and what training needs into $(VENV): 1.2 GB, one to two minutes"
	$(PIP) install --editable '.[cpu,logs]'
	@touch $@

$(VENV)/.speech: $(VENV)/.cpu pyproject.toml
	@echo "Installing what reads recordings, and a speech synthesiser, into $(VENV): 20 MB"
	$(PIP) install --editable '.[cpu,logs,audio,speech-data]'
	@touch $@

$(VENV)/.all: $(VENV)/.cpu pyproject.toml
	@echo "Installing every extra into $(VENV), 2.1 GB in all"
	$(PIP) install --editable '.[cpu,all]'
	@touch $@

$(VENV)/.dev: $(VENV)/.cpu pyproject.toml
	@echo "Installing every extra and the test tools into $(VENV), 2.1 GB in all"
	$(PIP) install --editable '.[cpu,dev]'
	@touch $@

$(VENV)/.parity: $(VENV)/.dev pyproject.toml
	@echo "Installing torch and what the results are compared with into $(VENV), 3 GB in all with a CPU build of torch"
	$(PIP) install --editable '.[cpu,dev,parity]'
	@# it tells voices apart; a part of what it declares must be compiled, and has wheels under another name
	$(PIP) install --no-deps resemblyzer==0.1.4
	@touch $@

$(VENV)/.docs: $(VENV)/.cpu pyproject.toml
	@echo "Installing what builds the documentation site into $(VENV): 120 MB"
	$(PIP) install --editable '.[cpu,docs]'
	@touch $@

every-extra: $(VENV)/.python ## install every extra at once, also those of the tests and of the documentation
	$(PIP) install --editable '.[cpu,dev,docs]'
	@touch $(VENV)/.cpu $(VENV)/.speech $(VENV)/.all $(VENV)/.dev $(VENV)/.docs

quickstart: $(VENV)/.cpu ## create a virtual environment, train a tiny ERNIE on shipped data on the CPU, and ask it
	$(BIN)/python tools/quickstart/run.py

quickstart-asr: $(VENV)/.speech ## the same for speech: make recordings of digits, train a tiny listener, let adapters learn a new voice
	$(BIN)/python tools/quickstart/run.py speech

quickstart-units: $(VENV)/.cpu ## the same for speech as tokens: a tiny ERNIE gets units of speech, hears and says digits with them
	$(BIN)/python tools/quickstart/run.py units

quickstart-tts: $(VENV)/.speech ## the same for speech out: make recordings of a voice, train a tiny model that says digits, let a recogniser write them down
	$(PIP) install 'pocketsphinx>=5.0.4,<5.2'
	$(BIN)/python tools/quickstart/run.py tts

quickstart-grpo: $(VENV)/.cpu ## learning from rewards: SFT that is stopped early, then GRPO on additions with three seeds
	$(BIN)/python tools/quickstart/grpo.py

test: $(VENV)/.dev ## run the tests (no torch, no network)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not parity and not exhaustive and not browser and not ray"

test-browser: $(VENV)/.dev ## the page of `erniekit ui` in a real Chromium without a window (a minute)
	$(BIN)/python -m pytest -m browser tests/browser

OPERATORS := test_attention test_window_attention test_layers test_head test_decoder test_recompute test_recorded_vector

test-operators: $(VENV)/.dev ## what a machine without native kernels computes: Paddle's operators, in a few files of tests
	$(BIN)/python -m pytest --cpu-kernels paddle $(OPERATORS:%=tests/model/%.py) tests/training/test_optimizer.py

test-fast: $(VENV)/.dev ## the unit tests only
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not parity and not slow and not distributed and not exhaustive and not browser and not ray"

VENV_5 ?= .venv-transformers5# transformers 5 cannot lie beside transformers 4

$(VENV_5)/.installed: Makefile
	@echo "Installing torch and transformers 5 into $(VENV_5), 1 GB with a CPU build of torch"
	test -x $(VENV_5)/bin/python || $(PYTHON) -m venv $(VENV_5)
	$(VENV_5)/bin/python -m pip --disable-pip-version-check install torch==2.13.0 transformers==5.23.0
	@# what omnivoice imports to read sound is not needed: the tools put empty modules there
	$(VENV_5)/bin/python -m pip --disable-pip-version-check install --no-deps omnivoice==0.2.1
	@touch $@

VENV_TRACKERS ?= .venv-trackers# clients of trackers, some of which cannot lie beside transformers 4

$(VENV_TRACKERS)/.installed: Makefile
	@echo "Installing the clients of four trackers into $(VENV_TRACKERS), 310 MB"
	test -x $(VENV_TRACKERS)/bin/python || $(PYTHON) -m venv $(VENV_TRACKERS)
	$(VENV_TRACKERS)/bin/python -m pip --disable-pip-version-check install wandb==0.31.0 mlflow-skinny==3.17.2 swanlab==0.10.3 trackio==0.43.0 soundfile
	@touch $@

parity: $(VENV)/.parity $(VENV_5)/.installed $(VENV_TRACKERS)/.installed ## compare with torch, transformers 4 and 5, peft and trl, their optimizers and schedules; let trackers read what they were told
	ERNIEKIT_TRANSFORMERS5=$(abspath $(VENV_5))/bin/python ERNIEKIT_TRACKERS=$(abspath $(VENV_TRACKERS))/bin/python $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m parity tests/parity

oracle-5: $(VENV_5)/.installed ## record anew what transformers 5 computes, in an environment of its own
	$(VENV_5)/bin/python tools/parity/record_transformers5.py
	$(VENV_5)/bin/python tools/parity/record_added_tokens5.py
	$(VENV_5)/bin/python tools/parity/record_omnivoice.py
	$(VENV_5)/bin/python tools/parity/record_masked_codes.py

FUZZ_SECONDS ?= 60# for each of the four targets, two of which run at a time
FUZZ_CASES ?= 1500

fuzz: $(VENV)/.dev ## hostile configurations, data, models and templates, the same cases each time (new ones: tools/fuzz/run.py --seed 2 --seconds 3600)
	@# at most so many cases, so that a fast machine finds nothing new on the day of a release
	printf '%s\n' "config $(FUZZ_CASES)" "data $(FUZZ_CASES)" "model $(FUZZ_CASES)" "template 300" | \
	    OMP_NUM_THREADS=1 xargs -P 2 -L 1 sh -c '$(BIN)/python tools/fuzz/run.py $$0 --cases $$1 --seconds $(FUZZ_SECONDS)'

VENV_RAY ?= .venv-ray# Ray, 240 MB, which no other extra brings

$(VENV_RAY)/.installed: $(VENV)/.dev Makefile
	@echo "Installing Ray into $(VENV_RAY), 240 MB; all else is that of $(VENV)"
	test -x $(VENV_RAY)/bin/python || $(PYTHON) -m venv $(VENV_RAY)
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	    > "$$($(VENV_RAY)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth"
	$(VENV_RAY)/bin/python -m pip --disable-pip-version-check install ray==2.60.0
	@touch $@

test-ray: $(VENV_RAY)/.installed ## stage GRPO with rollout workers in processes of a real Ray (minutes)
	$(VENV_RAY)/bin/python -m pytest -m ray tests/rollouts

test-all: $(VENV)/.parity test-ray ## everything, with ranks that start anew and not as forks
	ERNIEKIT_COLD_RANKS=1 $(BIN)/python -m pytest -m "not ray"

lint: $(VENV)/.dev ## ruff and the type checker
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.cpu ## regenerate docs/parameters from the schema, and the tables of docs/migrating.md
	$(BIN)/erniekit docs
	$(BIN)/python tools/migrating.py

site: $(VENV)/.docs ## build the documentation site into output/site, in English and Chinese, with its links checked
	$(BIN)/python tools/docs/build_site.py

check-generated: $(VENV)/.cpu ## fail when a generated file is stale, a link is broken, or nothing reads or proves a parameter
	$(BIN)/erniekit docs --check
	$(BIN)/python tools/migrating.py --check
	$(BIN)/python tools/quickstart/make_data.py --check
	$(BIN)/python tools/quickstart/make_model.py --check
	$(BIN)/python tools/quickstart/make_listener.py --check
	$(BIN)/python tools/quickstart/make_speaker.py --check
	$(BIN)/python tools/quickstart/make_units.py --examples --check
	$(BIN)/python tools/quickstart/make_configs.py --check
	$(BIN)/python tools/bench/layouts_on_paper.py --check
	$(BIN)/python tools/parameter_audit.py --check
	$(BIN)/python tools/check_links.py

check-proofs: $(VENV)/.dev ## whether tests notice where a parameter is ignored: at eight of the places that read one, others every day (a minute)
	$(BIN)/python tools/ignored_parameters.py --sample 8

BENCHES := startup launching packing attention head_loss load export tokenise checkpoint cost host_memory memory compressed_state quantization
BENCHES_TORCH := moe
PEERS ?= .peers# where the virtual environments of peers lie

bench: $(VENV)/.all ## the benchmarks that need no torch; results belong in docs/benchmarks.md
	set -e; for name in $(BENCHES); do echo "== $$name"; $(BIN)/python tools/bench/$$name.py; done

layouts: $(VENV)/.cpu ## every parallel layout against one process, traffic and speed of ranks, into docs/exactness.md and docs/layout-estimates.md (an hour)
	$(BIN)/python tools/parity/layouts.py --write
	$(BIN)/python tools/bench/communication.py --write
	$(BIN)/python tools/bench/scaling.py --write

SPEECH := $(wildcard examples/configs/quickstart/asr*.yaml)
UNITS := examples/configs/quickstart/units.yaml
DISTILL := examples/configs/quickstart/distill.yaml
TTS_CODES := examples/configs/quickstart/tts-codes.yaml
TTS := examples/configs/quickstart/tts.yaml examples/configs/quickstart/tts-ar-nar.yaml

validate-examples: $(VENV)/.speech ## validate every shipped configuration
	@# layouts are checked rank by rank in tests/runners/test_layout_examples.py; vall-e-lora.yaml needs what vall-e.yaml trains
	$(BIN)/erniekit validate $(shell find examples/configs -name "*.yaml" -not -path "*/quickstart/*" -not -name codes.yaml -not -name vall-e-lora.yaml) > /dev/null
	@# some of the quickstart's go on from the output of another, so there must be one
	$(BIN)/erniekit train examples/configs/quickstart/sft.yaml max_steps=1 warmup_steps=0 do_eval=false report_to=none \
	    overwrite_output_dir=true output_dir=$(VENV)/one-step > /dev/null
	$(BIN)/erniekit validate $(filter-out $(DISTILL) $(SPEECH) $(UNITS) $(TTS) $(TTS_CODES),$(wildcard examples/configs/quickstart/*.yaml)) \
	    model_name_or_path=$(VENV)/one-step > /dev/null
	$(BIN)/erniekit validate $(DISTILL) teacher_model_name_or_path=$(VENV)/one-step > /dev/null
	@# that of units needs its records
	$(BIN)/python tools/quickstart/make_units.py --first 20 --output $(VENV)/units > /dev/null
	$(BIN)/erniekit validate $(UNITS) train_dataset_path=$(VENV)/units/train.jsonl \
	    eval_dataset_path=$(VENV)/units/eval-hear.jsonl > /dev/null
	@# those of speech need recordings, and the adapters a model
	$(BIN)/python tools/quickstart/make_speech.py --first 20 --output $(VENV)/speech > /dev/null
	$(BIN)/erniekit train examples/configs/quickstart/asr.yaml max_steps=1 warmup_steps=0 do_eval=false report_to=none \
	    overwrite_output_dir=true output_dir=$(VENV)/one-step-asr train_dataset_path=$(VENV)/speech/train.jsonl > /dev/null
	$(BIN)/erniekit validate $(SPEECH) model_name_or_path=$(VENV)/one-step-asr train_dataset_path=$(VENV)/speech/train.jsonl \
	    eval_dataset_path=$(VENV)/speech/eval.jsonl > /dev/null
	@# those that speak need codes of recordings; a judge need not be installed
	$(BIN)/python tools/quickstart/make_voice.py --first 20 --output $(VENV)/voice > /dev/null
	$(BIN)/erniekit codes $(TTS_CODES) codec=$(VENV)/voice/codec train_dataset_path=$(VENV)/voice/train.jsonl \
	    output_dir=$(VENV)/voice-codes > /dev/null
	$(BIN)/erniekit validate $(TTS) train_dataset_path=$(VENV)/voice-codes eval_dataset_path=$(VENV)/voice-codes \
	    speech_judge= metric_for_best_model=eval_loss > /dev/null
	$(BIN)/erniekit validate --verb codes examples/configs/speech/codes.yaml \
	    train_dataset_path=$(VENV)/speech/train.jsonl > /dev/null

smoke: $(VENV)/.cpu ## whether a step has become slower than what tools/bench/smoke.json records (half a minute)
	$(BIN)/python tools/bench/smoke.py

bench-peers: $(VENV)/.cpu ## training beside transformers, trl and the Paddle suites (installs them; hours), into docs/benchmarks.md
	PYTHON=$(PYTHON) tools/bench/peers/make.sh $(PEERS)
	$(BIN)/python tools/bench/training_speed.py --environments $(PEERS) --write
	$(BIN)/python tools/bench/peak_memory.py --environments $(PEERS) --write

bench-profile: $(VENV)/.cpu ## where our own training step goes, and its share of what the processor can do
	OMP_NUM_THREADS=2 $(BIN)/python tools/bench/step_profile.py

bench-torch: $(VENV)/.parity ## a layer of experts beside torch and transformers
	set -e; for name in $(BENCHES_TORCH); do echo "== $$name"; $(BIN)/python tools/bench/$$name.py; done

bench-serving: $(VENV)/.all ## the server beside transformers serve (THEIRS: the Python of its environment), and an hour of mixed load, into docs/benchmarks.md
	$(BIN)/python tools/bench/serving.py $(if $(THEIRS),--theirs $(THEIRS)) --write

bench-speaking: $(VENV)/.cpu $(VENV_5)/.installed ## how fast models speak, beside the package omnivoice, into docs/benchmarks.md
	$(BIN)/python tools/bench/speaking.py --omnivoice $(abspath $(VENV_5))/bin/python --write

clean: ## remove the virtual environment and outputs
	rm -rf $(VENV) output .pytest_cache .ruff_cache .mypy_cache .hypothesis
