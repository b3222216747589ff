# `make help` lists the targets. Targets that need .venv set it up first; this is quick if it is up to date.

PYTHON ?= python3
BIN := .venv/bin

# One thread per test process, because several test processes run in parallel.
TEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
FAST := -m "not slow and not gpu" -n 2

export PYTHON TORCH_INDEX

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-unit test-dist test-slow lint format bench bench-gpu docs figures wheel constraints clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile
	@echo
	@echo "  PYTHON=python3.12 picks the Python, TORCH_INDEX=URL a package index for torch"
	@echo "  (https://download.pytorch.org/whl/cpu for the small CPU build)."

setup: ## create .venv with the pinned packages and this package (quick if up to date)
	@sh scripts/setup.sh

demo: setup ## train a small model three ways (dense, lean, lean on two processes) and compare: a quick first look
	@$(BIN)/scantling train recipes/demo-dense.yaml --run-dir runs/demo/dense --force
	@$(BIN)/scantling train recipes/demo-lean.yaml --run-dir runs/demo/lean --force
	@OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 2 -m scantling train recipes/demo-two.yaml \
		--run-dir runs/demo/two --force
	@$(BIN)/scantling compare runs/demo/dense runs/demo/lean runs/demo/two --out runs/demo

test: lint ## lint, type-check and run the default test suite (what CI runs)
	@$(TEST) $(FAST)

test-unit: setup ## run the tests of one process (PYTEST="-n 4 ..." adds options of pytest)
	@$(TEST) -m "not slow and not gpu and not dist" -n 2 $(PYTEST)

test-dist: setup ## run the tests that start several processes
	@$(TEST) -m "dist and not slow and not gpu" -n 2 $(PYTEST)

test-slow: setup ## run the slow tests, which the default suite skips
	@$(TEST) -m "slow and not gpu"

lint: setup ## check style, spelling and types, without changes
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/codespell
	@$(BIN)/mypy

format: setup ## format and auto-fix the code with ruff
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

bench: setup ## measure our training loop against a bare PyTorch loop and HF Trainer, on this CPU
	@$(BIN)/python benchmarks/baseline.py --threads 1

bench-gpu: setup ## run the GPU tests and benchmarks (needs an NVIDIA GPU; 14 minutes)
	@$(BIN)/python benchmarks/gpu.py

docs: setup ## build the documentation into docs/_build/html
	@$(BIN)/python -m sphinx -W --keep-going -b html docs docs/_build/html
	@echo "docs: open docs/_build/html/index.html"

figures: setup ## redraw the figures of README and documentation into docs/figures
	@$(BIN)/python -m scripts.figures

wheel: ## build the wheel, install it without extras in a clean environment and run every method there
	@sh scripts/wheel.sh

constraints: ## update constraints.txt to the newest allowed versions (TORCH=X.Y.Z also changes torch)
	@sh scripts/constraints.sh $(TORCH)

clean: ## remove .venv, caches and built files, but not runs/
	rm -rf .venv build dist docs/_build .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
