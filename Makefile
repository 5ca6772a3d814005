# make serve | test | bench | lint: each sets up .venv in the checkout first.

PYTHON ?= python3
PORT ?= 8000
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TRACES := agent_react agent_tools sql code chat

.PHONY: serve test bench lint format clean

# Torch first and by its exact version: a looser request would pull the CUDA build and its gigabytes of libraries.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

serve: $(READY)
	exec $(BIN)/ssd-serve --port $(PORT) $(ARGS)

test: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Reproduces the README's figures: about ten minutes on two cores. The replay needs recorded traces and tokenizers.
bench: $(READY)
	$(BIN)/python -m benchmarks.growth --out benchmarks/results --json
	@if [ -n "$$SSD_TRACES" ] && [ -n "$$SSD_TOKENIZERS" ]; then \
		$(BIN)/python -m benchmarks.replay $(TRACES) --tokenizer llama2-32k --drafter ssd --drafter frequency \
			--drafter prompt-lookup --max-draft 16 --max-output-tokens 120000 --json \
			| tee /dev/stderr | tail -n 1 >benchmarks/results/replay.json; \
	else echo "replay skipped: set SSD_TRACES and SSD_TOKENIZERS to directories of recorded traces and tokenizers"; fi
	$(BIN)/python -m benchmarks.report

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
