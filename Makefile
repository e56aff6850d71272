# `make demo` and `make test` are all that a new user needs; see README.md.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Where to take torch from, if not from the default package index: see README.md, "The CPU build of torch".
TORCH_INDEX ?=
DEMO ?=
BENCH ?= --dataset digits --subset 0

# Each has a processor to itself; the rest start processes of their own, and run one after another.
QUICK_TESTS := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --dist loadfile tests/unit tests/property

STAMP := $(VENV)/.installed

.PHONY: install demo secure-demo test check format bench clean wheel-test

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt protos/generate.py $(wildcard protos/fedring/v1/*.proto)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group dev --editable .
	touch $@

demo: install
	$(BIN)/flctl demo $(DEMO)

secure-demo: install
	rm -rf secure-demo
	PATH="$(abspath $(BIN)):$$PATH" deploy/quickstart.sh secure-demo

test: install
	$(QUICK_TESTS)
	$(BIN)/python -m pytest -q --ignore=tests/unit --ignore=tests/property

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports
	$(QUICK_TESTS)

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: install
	$(BIN)/flctl bench federated $(BENCH)

clean:
	rm -rf $(VENV) demo secure-demo bench-out dist

include deploy/systemd/install.mk
