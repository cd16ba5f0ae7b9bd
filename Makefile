# Every target sets up its own environment in .venv first; nothing else on the machine is touched.
#   make demo       serve the embedded model on this machine, without and with DSpark
#   make test       formatting, lint, types, kernels compiled for the GPU, all quick tests
#   make test-deep  the long property tests
VENV := .venv
RUN := $(VENV)/bin/python
PYTEST := $(RUN) -m pytest
# Triton decides at import whether it compiles or interprets, hence a process of their own.
INTERPRETED := tests/kernels/interpreted
# Two processes, each taking whole files: tests of one file share servers and checkpoints. Files
# in alphabetical order, so that the servers' long ones do not come last.
TWO_PROCESSES := -n 2 --dist loadgroup --no-loadscope-reorder
# Threads that spin between small operations make the tests fight each other for two cores.
export OMP_WAIT_POLICY := PASSIVE

.PHONY: demo test test-deep setup lint types typed kernels quick interpreted format clean

demo: setup
	@$(VENV)/bin/dspark demo

test: setup lint types kernels interpreted quick
	@echo "make test: everything passed"

test-deep: setup
	$(PYTEST) -m deep tests

setup:
	@PYTHON="$(PYTHON)" requirements/install.sh $(VENV)

lint: setup
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

format: setup
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

# The folders are sub-packages of `dspark` by mapping; mypy wants to see them in place.
typed:
	@rm -rf build/typed && mkdir -p build/typed/dspark
	@ln -s $(CURDIR)/dspark/* build/typed/dspark/
	@ln -s $(CURDIR)/target $(CURDIR)/kernels $(CURDIR)/state $(CURDIR)/bench build/typed/dspark/

types: setup typed
	cd build/typed && $(CURDIR)/$(RUN) -m mypy -p dspark \
		--config-file $(CURDIR)/pyproject.toml --cache-dir $(CURDIR)/.mypy_cache

kernels: setup
	$(RUN) -m dspark.kernels.tooling.aot --check

interpreted: setup
	TRITON_INTERPRET=1 $(PYTEST) $(TWO_PROCESSES) -m "not deep" $(INTERPRETED)

quick: setup
	$(PYTEST) $(TWO_PROCESSES) -m "not deep" --ignore $(INTERPRETED) tests

clean:
	rm -rf build .pytest_cache .mypy_cache .ruff_cache .cache
