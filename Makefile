# make demo    train the siblings of an array together, here and now; no Slurm needed
# make test    lint, then every test; with root and apt-get on a real Slurm that it installs and starts
# make lint    ruff and mypy alone
# make clean   remove what the others made
#
# Each does its own set-up. PYTHON=/path/to/python3, TORCH=torch==2.13.0 and TORCH_INDEX=URL override what .venv is made of.

PYTHON ?= $(shell scripts/find-python.sh)
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
PYTEST_ARGS ?=

export TORCH TORCH_INDEX
export PYTHONUNBUFFERED := 1

.DEFAULT_GOAL := demo
.PHONY: demo test lint venv slurm clean

demo: .venv/.ready-examples
	.venv/bin/python scripts/demo.py

test: .venv/.ready-test slurm lint
	.venv/bin/python -m pytest $(PYTEST_ARGS)

lint: .venv/.ready-test
	.venv/bin/ruff check .
	.venv/bin/mypy

venv: .venv/.ready-test

.venv/.ready-examples: pyproject.toml scripts/make-venv.sh
	scripts/make-venv.sh "$(PYTHON)" examples
	touch $@

.venv/.ready-test: pyproject.toml scripts/make-venv.sh
	scripts/make-venv.sh "$(PYTHON)" examples,sim,test
	touch .venv/.ready-examples $@

slurm:
	scripts/install-slurm.sh

clean:
	[ ! -e .test-cluster ] || "$(PYTHON)" scripts/slurm_cluster.py down
	rm -rf .venv .test-cluster .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
