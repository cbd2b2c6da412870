# Every target makes or updates its virtual environment itself; VENV=folder puts it elsewhere, PYTHON=python3.12 starts
# it from another interpreter.
VENV ?= .venv
export VENV
BIN := $(VENV)/bin
# Most tests wait for timeouts, servers and processes, so three files run side by side, on two processors, too. The
# long ones begin (tests/conftest.py). Bytecode is kept, whatever the environment says of it: without it each worker
# spends as long on making it as on most tests.
SIDE_BY_SIDE := -n 3 --dist loadfile --no-loadscope-reorder
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help venv venv-unit demo test test-all test-unit test-gpu check format bench bench-gpu bench-outside soak soak-long mutate mutate-gpu matrix models pages wheel release clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: venv  ## run vLLM, restart it, and see a long prompt loaded from disk
	@$(BIN)/kvstore demo

test: venv  ## all tests but sweeps and the long ones, real vLLM included
	@$(BIN)/pytest $(SIDE_BY_SIDE)

test-all: test  ## the same, then what sweeps over modes and models, and the oldest vLLM in its short form
	@$(BIN)/pytest $(SIDE_BY_SIDE) --sweeps -m "sweep and not soak"
	@$(BIN)/python -m kvstore.tools.dev.matrix --short --only 0.30

test-unit: venv-unit  ## tests of the engine: no vLLM, nothing slow, less than a minute
	@$(BIN)/pytest -n 3 --dist worksteal --quick tests/unit

test-gpu: venv-unit  ## tests that need a CUDA device; skipped where there is none
	@$(BIN)/pytest -m gpu

check: venv-unit  ## lint, format, English and types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/python -m kvstore.tools.dev.english
	@$(BIN)/mypy -p kvstore
	@$(BIN)/mypy tests tools/dev/vllm_cpu.py tools/dev/mutate/forkserver.py

format: venv-unit  ## put the code into the format that check expects
	@$(BIN)/ruff check --fix --quiet .
	@$(BIN)/ruff format .

bench: venv  ## every path against the limit of this machine, real vLLM included
	@$(BIN)/kvstore bench

bench-gpu: venv  ## on a machine with a GPU: its tests, then every path; writes bench-results/gpu.jsonl
	@BIN=$(BIN) tools/dev/gpu.sh bench $(ARGS)

bench-outside: venv  ## load generators of others against real vLLM; ARGS="--traces DIR --only vllm-bench"
	@$(BIN)/python -m kvstore.tools.outside $(ARGS)

soak: venv  ## the long tests
	@$(BIN)/pytest $(SIDE_BY_SIDE) --soak -m soak

soak-long: venv  ## load at full size, for hours, in parts that go on where they were; ARGS="--only kills --for 600"
	@PYTHONPATH=tests $(BIN)/python -m soak $(ARGS)

mutate: venv  ## defects on purpose, by hand and by mutmut: do the tests notice? ARGS="--only 'index/*'" tries one area
	@$(BIN)/python -m kvstore.tools.dev.mutate $(ARGS)

mutate-gpu: venv  ## the same for the order of work on a GPU, which a device on the CPU simulates
	@$(BIN)/python -m kvstore.tools.dev.mutate --only 'gpu/*' $(ARGS)

matrix: venv  ## every supported version of vLLM, each in its environment; ARGS="--short" for its beginning
	@$(BIN)/python -m kvstore.tools.dev.matrix $(ARGS)

models: venv  ## a tiny model of every architecture: does vLLM give the same outputs with kvstore? ARGS="--only NAME"
	@$(BIN)/python -m kvstore.tools.dev.models $(ARGS)

pages: venv  ## run all that the documentation shows, in page order, with real vLLM; ARGS="--fast" leaves that out
	@$(BIN)/python -m kvstore.tools.dev.pages --log bench-results/pages.log $(ARGS)

wheel: venv-unit  ## build dist/*.whl, to install on other machines
	@$(BIN)/python -m kvstore.tools.dev.release --wheel

release: venv-unit  ## the wheel, checked, with its licences and bill of materials, in dist/
	@$(BIN)/python -m kvstore.tools.dev.release

venv:  ## make or update the environment, with vLLM
	@tools/dev/venv.sh full

venv-unit:
	@tools/dev/venv.sh unit

clean:  ## remove caches, build output and .demo (the environment stays)
	rm -rf build dist *.egg-info .demo .hypothesis .mypy_cache .pytest_cache .ruff_cache bench-results
	find . -path ./.git -prune -o -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
