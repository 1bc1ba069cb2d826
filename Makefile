# make demo       set up what it needs, then measure the embedded checkpoint beyond its length, and draw what it found
# make demo-compare  set up, then train six position encodings from scratch and compare them (under five minutes)
# make test       set up what they need, then run the tests
# make scheme NAME=rerope  the tests of one scheme (two minutes), and its line in the reference
# make nightly    set up, then all that CI leaves out: the tests on every family, with a figure of coverage; oldest, hard,
#                 notebooks and, where the processor has AVX2, vllm-check (about two hours on two cores)
# make nightly-tests  set up, then its tests alone; OPTIONS="--part 2/4 --cov-append" runs the second of four parts
# make oldest     the tests on the oldest torch and Transformers that are declared, with all that is compiled, in an
#                 environment of its own (two minutes of set-up, once; 4 GB where torch brings CUDA)
# make zoo        set up, then check a tiny model of every type of Transformers; writes docs/families.md (forty minutes)
#                 OPTIONS="--only llama gemma3" checks these alone
# make hard       set up, then thousands of random cases and fuzzed inputs (about two minutes)
# make faults     set up, then put each known fault into a copy of the package: a test must fail (about ten minutes)
# make vllm-check  real vLLM on this CPU serves folders under schemes that it does not know (nine minutes)
# make transformers-tests TRANSFORMERS=<checkout>  set up, then run Transformers' own tests on patched models (an hour)
# make lists      write the table of docs/reference/schemes.md and the facts of docs/explorer.html anew, after a scheme changed
# make notebooks  set up, then run the notebooks with fast settings; make notebooks-full runs them in place, as committed
# make docs       set up, then build the site into site/
# make wheel      set up, then build wheel and sdist into dist/, and try the wheel in an environment of its own
# make check      set up, then lint, types, tests
# make bench      set up, then measure speed and memory against plain attention (under twenty minutes on two cores)
# make gpu        on a machine with a GPU, with the Python that is there (GPU_PYTHON), without set-up: its tests and what
#                 matters most in a quarter of an hour; goes on after a stop; into runs/gpu
#                 OPTIONS="--minutes 60 --model FOLDER --length 32768"; OPTIONS="--device cpu --quick" tries it without a GPU
# make gpu-check  likewise, its tests alone (an hour at most)
# make gpu-bench  likewise, the tables and kernels alone; every row: OPTIONS="--only rest --minutes 60"
# make gpu-finetune  on a machine with a GPU: pretrain 112 million parameters, then fine-tune at four times the length
# make clean      remove what set-up and the demo made

PYTHON ?= python3
GPU_PYTHON ?= python3
VENV ?= .venv
VLLM_VENV ?= .venv-vllm
OLDEST_VENV ?= .venv-oldest
CONSTRAINTS ?= constraints.txt
BIN := $(VENV)/bin

# the tests start dozens of processes, and each of them would compile torch and Transformers anew
unexport PYTHONDONTWRITEBYTECODE

.SECONDARY:
.PHONY: setup demo demo-compare test scheme nightly nightly-tests oldest zoo hard faults vllm-check transformers-tests lists notebooks notebooks-full docs wheel lint check bench \
	gpu gpu-check gpu-bench gpu-finetune clean

# Each stamp is an extra of pyproject.toml: what a target needs, and no more; `dev` has the others in it. Python compiles
# what it imports, a small part of what is installed.
$(VENV)/.%: pyproject.toml $(CONSTRAINTS)
	@echo "== set-up: $(VENV) with rope-patch[$*] (a few minutes, once)"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --disable-pip-version-check --no-compile -c $(CONSTRAINTS) torch
	$(BIN)/pip install --disable-pip-version-check --no-compile -c $(CONSTRAINTS) -e ".[$*]"
	@touch $@ $(if $(filter dev,$*),$(VENV)/.test $(VENV)/.demo)

setup: $(VENV)/.dev

demo: $(VENV)/.demo
	@echo "== demo: the embedded checkpoint beyond its length, on ordinary text and on a passage far back (half a minute)"
	$(BIN)/python recipes/measure.py recipes/configs/demo.yaml
	@echo "rope-patch is in $(BIN): run 'source $(BIN)/activate' once, then the command above, or on your own model and text:"
	@echo "rope-patch sweep --model DIR --text FILE --target 4x"

demo-compare: $(VENV)/.demo
	@echo "== demo: six position encodings, each trained from scratch at 128 bytes and measured up to 1024 (under five minutes)"
	$(BIN)/python recipes/compare_encodings.py recipes/configs/compare_demo.yaml

test: $(VENV)/.test
	@echo "== tests, one process per core with one thread each (more would only wait for each other)"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal $(OPTIONS)

scheme: $(VENV)/.test
	@test -n "$(NAME)" || { echo "NAME=<as registered, such as rerope>"; exit 2; }
	@$(BIN)/python -m tests.lists
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal --scheme $(NAME) $(OPTIONS)
	@$(MAKE) lint

nightly: nightly-tests oldest hard notebooks
	@if grep -q avx2 /proc/cpuinfo; then $(MAKE) vllm-check; \
		else echo "vLLM was not run: this processor has no AVX2"; fi

nightly-tests: $(VENV)/.test
	@echo "== tests on every family (much longer than the usual run)"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal --all-families --cov=rope_patch \
		--cov-report=term:skip-covered $(OPTIONS)

# the lower bounds of the dependencies, such as torch==2.11.0
OLDEST = $(shell sed -nE 's/^ *"(torch|transformers)>=([0-9]+[.][0-9]+).*/\1==\2.0/p' pyproject.toml)

# NumPy 2.4 no longer turns an array of one number into a number, as the interpreter of Triton 3.6 expects
oldest:
	@echo "== tests on $(OLDEST), in an environment of its own: $(OLDEST_VENV)"
	test -x $(OLDEST_VENV)/bin/python || $(PYTHON) -m venv $(OLDEST_VENV)
	$(OLDEST_VENV)/bin/pip install --quiet --disable-pip-version-check --no-compile $(OLDEST) "numpy<2.4" -e ".[test]"
	OMP_NUM_THREADS=1 $(OLDEST_VENV)/bin/python -m pytest -n auto --dist worksteal $(OPTIONS)
	OMP_NUM_THREADS=1 $(OLDEST_VENV)/bin/python -m pytest -n auto --dist worksteal --all-families \
		tests/contract/test_compile.py tests/contract/test_graphs.py $(OPTIONS)

zoo: $(VENV)/.test
	@echo "== a tiny model of every type of Transformers, into docs/families.md (forty minutes; continues where it stopped)"
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.zoo $(OPTIONS)

hard: $(VENV)/.test
	@echo "== thousands of random cases against the oracle, and fuzzed inputs (about two minutes)"
	ROPE_PATCH_HARD=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal tests/hardening

faults: $(VENV)/.test
	@echo "== faults, each in a copy of the package: its tests must fail (about ten minutes)"
	$(BIN)/python -m tests.faults $(OPTIONS)

vllm-check:
	@echo "== vLLM on this CPU, in an environment of its own: $(VLLM_VENV) (two minutes of set-up, once, and seven of tests)"
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) torch
	$(VLLM_VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps -r tests/serving/requirements.txt -e .
	OMP_NUM_THREADS=2 $(VLLM_VENV)/bin/python -m pytest tests/serving

transformers-tests: setup
	@test -n "$(TRANSFORMERS)" || { echo "TRANSFORMERS=<a checkout of Transformers at the installed release>"; exit 2; }
	@echo "== Transformers' own tests, unpatched and under schemes (about an hour)"
	$(BIN)/pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) httpx parameterized pytest-timeout
	$(BIN)/python -m tests.transformers_suite.run $(TRANSFORMERS) $(OPTIONS)

notebooks: setup
	@echo "== notebooks, with fast settings; their outputs stay as they are"
	$(BIN)/python notebooks/execute.py --fast

notebooks-full: setup
	@echo "== notebooks, in place"
	$(BIN)/python notebooks/execute.py

lists: $(VENV)/.test
	$(BIN)/python -m tests.lists

docs: $(VENV)/.dev
	@echo "== site, into site/"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

wheel: setup
	@echo "== wheel and sdist, into dist/; then the wheel in an environment of its own, outside the repository"
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist .
	OMP_NUM_THREADS=1 $(BIN)/python tests/wheel.py dist

lint: setup
	@echo "== lint and types"
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

check: lint test

bench: setup
	@echo "== benchmarks: best on a machine that does nothing else (under twenty minutes)"
	$(BIN)/python -m benchmarks.run $(OPTIONS)
	$(BIN)/python -m benchmarks.report --page docs/benchmarks.md

gpu:
	PYTHONPATH=. $(GPU_PYTHON) -m benchmarks.gpu $(OPTIONS)

gpu-check:
	PYTHONPATH=. $(GPU_PYTHON) -m benchmarks.gpu --only tests --minutes 60 $(OPTIONS)

gpu-bench:
	PYTHONPATH=. $(GPU_PYTHON) -m benchmarks.gpu --only table parts $(OPTIONS)

gpu-finetune:
	@PYTHONPATH=. $(GPU_PYTHON) -m benchmarks.machine cuda
	PYTHONPATH=. $(GPU_PYTHON) -m tools.pretrain_tiny tools/configs/pretrain_gpu.yaml
	PYTHONPATH=. $(GPU_PYTHON) recipes/finetune.py recipes/configs/finetune_gpu.yaml

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(OLDEST_VENV) runs build dist site *.egg-info .pytest_cache .ruff_cache .mypy_cache
