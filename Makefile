# Every target that needs the environment brings it up first; with nothing to do that takes a moment.
PYTHON ?= python3
BIN := .venv/bin
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
SAY ?= Hello world.
ROUNDS ?= 20
TOKENS ?= 128

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint types contract modes versions cases bench soak faults talker talker-eval check clean

help: ## what there is to make
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-13s%s\n", $$1, $$2}' Makefile

setup: ## create or update .venv (every other target does this by itself)
	@$(PYTHON) tools/setup_env.py

demo: setup ## text to speech: writes demo.wav; SAY="..." changes the text
	$(BIN)/omnistage speak "$(SAY)" -o demo.wav

test: setup ## the test suite, without what is marked slow
	$(PYTEST) -m "not slow"

lint: setup ## ruff's rules and format, and the direction of imports
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports --no-cache

types: setup ## mypy, strict, on the package, the tests and the tools
	$(BIN)/mypy

contract: setup ## vLLM's own scheduler tests, with its schedulers and with ours
	OMP_NUM_THREADS=1 $(BIN)/python -m tools.contract

modes: setup ## the ways of running vLLM, proven one by one; writes docs/modes.md
	OMP_NUM_THREADS=1 $(BIN)/python -m tools.modes

versions: setup ## what needs no engine, on vLLM 0.31 and 0.33; writes docs/versions.md
	$(BIN)/python -m tools.versions

cases: setup ## the public failure cases and the tests that hold them; fails on a gap
	@$(BIN)/python -m tools.cases

bench: setup ## tokens per second and delivery cost beside stock vLLM; benchmarks/hop.py: the hop alone
	$(BIN)/python benchmarks/ar.py --rounds $(ROUNDS) --tokens $(TOKENS)

soak: setup ## the tests marked slow, and the contract in full
	$(PYTEST) -m slow --timeout=0 || [ $$? -eq 5 ] # 5: no test is marked
	OMP_NUM_THREADS=1 $(BIN)/python -m tools.contract --long

faults: setup ## kill, stop and freeze each process of running services; writes docs/faults.md
	OMP_NUM_THREADS=1 $(BIN)/python -m tools.faults

talker: setup ## train the talker anew into .cache/talker/export; hours, and goes on if stopped
	$(BIN)/python -m tools.talker all

talker-eval: setup ## the talker's word error rate, speed and slack; installs omnistage[train]
	$(BIN)/python -m pip install -q -e '.[train]'
	$(BIN)/python -m tools.talker.evaluate

check: setup ## what is installed, what runs, and what would not and why
	$(BIN)/omnistage check

clean: ## remove .venv, caches and build output
	rm -rf .venv .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis dist build demo.wav
