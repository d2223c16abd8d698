# Two commands matter: `make demo` and `make test`. Both create .venv, once, and may be repeated.
PYTHON ?= $(or $(shell .ci/find-python 3.11 3.12 3.13),$(error Python 3.11, 3.12 or 3.13 is needed))
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CONSTRAINTS := .ci/constraints.txt
# Half the cores per test process would idle in conversion; one thread each keeps them apart.
# Tests compile; only those of the cache read what others have compiled. Commands that tests start
# read the modules' bytecode, whatever the caller's environment says of it.
TEST_ENV := OMP_NUM_THREADS=1 COREML_DELEGATE_COMPILED_CACHE=off PYTHONDONTWRITEBYTECODE=
FUZZ := PYTHONPATH=../..:../../tests OMP_NUM_THREADS=1 ../../$(BIN)/python -m tests.fuzz.fuzz_mil

.PHONY: demo test test-rest test-all times smoke smoke-newer pytest pytest-all checks lint types imports docs bench conformance suite suite-upstream jax-suite regressions models fuzz upgrade clean

demo: $(STAMP)
	$(BIN)/coreml-delegate demo

# A sample of the ordinary tests, the same each time. The checks run beside it: one test process often
# waits for the other at the end.
test: $(STAMP)
	$(MAKE) -j 2 pytest checks

# The ordinary tests that are not in the sample.
test-rest: $(STAMP)
	$(TEST_ENV) $(BIN)/python -m pytest -n 2 --dist loadgroup -m "not slow" --part rest tests

# Every ordinary test, to record the times that the sample is drawn by.
times: $(STAMP)
	$(TEST_ENV) $(BIN)/python -m pytest -n 2 --dist loadgroup -m "not slow" --record-times tests

test-all: $(STAMP)
	$(MAKE) -j 2 pytest-all checks

# A newer Python with the newest JAX and NumPy, in an environment of its own: the demo, the first page
# of the documentation and a tenth of the tests.
SMOKE := build/smoke
NEWER := $(SMOKE)/venv/bin
smoke:
	@if python=$$(.ci/find-python 3.13 3.12); \
	  then $(MAKE) smoke-newer PYTHON=$$python; \
	  else echo "smoke: skipped, because this machine has neither Python 3.13 nor 3.12"; fi

smoke-newer: $(SMOKE)/.installed
	cd $(SMOKE) && venv/bin/coreml-delegate demo
	$(TEST_ENV) $(NEWER)/python -m pytest "tests/docs/test_documents.py::test_a_page_can_be_followed[index]"
	$(TEST_ENV) $(NEWER)/python -m pytest -n 2 --dist loadgroup -m "not slow" --one-in 10 tests

pytest: $(STAMP)
	$(TEST_ENV) $(BIN)/python -m pytest -n 2 --dist loadgroup -m "not slow" --part sample tests

pytest-all: $(STAMP)
	$(TEST_ENV) $(BIN)/python -m pytest -n 2 --dist loadgroup tests

checks: lint types imports docs

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/pyright --pythonpath $(BIN)/python

imports: $(STAMP)
	$(BIN)/lint-imports

# The site, in build/site; a warning is an error.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --config-file docs/site/mkdocs.yml

# Prints the tables; `.[bench]` adds the peers that are not installed.
bench: $(STAMP)
	$(BIN)/python -m tests.benchmarks

# coremltools' own op tests, all of them, on each engine: about an hour on two cores. A few fail, as
# docs/op-support.md says.
conformance: $(STAMP)
	mkdir -p build
	-$(TEST_ENV) $(BIN)/python -m tests.conformance -n 2 --engine reference --results build/conformance-reference.json
	-$(TEST_ENV) $(BIN)/python -m tests.conformance -n 2 --engine openvino --results build/conformance-openvino.json
	$(BIN)/python -m tests.conformance.op_support build/conformance-reference.json build/conformance-openvino.json

# ExecuTorch's own operator and model suite in fp16 and in static int8, and the tests of its Core ML
# backend on ours. What ours misses its own backend lowers too: a few models with random weights miss
# the suite's absolute tolerance with either, so the comparison decides. An hour and a half on two
# cores; suite-upstream has that backend lower all of it, for as long again.
SUITE = $(TEST_ENV) $(BIN)/python -m tests.suite --jobs 2
FLOWS = coreml_static_int8 coreml
COMPARE = failed=0; for flow in $(FLOWS); do \
	  $(BIN)/python -m tests.suite --compare build/suite-$$flow.json build/suite-$$flow-upstream.json || failed=1; \
	done; exit $$failed
suite: $(STAMP)
	mkdir -p build
	rm -f $(FLOWS:%=build/suite-%.json) $(FLOWS:%=build/suite-%-upstream.json)
	$(TEST_ENV) $(BIN)/python -m tests.upstream
	-for flow in $(FLOWS); do $(SUITE) --flow $$flow --results build/suite-$$flow.json; done
	-for flow in $(FLOWS); do $(SUITE) --flow $$flow --upstream --missed build/suite-$$flow.json \
	  --results build/suite-$$flow-upstream.json; done
	$(COMPARE)

suite-upstream: $(STAMP)
	-for flow in $(FLOWS); do $(SUITE) --flow $$flow --upstream --results build/suite-$$flow-upstream.json; done
	$(COMPARE)

# Upstream reports of wrong results, each with its calls in fp16 and fp32 on both engines; writes the
# page that lists them.
regressions: $(STAMP)
	PYTHONPATH=tests $(BIN)/python -m regressions.page
	$(TEST_ENV) $(BIN)/python -m pytest tests/regressions

# Models that people ship, lowered and compared with PyTorch; writes the page that lists them, in ten
# minutes. Architectures that have a row in its table of precisions are not measured again, unless
# they are named: `python -m models.precision_table NAME`.
models: $(STAMP)
	PYTHONPATH=tests $(TEST_ENV) $(BIN)/python -m models.model_table
	PYTHONPATH=tests $(TEST_ENV) $(BIN)/python -m models.precision_table
	PYTHONPATH=tests $(TEST_ENV) $(BIN)/python -m models.device_table

# JAX's own harnesses of its primitives, all of them, on both engines: ten minutes on two cores. The
# table names those that do not pass.
jax-suite: $(STAMP)
	mkdir -p build
	-$(TEST_ENV) $(BIN)/python -m tests.jax_suite -n 2 --results build/jax-suite.json
	$(BIN)/python -m tests.jax_suite.support_table build/jax-suite.json

# Random models, lowered and compared with PyTorch. Damaged programs on each engine, and through
# native calls of openvino: 10,000 that depend on a seed alone, then fifteen minutes of what libFuzzer
# makes. What that finds stays in build/fuzz.
ENGINES := reference openvino native
fuzz: $(STAMP)
	for precision in float32 float16; do \
	  $(TEST_ENV) $(BIN)/python -m tests.fuzz.models --count 1800 --precision $$precision || exit 1; done
	for engine in $(ENGINES); do $(TEST_ENV) $(BIN)/python -m tests.fuzz.damaged --engine $$engine || exit 1; done
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[fuzz]"
	for engine in $(ENGINES); do \
	  mkdir -p build/fuzz/$$engine && (cd build/fuzz && $(FUZZ) --engine $$engine $$engine \
	    ../../tests/fuzz/corpus -max_total_time=300 -timeout=60 -rss_limit_mb=4096 -max_len=20000) || exit 1; \
	done

# The newest releases that pyproject.toml allows become those that everything here runs with.
upgrade: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade --upgrade-strategy eager -e ".[test]"
	$(BIN)/python -m pip freeze --exclude-editable | sed 's/+[a-z0-9.]*$$//' > $(CONSTRAINTS)

# pip compiles modules on one core, which takes longer than all else. compileall fails for a few that
# are written for other versions of Python; nothing imports them.
define INSTALL
$(PYTHON) -m venv $(1)
$(1)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -c $(2) -e ".[test]"
$(1)/bin/python -m compileall -qq -j 0 $(1)/lib || true
endef

$(STAMP): pyproject.toml $(CONSTRAINTS)
	$(call INSTALL,$(VENV),$(CONSTRAINTS))
	touch $(STAMP)

$(SMOKE)/.installed: pyproject.toml $(CONSTRAINTS)
	rm -rf $(SMOKE)
	mkdir -p $(SMOKE)
	grep -v -E "^(equinox|flax|jax|jaxlib|jaxtyping|numpy|optax|orbax-checkpoint)==" $(CONSTRAINTS) > $(SMOKE)/constraints.txt
	$(call INSTALL,$(SMOKE)/venv,$(SMOKE)/constraints.txt)
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
