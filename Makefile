# Two commands matter: `make demo` and `make test`. Both create .venv, once, and may be repeated.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Half the cores per test process would idle in conversion; one thread each keeps them apart.
TEST_ENV := OMP_NUM_THREADS=1

.PHONY: demo test test-all lint types imports bench conformance clean

demo: $(STAMP)
	$(BIN)/coreml-delegate demo

test: lint types imports
	$(TEST_ENV) $(BIN)/python -m pytest -n 2 --dist loadgroup -m "not slow" tests

test-all: lint types imports
	$(TEST_ENV) $(BIN)/python -m pytest -n 2 --dist loadgroup tests

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/pyright --pythonpath $(BIN)/python

imports: $(STAMP)
	$(BIN)/lint-imports

bench: $(STAMP)
	$(BIN)/python -m tests.benchmarks

# coremltools' own op tests, all of them, on each engine: about half an hour on two cores.
conformance: $(STAMP)
	mkdir -p build
	$(TEST_ENV) $(BIN)/python -m tests.conformance -n 2 --engine reference --results build/conformance-reference.json
	$(TEST_ENV) $(BIN)/python -m tests.conformance -n 2 --engine openvino --results build/conformance-openvino.json

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[test]"
	touch $(STAMP)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
