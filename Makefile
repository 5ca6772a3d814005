# make serve | quick | test | fuzz | bench | bench-vllm | bench-clients | lint: each sets up .venv in the checkout first.
# make docs: the documentation as a website in site/.
# make wheel: what `pip install` takes, into dist/, with prebuilt kernels.
# make real-model | bench-real: a pretrained model under terms of its own, and what was measured on it.

PYTHON ?= python3
PORT ?= 8000
JOBS ?= 2
VENV := .venv
BIN := $(VENV)/bin
SERVES := $(VENV)/.serves
TESTS := $(VENV)/.tests
READY := $(VENV)/.ready
PEERS := .venv-peers
PEERS_READY := $(PEERS)/.ready
PEERS_PINS := benchmarks/peers
VLLM := .venv-vllm
VLLM_READY := $(VLLM)/.ready
VLLM_PINS := benchmarks/vllm
SGLANG := .venv-sglang
SGLANG_READY := $(SGLANG)/.ready
CLIENTS := .venv-clients
CLIENTS_READY := $(CLIENTS)/.ready
CLIENTS_PINS := benchmarks/clients
REAL := .venv-real
REAL_READY := $(REAL)/.ready
REAL_PINS := benchmarks/real_model.txt
REAL_MODEL := $(or $(SSD_REAL_MODEL),.real-model)
REPLAY := --max-draft 64 --jobs 2
CURVES := $(REPLAY) --tokenizer llama2-32k llama3-128k --drafter ssd arctic --max-output-tokens 60000
OTHERS := $(REPLAY) --tokenizer llama3-128k --max-output-tokens 5000 --drafter ssd arctic
CHAINS := llama-cpp vllm-ngram prompt-lookup-hf
TREES := sglang --tree

.PHONY: serve wheel quick test kernels fuzz docs bench bench-peers bench-vllm bench-clients real-model bench-real lint format clean

# Torch by its exact version: a looser request would pull the CUDA build and its gigabytes of libraries.
INSTALL = $(BIN)/pip install --quiet --no-compile --constraint constraints.txt torch==2.13.0 --editable
# Compiles the modules that a server imports: pip would compile all modules, which took as long as everything else, and
# where PYTHONDONTWRITEBYTECODE is set, every process would compile them again, which took half of a server's start.
COMPILE = PYTHONDONTWRITEBYTECODE= $(BIN)/python -c 'import server.command.start, ssd.model.draft.drafter'

$(SERVES): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) '.[server,structured]'
	$(COMPILE)
	touch $@

$(TESTS): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) '.[test]'
	$(COMPILE)
	touch $(SERVES) $@

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) '.[dev]'
	$(COMPILE)
	touch $(SERVES) $(TESTS) $@

serve: $(SERVES)
	exec $(BIN)/ssd-serve --port $(PORT) $(ARGS)

# The wheel contains machine code of the kernels for this Python and platform: two minutes. It is compiled in a copy of
# the sources, so that the checkout stays without.
TAGS = import sys, sysconfig; print("--python-tag cp%d%d --plat-name" % sys.version_info[:2], sysconfig.get_platform())

wheel: $(SERVES)
	rm -rf build/wheel && mkdir -p build/wheel
	tar c --exclude __pycache__ --exclude prebuilt pyproject.toml README.md LICENSE ssd server cache_builder | tar x -C build/wheel
	cd build/wheel && $(abspath $(BIN))/python -m server.command.prebuild
	$(BIN)/pip wheel --quiet --no-deps --wheel-dir dist \
		--config-settings "--build-option=$$($(BIN)/python -c '$(TAGS)')" ./build/wheel
	@ls dist/*.whl

# One thread for each of JOBS processes.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal

# SGLang's worker, without what it needs on a GPU.
$(SGLANG_READY): tests/sglang.txt | $(READY)
	$(BIN)/pip install --quiet --no-deps --no-compile --upgrade --target $(SGLANG) --requirement tests/sglang.txt
	touch $@

# While editing: what needs no model, server or Redis; a minute, and another where kernels must be compiled.
quick: $(READY)
	$(PYTEST) --quick

# What the project promises: the files that tests/conftest.py names. With ALL=1 all tests and the linters, as CI does.
test: $(if $(ALL),$(READY) $(SGLANG_READY),$(TESTS))
	$(MAKE) --no-print-directory --jobs=2 $(if $(ALL),lint) kernels
	$(PYTEST) $(if $(ALL),--slow,--promises)

# 5,000 requests made from our own description of the service, and 5,000 schemas, for a nightly run: some ten minutes.
fuzz: $(READY)
	SSD_FUZZ_CASES=5000 $(BIN)/python -m pytest -s tests/hostile/test_openapi.py tests/test_schema_answers.py \
		tests/server/test_parse_helpers.py

# Machine code of the kernels, once for all processes of the tests.
kernels: $(TESTS)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.compile_ahead

# The documentation as a website, with an API reference from the docstrings. A link that leads nowhere is an error.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "docs: open site/index.html"

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Reproduces the README's figures: some 110 minutes on two cores, 2 GB of disk for the largest index. The replay needs
# recorded traces and tokenizers; other people's drafters are asked where `make bench-peers` installed them.
bench: $(READY)
	$(BIN)/python -m benchmarks.growth --out benchmarks/results/growth.json
	@if [ -n "$$SSD_TRACES" ] && [ -n "$$SSD_TOKENIZERS" ]; then \
		$(BIN)/python -m benchmarks.learning --out benchmarks/results/learning.json --picture docs/pictures/growth.png; \
	fi
	$(BIN)/python -m benchmarks.evaluate --save-cost benchmarks/results/verify-cost.json \
		--out benchmarks/results/evaluate.json
	$(BIN)/python -m benchmarks.decode --out benchmarks/results/decode.json
	$(BIN)/python -m benchmarks.limits --out benchmarks/results/limits.json
	$(BIN)/python -m benchmarks.exact --out benchmarks/results/exact.json
	$(BIN)/python -m benchmarks.contenders --question overhead --out benchmarks/results/overhead.json
	$(BIN)/python -m benchmarks.contenders --out benchmarks/results/sources.json
	$(BIN)/python -m benchmarks.contenders --question mechanisms --out benchmarks/results/mechanisms.json
	$(BIN)/python -m benchmarks.coupled --out benchmarks/results/coupled.json
	@if [ -n "$$SSD_TRACES" ] && [ -n "$$SSD_TOKENIZERS" ]; then \
		if [ -e $(PEERS_READY) ]; then \
			$(BIN)/python -m benchmarks.replay $(CURVES) --out benchmarks/results/replay-curve.json; \
			$(BIN)/python -m benchmarks.replay $(CURVES) --tree --out benchmarks/results/replay-tree.json; \
			$(BIN)/python -m benchmarks.replay $(OTHERS) $(CHAINS) --out benchmarks/results/replay-others.json; \
			$(BIN)/python -m benchmarks.replay $(OTHERS) $(TREES) --out benchmarks/results/replay-others-tree.json; \
		fi; \
	else echo "replay skipped: set SSD_TRACES and SSD_TOKENIZERS to directories of recorded traces and tokenizers"; fi
	$(BIN)/python -m benchmarks.index --tokens 1000000 --out benchmarks/results/index-1m.json
	$(BIN)/python -m benchmarks.index --tokens 16000000 --out benchmarks/results/index-16m.json
	$(BIN)/python -m benchmarks.index --tokens 16000000 --static 240000000 --out benchmarks/results/index-256m.json
	$(BIN)/python -m benchmarks.http --out benchmarks/results/http.json
	$(BIN)/python -m benchmarks.reliability --question soak --out benchmarks/results/soak.json
	$(BIN)/python -m benchmarks.reliability --question faults --out benchmarks/results/faults.json
	$(BIN)/python -m benchmarks.reliability --question faults --servers 3 --rounds 30 \
		--out benchmarks/results/fleet-faults.json
	$(BIN)/python -m benchmarks.report

# Other people's drafters in an environment of their own: about five minutes, of which two download and three compile, and
# 2.5 GB. It must be activated, because arctic-inference's build takes the first python on PATH; torch comes first and by
# its exact version, as above. llama.cpp comes as llama-cpp-python's source, 77 MB, of which four files are compiled.
bench-peers: $(PEERS_READY)

$(PEERS_READY): $(wildcard $(PEERS_PINS)/*.txt) $(PEERS_PINS)/build.py $(PEERS_PINS)/llama_cpp.cpp
	@echo "bench-peers: installing into $(PEERS)"
	@$(PYTHON) -m venv --clear $(PEERS) && . $(PEERS)/bin/activate \
		&& export PIP_CONSTRAINT=$(PEERS_PINS)/constraints.txt \
		&& pip install --quiet torch==2.13.0 \
		&& pip install --quiet --requirement $(PEERS_PINS)/requirements.txt \
		&& pip install --quiet --no-deps --no-build-isolation --requirement $(PEERS_PINS)/requirements-no-deps.txt \
		&& python -m benchmarks.peers.build sglang-ngram \
		&& pip download --quiet --no-deps --no-binary llama-cpp-python --dest $(PEERS)/sources \
			--requirement $(PEERS_PINS)/requirements-sources.txt \
		&& python -m benchmarks.peers.build llama-cpp $(PEERS)/sources/*.tar.gz \
		&& rm -r $(PEERS)/sources \
		|| { echo "bench-peers: the installation failed, see above; needs Python >= 3.11 and a C++ compiler" >&2; exit 1; }
	@for name in arctic vllm-ngram prompt-lookup-hf sglang llama-cpp; do \
		$(PEERS)/bin/python -m benchmarks.peers.process check $$name \
		|| { echo "bench-peers: $$name was installed but does not draft, see above" >&2; exit 1; }; \
	done
	touch $@

# Our drafter inside vLLM, in an environment of its own: about three minutes and 4 GB, then half an hour to run, or
# an hour with recorded traces. Our package comes last and without its dependencies, so that the versions are vLLM's.
bench-vllm: $(READY) $(VLLM_READY)
	$(BIN)/python -m benchmarks.vllm $(ARGS) --out benchmarks/results/vllm.json
	$(BIN)/python -m benchmarks.vllm.changes --out benchmarks/results/vllm-changes.json
	$(BIN)/python -m benchmarks.vllm.memory --streams mixed $(if $(SSD_TRACES),sql agent_tools) \
		--out benchmarks/results/vllm-memory.json
	$(BIN)/python -m benchmarks.vllm.memory --runner v2 --requests 40 --rounds 1 \
		--out benchmarks/results/vllm-memory-v2.json
	$(BIN)/python -m benchmarks.vllm --runner v1 v2 --batch 4 --requests 20 --max-tokens 24 --window 10 \
		--out benchmarks/results/vllm-runners.json
	$(BIN)/python -m pytest --slow tests/test_vllm_cases.py

$(VLLM_READY): $(VLLM_PINS)/requirements.txt $(VLLM_PINS)/requirements-no-deps.txt $(VLLM_PINS)/constraints.txt
	@echo "bench-vllm: installing into $(VLLM)"
	@$(PYTHON) -m venv --clear $(VLLM) && . $(VLLM)/bin/activate \
		&& export PIP_CONSTRAINT=$(VLLM_PINS)/constraints.txt \
		&& pip install --quiet torch==2.13.0 \
		&& pip install --quiet --requirement $(VLLM_PINS)/requirements.txt \
		&& pip install --quiet --no-deps --no-build-isolation --requirement $(VLLM_PINS)/requirements-no-deps.txt \
		&& pip install --quiet --no-deps --no-build-isolation --editable . \
		|| { echo "bench-vllm: the installation failed, see above; needs Python >= 3.11 and a C++ compiler" >&2; exit 1; }
	@$(VLLM)/bin/python -m benchmarks.vllm.engines check v1 && $(VLLM)/bin/python -m benchmarks.vllm.engines check v2 \
		|| { echo "bench-vllm: vLLM was installed but does not draft with ours, see above" >&2; exit 1; }
	touch $@

# Other people's clients against our server, in an environment of their own: some minutes and 3 GB, then one to run.
bench-clients: $(READY) $(CLIENTS_READY)
	$(BIN)/python -m benchmarks.clients $(ARGS) --out benchmarks/results/clients.json

$(CLIENTS_READY): $(CLIENTS_PINS)/requirements.txt $(CLIENTS_PINS)/constraints.txt
	@echo "bench-clients: installing into $(CLIENTS)"
	@$(PYTHON) -m venv --clear $(CLIENTS) \
		&& export PIP_CONSTRAINT=$(CLIENTS_PINS)/constraints.txt \
		&& $(CLIENTS)/bin/pip install --quiet torch==2.13.0 \
		&& $(CLIENTS)/bin/pip install --quiet --requirement $(CLIENTS_PINS)/requirements.txt \
		|| { echo "bench-clients: the installation failed, see above" >&2; exit 1; }
	touch $@

# A real pretrained model, Gemma 3 270M, as a plain directory that git ignores: some minutes, 240 MB to download, 2.5 GB of
# disk. Its terms are not ours: nothing is downloaded before ACCEPT_GEMMA_TERMS=1 says that they are accepted.
real-model: $(REAL_MODEL)/.checked
	@echo "real-model: $(REAL_MODEL) is ready: --model real; ssd-cache evaluate LOG --measure $(REAL_MODEL)"
	$(if $(LOGS),$(REAL)/bin/python -m cache_builder evaluate $(LOGS) --measure $(REAL_MODEL) > real-model.txt)

# The figures of docs/ that were measured on it: more than an hour on two idle cores.
bench-real: $(READY) real-model
	$(BIN)/python -m benchmarks.exact $(REAL_MODEL) --prompts 4 --max-tokens 32 --rounds 7 \
		--out benchmarks/results/exact-gemma.json
	$(BIN)/python -m benchmarks.contenders --model $(REAL_MODEL) --requests 8 --out benchmarks/results/sources-gemma.json
	$(BIN)/python -m benchmarks.coupled --model $(REAL_MODEL) --requests 4 --max-tokens 32 \
		--group 2 --out benchmarks/results/coupled-gemma.json
	$(BIN)/python -m benchmarks.evaluate $(REAL_MODEL) --requests 8 --max-tokens 32 --prompt-tokens 128 --rounds 1 \
		--workloads mixed often --out benchmarks/results/evaluate-gemma.json
	$(BIN)/python -m benchmarks.growth --model $(REAL_MODEL) --streams new $(if $(SSD_TRACES),sql agent_tools) \
		--requests 40 --window 2 --repeated 8 --out benchmarks/results/growth-gemma.json
	$(BIN)/python -m benchmarks.decode --model $(REAL_MODEL) --batch 1 4 --rounds 16 --baseline-rounds 3 \
		--out benchmarks/results/decode-gemma.json
	$(BIN)/python -m benchmarks.limits --model $(REAL_MODEL) --out benchmarks/results/limits-gemma.json
	$(BIN)/python -m benchmarks.contenders --question overhead --model $(REAL_MODEL) --batch 1 4 --rounds 12 \
		--out benchmarks/results/overhead-gemma.json
	$(BIN)/python -m benchmarks.report

$(REAL_MODEL)/.checked: benchmarks/real_model.py | $(REAL_READY)
	@$(PYTHON) -m benchmarks.real_model terms
	@$(REAL)/bin/python -m benchmarks.real_model convert $(REAL_MODEL)
	@$(REAL)/bin/python -m benchmarks.real_model check $(REAL_MODEL)
	@touch $@

$(REAL_READY): $(REAL_PINS)
	@$(PYTHON) -m benchmarks.real_model terms
	@echo "real-model: installing into $(REAL)"
	@test -x $(REAL)/bin/python || $(PYTHON) -m venv $(REAL)
	@export PIP_CONSTRAINT=constraints.txt \
		&& $(REAL)/bin/pip install --quiet torch==2.13.0 \
		&& $(REAL)/bin/pip install --quiet --requirement $(REAL_PINS) --editable '.[engine]' \
		|| { echo "real-model: the installation failed, see above" >&2; exit 1; }
	@touch $@

clean:
	rm -rf $(VENV) $(PEERS) $(VLLM) $(CLIENTS) $(REAL) .real-model build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
