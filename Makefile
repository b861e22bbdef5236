# Two commands are enough: `make quickstart` and `make test`. Each makes its own .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready

.PHONY: quickstart test check test-all tiny-target clean

quickstart: $(READY)
	$(BIN)/draftsmith quickstart --out quickstart

test: $(READY)
	$(BIN)/pytest -n 2 --dist worksteal -m "not slow" --durations=15

# style, types, and the fast tests: under two minutes
check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	mkdir -p $(VENV)/typecheck && ln -sfn ../.. $(VENV)/typecheck/draftsmith
	cd $(VENV)/typecheck && ../bin/mypy --config-file ../../pyproject.toml -p draftsmith
	$(BIN)/pytest -n 2 --dist worksteal -m "not slow and not fault and not run"

test-all: $(READY)
	$(BIN)/pytest

tiny-target: $(READY)
	$(BIN)/python -m draftsmith.launch.tiny_target

# torch first and by itself: some packages look for it while they are built; modules are compiled when they are first
# imported, as most never are
$(READY): pyproject.toml constraints.txt
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --upgrade pip setuptools wheel
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt torch
	DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e ".[dev]"
	touch $(READY)

clean:
	rm -rf $(VENV) quickstart runs
