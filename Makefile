# Two commands: `make run` trains, proves and pushes the default model; `make test` runs the whole test suite.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
CONFIG ?= configs/chicago_taxi.yaml
ARGS ?=

.PHONY: run test lint golden lock clean

run: $(VENV)/.installed
	$(BIN)/python -m pipelines.local $(CONFIG) $(ARGS)

test: $(VENV)/.installed
	$(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

lint: $(VENV)/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# What the tests compare with: resolved configs, the JSON Schema, compiled pipelines.
golden: $(VENV)/.installed
	$(BIN)/python -m pipelines.config --write-golden
	$(BIN)/python -m tests.pipelines.test_compile

lock:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet uv
	$(BIN)/uv pip compile --quiet --universal --python-version 3.10 --extra test --generate-hashes --no-header \
		pyproject.toml --output-file requirements.lock

$(VENV)/.installed: requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' || \
		{ echo "headrace needs Python 3.10 to 3.13, and $(PYTHON) is another: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	@echo "Installing into $(VENV): a few minutes, once."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

clean:
	rm -rf $(VENV) runs build *.egg-info
