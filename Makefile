# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.

PYTHON ?= python3
WORKERS ?= 2

TORCH := torch==2.13.0
NEWEST := transformers==5.24.0
OLDEST := transformers==5.17.0

NEWEST_PYTHON := .venv/bin/python
OLDEST_PYTHON := .venv-oldest/bin/python

# One thread for each of the workers: the tests are many small tensors.
PYTEST := -m pytest -q -n $(WORKERS)
test: export OMP_NUM_THREADS := 1
# Threads that spin while they wait cost a busy machine several times the work itself.
quickstart notebooks: export OMP_WAIT_POLICY := PASSIVE

.PHONY: help venv quickstart notebooks test lint clean
.DEFAULT_GOAL := help

help:  ## Show these targets
	@grep -hE '^[a-z]+: .*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 20

venv: .venv/.installed  ## Make .venv: torch, Transformers and this package, editable

quickstart: .venv/.installed  ## Train a small ATMA on real text, save, load it elsewhere, generate, plot
	$(NEWEST_PYTHON) scripts/quickstart.py

notebooks: .venv/.installed  ## Run the notebooks and write their outputs into them
	$(NEWEST_PYTHON) scripts/run_notebooks.py

test: .venv/.installed .venv-oldest/.installed  ## Run all tests, and the smoke tests on the oldest Transformers
	$(NEWEST_PYTHON) $(PYTEST)
	TRITON_INTERPRET=1 $(NEWEST_PYTHON) $(PYTEST) tests/*_triton.py
	$(OLDEST_PYTHON) $(PYTEST) -m smoke

lint: .venv/.installed  ## Check the style of the code
	$(NEWEST_PYTHON) -m ruff check .
	$(NEWEST_PYTHON) -m ruff format --check .

clean:  ## Remove the environments, caches and runs
	rm -rf .venv .venv-oldest .pytest_cache .ruff_cache build dist runs *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/.installed: WANTED := -e '.[train,peft,test,notebooks,ecosystem]' '$(NEWEST)'
.venv-oldest/.installed: WANTED := -e '.[train,peft,test]' '$(OLDEST)'

.venv/.installed .venv-oldest/.installed: setup.py pyproject.toml Makefile
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet '$(TORCH)'
	$(@D)/bin/python -m pip install --quiet $(WANTED)
	touch $@
