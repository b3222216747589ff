# Everything is a target here; `make help` lists them. Each sets up .venv first and is quick when that is done.

PYTHON ?= python3
BIN := .venv/bin

# One thread per test process: the tests run side by side.
TEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
FAST := -m "not slow and not gpu" -n 2

export PYTHON TORCH_INDEX

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow lint format bench bench-gpu docs constraints clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile
	@echo
	@echo "  PYTHON=python3.12 picks the Python, TORCH_INDEX=URL the index that torch comes from"
	@echo "  (https://download.pytorch.org/whl/cpu for the small CPU build)."

setup: ## make .venv with the pinned packages and this package (quick when up to date)
	@sh scripts/setup.sh

demo: setup ## train one small model dense, lean, and lean on two processes: the quickest way to see what this is
	@$(BIN)/scantling train recipes/demo-dense.yaml --run-dir runs/demo/dense --force
	@$(BIN)/scantling train recipes/demo-lean.yaml --run-dir runs/demo/lean --force
	@OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 2 -m scantling train recipes/demo-two.yaml \
		--run-dir runs/demo/two --force
	@$(BIN)/scantling compare runs/demo/dense runs/demo/lean runs/demo/two --out runs/demo

test: lint ## lint, type-check and run the default test suite (what CI runs)
	@$(TEST) $(FAST)

test-slow: setup ## run the tests that the default suite leaves out for their length
	@$(TEST) -m "slow and not gpu"

lint: setup ## ruff and mypy, changing nothing
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: setup ## let ruff format and fix what it can
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

bench: setup ## measure our training loop against a bare PyTorch loop and HF Trainer, on this CPU
	@$(BIN)/python benchmarks/baseline.py --threads 1

bench-gpu: setup ## run the GPU tests and benchmarks (needs an NVIDIA GPU; under 9 minutes)
	@$(BIN)/python benchmarks/gpu.py

docs: setup ## build the documentation into docs/_build/html
	@$(BIN)/python -m sphinx -W --keep-going -b html docs docs/_build/html
	@echo "docs: open docs/_build/html/index.html"

constraints: ## rewrite constraints.txt with the newest versions allowed (TORCH=X.Y.Z also moves torch)
	@sh scripts/constraints.sh $(TORCH)

clean: ## remove .venv, caches and built files; runs/ stays
	rm -rf .venv build dist docs/_build .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
