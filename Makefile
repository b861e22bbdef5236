# Two commands are enough: `make quickstart` and `make test`. Each makes its own .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready

ENGINES := .venv-engines
OLDEST := .venv-oldest
LLAMA_CPP := llama-cpp-python==0.3.36
GPU_PYTHON ?= 3.12

# where it is set, every process compiles what it imports anew, torch and transformers above all
unexport PYTHONDONTWRITEBYTECODE

.PHONY: quickstart smollm2 test check style types test-all test-oldest test-engines gpu gpu-wheels rehearse tiny-target dist docs clean

quickstart: $(READY)
	$(BIN)/draftsmith quickstart --out quickstart

# drafters for a model that people know, on its own answers: hours, and it goes on where it was stopped. Its file is that
# of a package, or SMOLLM2=FILE; FAMILIES="eagle3 medusa", MINUTES=30 of training for each, ANSWERS=1200 to learn from,
# to questions about Python's library or to those of PROMPTS="rows.jsonl ..."
FAMILIES ?= mtp eagle3
MINUTES ?= 30
smollm2: $(READY)
	$(if $(SMOLLM2),,$(BIN)/python -m pip install --quiet --no-deps -r constraints-smollm2.txt)
	$(BIN)/python benchmarks/smollm2.py --out smollm2 --families $(FAMILIES) --minutes $(MINUTES) \
		$(if $(SMOLLM2),--file $(SMOLLM2)) $(if $(PROMPTS),--prompts $(PROMPTS)) $(if $(ANSWERS),--answers $(ANSWERS))

test: $(READY)
	$(BIN)/pytest -n 2 --dist worksteal -m "not slow" --durations=15

# style, types, and the fast tests: under two minutes
check: style types
	$(BIN)/pytest -n 2 --dist worksteal -m "not slow and not fault and not run"

style: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	mkdir -p $(VENV)/typecheck && ln -sfn ../.. $(VENV)/typecheck/draftsmith
	cd $(VENV)/typecheck && ../bin/mypy --config-file ../../pyproject.toml -p draftsmith

# goes on where it was stopped, as long as no file has changed
test-all: $(VENV)/for-all-tests
	$(BIN)/python benchmarks/all_tests.py

# the fast tests with the lowest releases that pyproject.toml allows
test-oldest: $(OLDEST)/ready
	$(OLDEST)/bin/pytest -n 2 --dist worksteal -m "not slow and not fault and not run"

# exported drafters in vLLM, transformers and llama.cpp, vLLM's server; writes docs/results/engine*.json and
# their tables
test-engines: $(READY) $(ENGINES)/ready
	DRAFTSMITH_ENGINES=$(CURDIR)/$(ENGINES) DRAFTSMITH_ENGINES_RECORDS=docs/results $(BIN)/pytest tests/engines
	$(BIN)/python benchmarks/tables.py

# with the machine's own Python: nothing is installed, wheels in .wheels stand in for what it lacks
gpu:
	$(PYTHON) benchmarks/gpu.py

gpu-wheels:
	$(PYTHON) -m pip download --quiet --dest .wheels --only-binary :all: --no-deps --platform manylinux_2_28_x86_64 \
		--platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 --implementation cp --python-version $(GPU_PYTHON) \
		-r constraints-gpu.txt

# the plan for a GPU on a CPU, with the versions that a machine with one has; Python $(GPU_PYTHON) where there is one
REHEARSE := .venv-rehearse
rehearse: $(REHEARSE)/ready
	$(REHEARSE)/bin/python benchmarks/gpu.py --rehearse --out $(REHEARSE)/found

$(REHEARSE)/ready: constraints-rehearse.txt constraints-gpu.txt
	test -d $(REHEARSE) || for python in python$(GPU_PYTHON) ~/.pyenv/versions/$(GPU_PYTHON).*/bin/python $(PYTHON); do \
		$$python -c "" 2>/dev/null && $$python -m venv $(REHEARSE) && break; done
	$(REHEARSE)/bin/python -m pip install --quiet --no-compile torch==$$(sed -n 's/^torch==//p' constraints-rehearse.txt)
	$(REHEARSE)/bin/python -m pip install --quiet --no-compile -r constraints-rehearse.txt -r constraints-gpu.txt
	touch $@

tiny-target: $(READY)
	$(BIN)/python -m draftsmith.launch.tiny_target
	$(BIN)/python benchmarks/tables.py

# torch first and by itself: some packages look for it while they are built; modules are compiled when they are first
# imported, as most never are
$(READY): pyproject.toml constraints.txt
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --upgrade pip setuptools wheel
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt torch
	DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e ".[dev]"
	touch $(READY)

# trackers and TRL: every test there is needs them, nothing else does; what TRL requires is there already
$(VENV)/for-all-tests: $(READY)
	DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --no-compile -c constraints.txt \
		-e ".[tensorboard,trackio,wandb,mlflow]"
	$(BIN)/python -m pip install --quiet --no-compile --no-deps -c constraints.txt trl
	touch $@

$(OLDEST)/ready: pyproject.toml constraints-oldest.txt
	test -d $(OLDEST) || $(PYTHON) -m venv $(OLDEST)
	DS_BUILD_OPS=0 $(OLDEST)/bin/python -m pip install --quiet --no-compile -c constraints-oldest.txt torch setuptools wheel
	DS_BUILD_OPS=0 $(OLDEST)/bin/python -m pip install --quiet --no-compile -c constraints-oldest.txt -e ".[dev]"
	touch $@

# vLLM's CPU build names versions and extras that are not needed here, so nothing is resolved: the file is the whole
# list. llama.cpp comes as source, inside the package of its Python bindings; its server is built once, in some minutes.
$(ENGINES)/ready: constraints-engines.txt constraints-smollm2.txt Makefile
	test -d $(ENGINES) || $(PYTHON) -m venv $(ENGINES)
	$(ENGINES)/bin/python -m pip install --quiet --no-compile --no-deps -r constraints-engines.txt -r constraints-smollm2.txt
	$(ENGINES)/bin/python -m pip download --quiet --no-deps --no-binary llama-cpp-python -d $(ENGINES)/source $(LLAMA_CPP)
	mkdir -p $(ENGINES)/llama.cpp
	tar -xzf $(ENGINES)/source/*.tar.gz -C $(ENGINES)/llama.cpp --strip-components 3 --wildcards \
		'*/vendor/llama.cpp/*'
	$(ENGINES)/bin/cmake -S $(ENGINES)/llama.cpp -B $(ENGINES)/llama.cpp/build -DCMAKE_BUILD_TYPE=Release \
		-DLLAMA_CURL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF
	$(ENGINES)/bin/cmake --build $(ENGINES)/llama.cpp/build --target llama-server -j 2
	touch $@

# sdist and wheel into dist/, looked into and tried in empty environments of every Python there is
DIST := .venv-dist
dist: $(DIST)/ready
	$(DIST)/bin/python .ci/dist.py

$(DIST)/ready: constraints-dist.txt
	test -d $(DIST) || $(PYTHON) -m venv $(DIST)
	$(DIST)/bin/python -m pip install --quiet --no-compile -r constraints-dist.txt
	touch $@

# the pages as a site in site/, read from there or by any server; strict: a broken link or a page outside of the README's
# list fails
SITE := .venv-docs
docs: $(SITE)/ready
	NO_MKDOCS_2_WARNING=1 $(SITE)/bin/mkdocs build

$(SITE)/ready: constraints-docs.txt
	test -d $(SITE) || $(PYTHON) -m venv $(SITE)
	$(SITE)/bin/python -m pip install --quiet --no-compile -r constraints-docs.txt
	touch $@

clean:
	rm -rf $(VENV) $(ENGINES) $(OLDEST) $(REHEARSE) $(DIST) $(SITE) site quickstart smollm2 runs
