# `make demo`, `make test` and `make test-all` set up all they need in .venv; nothing else is asked
# of the machine but Python 3.11 or later.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python

# bytecode is kept, whoever has forbidden it: tests start hundreds of processes that import the package
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test quick test-all test-install test-gpu check-gpus speeds-gpus sanitize-gpu lint site clean

# compiled when it is imported: most of it never is, and that would take a minute
$(VENV)/ready: requirements.txt setup.py
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --upgrade pip
	$(RUN) -m pip install --quiet --no-compile -r requirements.txt
	$(RUN) -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

demo: $(VENV)/ready  ## ring attention on 4 processes of this machine, checked and drawn; trains on text
	$(RUN) -m examples.demo

# whole files go to workers in the order in which tests/conftest.py puts them: long ones first; three
# workers on two cores, because tests wait for processes to start; four take longer
PYTEST := $(RUN) -m pytest -n 3 --dist loadfile --no-loadscope-reorder
WHICH := -m "not thorough"

test: $(VENV)/ready lint  ## what every change must pass; all but the tests marked `thorough`
	$(PYTEST) $(WHICH)

FOLDER ?= geometry
quick: $(VENV)/ready lint  ## tests of one folder, or file, while you change it: make quick FOLDER=geometry
	$(PYTEST) $(WHICH) tests/$(FOLDER)

test-all: WHICH :=
test-all: test site  ## all tests, thorough ones included, and the site

test-install: $(VENV)/ready  ## wheel and sdist, installed where there is nothing else, and used
	$(RUN) -m tests.support.check_install

test-gpu:  ## the kernels on a CUDA device, with the torch and triton that are installed there
	$(PYTHON) -m pytest tests/gpu

# with an environment's OUT in its place, where files are to be left elsewhere
OUT ?= build/gpus

check-gpus:  ## what GPUs do alone and together, on as many as there are up to eight; checked in each call
	$(PYTHON) -m tests.gpu.check --folder $(OUT)

RESULTS ?= benchmarks/results

speeds-gpus:  ## all benchmarks of as many GPUs as there are
	$(PYTHON) -m benchmarks everything --results $(RESULTS) --output $(OUT)

sanitize-gpu:  ## our kernels under compute-sanitizer
	compute-sanitizer --tool memcheck $(PYTHON) -m tests.gpu.sanitize
	compute-sanitizer --tool racecheck $(PYTHON) -m tests.gpu.sanitize

lint: $(VENV)/ready
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

SITE := build/site-venv
$(SITE)/ready: docs/requirements.txt
	$(PYTHON) -m venv $(SITE)
	$(SITE)/bin/python -m pip install --quiet -r docs/requirements.txt
	touch $@

# not --quiet, which would hide warnings from --strict
site: $(SITE)/ready  ## the pages as a site, in build/site; links must lead somewhere, pages fit a phone
	NO_MKDOCS_2_WARNING=1 $(SITE)/bin/python -m mkdocs build --strict
	$(PYTHON) docs/check_widths.py build/site

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
