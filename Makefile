# `make demo` and `make test` are all that a new user needs; see README.md.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Where to take torch from, if not from the default package index: see docs/install.md, "The CPU build of torch".
TORCH_INDEX ?=
DEMO ?=
BENCH ?= --dataset digits --subset 0

# Compiled modules are kept, whatever this shell's Python does: compiling all of them takes every process a second.
export PYTHONDONTWRITEBYTECODE :=
# More tests run at once than there are processors, since many of them wait; each computes with one thread.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q
TOGETHER := -n $(shell n=$$(nproc --all); echo $$(( n < 6 ? n + 2 : 8 ))) --dist worksteal
# The files of the tests that run alone, so that no other file need be collected for these few.
ALONE = $(shell grep -rl "mark\.alone" tests --include="test_*.py")
SOAK_REPEATS ?= 20
FUZZ_SECONDS ?= 3600
SOAK_SECONDS ?= 3600
POWER_LOSSES ?= 500
CAMPAIGN_SECONDS ?= 1200
SEED ?=
DRAFT ?=
MATRIX ?=

PROGRAMS := $(VENV)/.programs
STAMP := $(VENV)/.installed

.PHONY: programs install wheel release site demo secure-demo private-demo ha-demo test soak soak-hour power-loss fuzz campaign torch-matrix gpu-test libraries outsiders image-test systemd-test check lint unit format bench beside clean

# What runs: fl-server, fl-client and flctl.
programs: $(PROGRAMS)

# The programs, and the tools with which they are tested.
install: $(STAMP)

$(PROGRAMS): pyproject.toml constraints.txt protos/generate.py $(wildcard protos/fedring/v1/*.proto)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[all]'
	touch $@

$(STAMP): $(PROGRAMS)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group dev
	touch $@

# dist/fedring-VERSION-py3-none-any.whl, which needs no checkout.
wheel: programs
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .

# dist/ with wheel, sdist, SBOM and checksums, built twice. DRAFT=--draft for a version that is not final.
release: install
	$(BIN)/python deploy/release.py $(DRAFT)

# The pages as a site, in site/; open site/index.html. Nothing is downloaded while it is built.
# VERSIONS="v1.0.0 v0.2.0" builds those commits beside each other, with a menu of versions.
site: install
ifdef VERSIONS
	$(BIN)/python docs/site/versions.py site $(VERSIONS)
else
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going --conf-dir docs/site --builder html . site
endif

demo: programs
	$(BIN)/flctl try $(DEMO)

secure-demo: programs
	rm -rf secure-demo
	PATH="$(abspath $(BIN)):$$PATH" deploy/quickstart.sh secure-demo

private-demo: programs
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[all,privacy]'
	$(BIN)/flctl try private --out private-demo

# Two servers with PostgreSQL and an S3 server, of which the leader is killed. It needs PostgreSQL from the system.
ha-demo: install
	$(BIN)/python -m tests.ha_demo

test: install
	$(PYTEST) $(TOGETHER) -m "not alone and not soak"
	$(PYTEST) -m "alone and not soak" $(ALONE)

# It takes hours. A run that was ended goes on where it was: tests that passed are in .soak until all of them have.
soak: install
	mkdir -p .soak
	FEDRING_REPEATS=$(SOAK_REPEATS) $(PYTEST) --passed=.soak/repeated --timeout 2400 $(TOGETHER) -m "soak and not alone"
	FEDRING_REPEATS=$(SOAK_REPEATS) $(PYTEST) --passed=.soak/alone --timeout 1200 -m "soak and alone" $(ALONE)
	FEDRING_REPEATS=$(SOAK_REPEATS) $(PYTEST) --passed=.soak/drawn --timeout 1200 $(TOGETHER) tests/property
	FEDRING_REPEATS=$(SOAK_REPEATS) FEDRING_TEST_FREEZE_SECONDS=2 $(PYTEST) --passed=.soak/frozen $(TOGETHER) -m "not alone and not soak" tests/system tests/fault
	rm -r .soak

# An hour, or SOAK_SECONDS: round after round, and whether memory, descriptors, threads, files or the time of a round grow.
soak-hour: install
	$(BIN)/python -m tests.soak_hour --seconds $(SOAK_SECONDS) --out soak-hour.json

# 500, or POWER_LOSSES: the power of a server and of its clients fails, and all that they have told must be there.
power-loss: install
	$(BIN)/python -m tests.power --losses $(POWER_LOSSES)

# The newest torch and the oldest: see tests/torch_matrix.py. It downloads gigabytes, unless TORCH_INDEX has CPU builds.
torch-matrix: install
	TORCH_INDEX=$(TORCH_INDEX) $(BIN)/python -m tests.torch_matrix $(MATRIX)

# Lightning, accelerate and transformers on the ring, and peft. No other target installs them.
libraries: install
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group libraries
	$(PYTEST) --timeout 1200 -m soak tests/system/test_ring_other_libraries.py tests/system/test_lora.py

# The tests whose daemons and ranks compute on a GPU where there is one; it needs one, and a torch for CUDA.
GPU_TESTS = tests/system/test_gpu.py tests/unit/ring/test_ring_backend.py tests/unit/compress tests/unit/train tests/unit/simulation $(addprefix tests/system/test_,$(addsuffix .py, \
	simulation jobs strategies personal own_noise sample_privacy secure_rounds several_jobs restart asynchronous_fleet \
	data_parallel dgc_ddp hooks pipeline_mode pipeline_errors lora try examples))
gpu-test: install
	$(BIN)/python -c 'from fedring.train.device import pick_device; pick_device("cuda")'
	$(PYTEST) $(GPU_TESTS)

# What tests.bench.heart and tests.bench.agreement need beside `make install`: see docs/experiments.md.
outsiders: install
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group outsiders
	$(PYTEST) --timeout 1200 -m soak tests/unit/bench/test_outsiders.py

# An hour, or FUZZ_SECONDS: every decoder and every call of fl-server. No other target installs atheris.
fuzz: install
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group fuzz
	$(BIN)/python -m tests.fuzz --seconds $(FUZZ_SECONDS)

# Twenty minutes, or CAMPAIGN_SECONDS: random jobs of all kinds under random harms; SEED repeats a run. See docs/reliability.md.
campaign: install
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.campaign --seconds $(CAMPAIGN_SECONDS) $(if $(SEED),--seed $(SEED))

# Both need root, and Debian's programs: buildah, debootstrap, iproute2, systemd-container. They take a quarter of an hour each.
image-test: install
	$(PYTEST) --timeout 3600 -m soak tests/deploy/test_image.py

systemd-test: install
	$(PYTEST) --timeout 3600 -m soak tests/deploy/test_systemd_boot.py

check: install
	@$(MAKE) --no-print-directory --jobs 2 lint unit

unit: install
	$(PYTEST) -n 4 --dist worksteal -m "not alone and not soak and not programs" tests/unit tests/property

# pyright remembers nothing from run to run, so it looks only at what has changed since it last found no fault.
# mypy looks at everything each time, and so does pyright in a clean clone.
PYRIGHT := $(VENV)/.pyright

lint: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	@$(MAKE) --no-print-directory $(PYRIGHT)

$(PYRIGHT): pyproject.toml constraints.txt $(shell find server client common tests -name '*.py')
	@echo pyright of what has changed
	@$(BIN)/pyright --pythonpath $(BIN)/python $(if $(wildcard $@),$(if $(filter %.toml %.txt,$?),,$?))
	touch $@

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: install
	$(BIN)/python -m tests.bench.federated $(BENCH)

# The same work on Flower and NVFlare: make beside BESIDE="--data-root DIR". It installs them in a cache folder, as tests/bench/beside says.
beside: install
	$(BIN)/python -m tests.bench.beside $(BESIDE)

clean:
	rm -rf $(VENV) try secure-demo private-demo bench-out dist site jupyter_execute

include deploy/systemd/install.mk
