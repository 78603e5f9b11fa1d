# One word runs everything. Needs Python 3.11, make and a C compiler; all else is installed into .venv at pinned versions.
#
#   make demo    break a real training job and watch it come back (DEMO="--json" gives the command's options)
#   make test    the whole test suite                              (ARGS="tests/test_census.py -k nan" gives pytest's)
#   make check   ruff, mypy --strict, import-linter, then the test suite
#   make bench   one JSON line a figure                            (ONLY=replay runs one; CASES=FILE for classify_accuracy)
#   make venv    only the virtual environment

SHELL := /bin/sh
PY := .venv/bin/python
STAMP := .venv/.installed

# Bytecode is kept: without it each process that a test starts compiles what it imports.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := check
.PHONY: demo test check lint bench venv clean

venv: $(STAMP)

$(STAMP): constraints.txt pyproject.toml keepstep/pyproject.toml infra/bin/make-venv infra/bin/keepstep
	@infra/bin/make-venv
	@touch $@

demo: $(STAMP)
	@.venv/bin/keepstep demo $(DEMO)

# Three at a time, since most tests wait more than they compute; apart, the slow ones, which kill and freeze whole pipelines.
test: $(STAMP)
ifdef ARGS
	@$(PY) -m pytest $(ARGS)
else
	@$(PY) -m pytest -n 3 --dist loadfile -m "not slow"; quick=$$?; $(PY) -m pytest -n 3 --dist worksteal -m slow && exit $$quick
endif

lint: $(STAMP)
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	@PATH="$$PWD/.venv/bin:$$PATH" .venv/bin/lint-imports
	$(PY) -m infra.export_schemas --check

check: lint test

bench: $(STAMP)
	@$(PY) -m tests.bench $(if $(ONLY),--only $(ONLY)) $(if $(CASES),--cases $(CASES))

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
