# Unicron: make demo shows it, make test proves it. `make help` lists the rest.
PYTHON    ?= python3
VENV      ?= .venv
PIP_ARGS  ?=
# More arguments of `unicronctl demo`, for example DEMO_ARGS="--json out.json"
DEMO_ARGS ?=
# Arguments of pytest in place of all three tiers, for example PYTEST_ARGS="tests/slurm -k admission"
PYTEST_ARGS ?=
# Which shapes the tests on Slurm and of several processes have: pytest's marks
SHAPES ?= not wide and not long
# More arguments of pytest for the unit tier alone, for example UNIT_ARGS="-k planner"
UNIT_ARGS ?=
# More arguments of `python tools/mutants.py`, for example MUTANTS_ARGS="--sample 10 unicron_ctl/unicron_ctl/controller/nodes/bounds.py"
MUTANTS_ARGS ?=
# More arguments of `python -m benchmarks.storms`, for example STORMS_ARGS="--only head-15"
STORMS_ARGS ?=
# More arguments of `python -m benchmarks.torture`, for example TORTURE_ARGS="--failures 60"
TORTURE_ARGS ?=
# More arguments of `python -m benchmarks.gpu`, for example GPU_ARGS="--only heal-gloo --out seen"
GPU_ARGS ?=
# More arguments of `python -m benchmarks.leaderboard`, for example LEADERBOARD_ARGS="--quick --system torchft"
LEADERBOARD_ARGS ?=

BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed
COMPILED := $(VENV)/.compiled
TEST  := $(BIN)/python -m pytest --dist loadfile
# tests/conftest.py has the order of their files.
WAITS := $(TEST) --no-loadscope-reorder
# The releases of torch and Megatron-core in the environment
CONSTRAINTS ?= constraints.txt

.PHONY: help venv compiled system system-test system-wide plugin agent-folder deb rpm manpages docs demo test test-mutants test-others test-slurm test-process test-demo test-wide test-long test-unit test-debian13 test-sid test-apptainer test-packages test-matrix accept-texts lint bench storms torture gpu-check peers peers-debian leaderboard clean
help:            ## this list
	@sed -n 's/^\([a-z0-9-]*\):.*## /  make \1	/p' $(MAKEFILE_LIST) | expand -t 18

venv: $(STAMP)   ## .venv with all that the demo and the tests need, and the project itself (editable)

# torch comes first: it is the largest download, and a failure there should show at once. On machines without a GPU,
# PIP_ARGS can name an index or a folder with CPU-only builds of it. Most of its modules are never imported, so each is
# compiled at its first import.
$(STAMP): setup.cfg pyproject.toml $(CONSTRAINTS)
	PYTHON=$(PYTHON) tools/system-packages.sh venv
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check $(PIP_ARGS) -c $(CONSTRAINTS) torch
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check $(PIP_ARGS) -c $(CONSTRAINTS) -e ".[train,dev]"
	touch $@

# A dozen processes begin the tests at once, and each would compile what it imports: up to 25 s of CPU time each.
compiled: $(COMPILED)   # what the tests import, once
$(COMPILED): $(STAMP)
	$(BIN)/python -m pytest -q -n 0 --collect-only tests/unit tests/process >/dev/null || true  # their tier says why
	touch $@

system:          ## installs missing Debian packages: Slurm, munge, a C compiler
	PYTHON=$(PYTHON) tools/system-packages.sh all

system-test:     # and what only the tests need: Slurm's accounting
	PYTHON=$(PYTHON) tools/system-packages.sh test

system-wide:     # and what only `make test-wide` needs: Prometheus
	PYTHON=$(PYTHON) tools/system-packages.sh wide

plugin: system   ## builds the SPANK plugin against the installed Slurm
	$(MAKE) -C slurm_plugin/spank

agent-folder: system .venv-agent/ready   ## the agent with a Python of its own, for nodes and containers, in build/unicron-agent
	.venv-agent/bin/python tools/agent_folder.py

manpages: venv    ## man pages and completion for bash, zsh and fish, in build/share, laid out as /usr/share is
	$(BIN)/python tools/manpages.py build/share

docs: .venv-docs/ready   ## the site of the documents, in build/site: every link is checked, and it needs no network to be read
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict
	@echo "open build/site/index.html"

.venv-docs/ready: setup.cfg pyproject.toml
	PYTHON=$(PYTHON) tools/system-packages.sh venv
	test -x .venv-docs/bin/python || $(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -e ".[docs]"
	touch $@

# The agent has no torch.
.venv-agent/ready: setup.cfg pyproject.toml $(CONSTRAINTS)
	PYTHON=$(PYTHON) tools/system-packages.sh venv
	test -x .venv-agent/bin/python || $(PYTHON) -m venv .venv-agent
	.venv-agent/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c $(CONSTRAINTS) -e .
	touch $@

deb:             ## the four Debian packages for this Debian and its Slurm, in build/deb (docs/install.md)
	PYTHON=/usr/bin/python3 tools/system-packages.sh deb
	PIP_ARGS="$(PIP_ARGS)" packaging/build-deb.sh build/deb

rpm: system      ## the same as RPMs, where rpmbuild is, in build/rpm
	PIP_ARGS="$(PIP_ARGS)" packaging/build-rpm.sh build/rpm

demo: system venv plugin   ## two jobs train on a private Slurm cluster and are healed before your eyes
	$(BIN)/unicronctl demo $(DEMO_ARGS)

# The tests start hundreds of processes, which are to find the modules compiled, whatever the shell has set.
demo compiled test test-others test-slurm test-process test-demo test-wide test-long test-unit: export PYTHONDONTWRITEBYTECODE :=

test: system-test compiled plugin   ## all three tiers: pure, several processes, a real Slurm; some eleven minutes
ifeq ($(PYTEST_ARGS),)
	@echo "All three tiers run side by side: each prints when it is through."
	$(MAKE) --no-print-directory -j2 --output-sync=line test-unit test-others
else
	$(BIN)/python -m pytest $(PYTEST_ARGS)
endif

test-wide: system-wide venv plugin   ## further shapes of what `make test` proves
	$(MAKE) --no-print-directory test-others SHAPES="wide and not long"

test-long: system-test venv plugin  ## the tests that take longest, the pure ones with four times as many random cases, with `make storms` and `make bench` before a release
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check $(PIP_ARGS) -c $(CONSTRAINTS) -e ".[long]"
	DEEP_TESTS=1 $(TEST) -n 2 tests/unit
	$(BIN)/python -m pytest -m long tests/process tests/slurm

# These tests wait for half of their time, so both tiers and the unit tests run side by side.
test-others:     # of `make test`
	$(MAKE) --no-print-directory -j2 --output-sync=line test-slurm test-process

test-slurm:      # of test-others
	$(WAITS) -n 2 -m "$(SHAPES) and not alone" tests/slurm

test-process:    # of test-others
	$(WAITS) -n 4 -m "$(SHAPES)" tests/process

test-demo: system-test venv plugin   ## what the demo proves: it needs both cores for itself
	$(BIN)/python -m pytest -m alone tests/slurm

test-unit: compiled  ## the first tier alone: no other processes to speak of, no Slurm; three to five minutes, less when it runs alone
	nice -n 5 $(TEST) -n 3 -m "$(SHAPES)" tests/unit $(UNIT_ARGS)

# As root: in a system of its own, made by debootstrap in $DEBIAN_ROOTS (default .roots), of some 7 GB with its torch.
test-debian13: ## as root: `make test` on Debian 13 (Slurm 24.11, Python 3.13), in a folder with a system of its own
	tools/debian-root.sh trixie make test

# The Megatron-core of constraints.txt has no wheel for Python 3.14, sid's own.
test-sid:        ## as root: `make test` on Debian sid (Slurm 26.05), and ranks in containers of Apptainer's
	tools/debian-root.sh sid make test test-apptainer PYTHON=python3.13

test-apptainer: system-test venv plugin   # of Debian's releases, sid alone has it
	$(BIN)/python -m pytest -m apptainer tests/slurm

test-packages: venv  ## as root: the Debian packages of SUITE (trixie) are built, installed, used, upgraded and purged in a Debian that boots
	$(BIN)/python -m pytest -p no:xdist tests/packages

test-matrix:     ## as root: all three tiers with other releases (CELL=NAME; without it a list), in a system and an environment of their own
	python3 tools/matrix.py $(CELL)

test-mutants: venv  ## which changed operators no unit test notices, in the parts on which all depends; half an hour
	nice $(BIN)/python tools/mutants.py $(MUTANTS_ARGS)

accept-texts: venv  ## writes the texts for people in tests/texts as they are now (UNIT_ARGS="-k status" for some); read the diff
	$(BIN)/python -m pytest -q -n 0 --snapshot-update tests/unit $(UNIT_ARGS)

lint: venv       ## ruff, names, docstrings and their references, the rules of who may import whom, types, the reference's tables, the pictures
	@$(MAKE) --no-print-directory -j2 --output-sync=target lint-types lint-text

lint-types:      # the longest part of `make lint`, and the others beside it
	$(BIN)/mypy

lint-text:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tools/language.py
	$(BIN)/python tools/references.py
	$(BIN)/python tools/weight.py
	PYTHONPATH=. $(BIN)/lint-imports --no-logo
	$(BIN)/python tools/reference_tables.py --check
	$(BIN)/python tools/matrix.py --check
	$(BIN)/python docs/pictures/draw.py --check
	$(BIN)/python tools/draw_imports.py --check

bench: system-wide venv plugin   ## the figures that the project promises, and the table of their goals in docs/results.md
	$(BIN)/python -m benchmarks.cases --table

storms: system venv plugin  ## as root: a job on a cluster with real links, and what it must survive
	$(BIN)/python -m benchmarks.storms $(STORMS_ARGS)

torture: export PYTHONDONTWRITEBYTECODE :=
torture: system venv        ## for hours: two jobs, 1,200 failures, and the losses of an undisturbed training
	$(BIN)/python -m benchmarks.torture $(TORTURE_ARGS)

gpu-check: venv             ## on one card, in nine minutes: what is healed there, and what it costs; without one a dry run
	$(BIN)/python -m benchmarks.gpu $(GPU_ARGS)

# Each peer in an environment of its own: they ask for versions of their own.
PEERS := $(patsubst benchmarks/leaderboard/requirements/%.txt,.peers/%/.installed,$(wildcard benchmarks/leaderboard/requirements/*.txt))
peers: $(PEERS)
.peers/%/.installed: benchmarks/leaderboard/requirements/%.txt
	$(PYTHON) -m venv --clear .peers/$*
	.peers/$*/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -r $<
	touch $@

# NVRx 0.7 has wheels for glibc 2.39 and Python 3.12 and 3.14 alone: its Debian is the one of test-sid, in 6 GB.
peers-debian:    ## as root: the peers that need a newer Debian than this one
	tools/debian-root.sh sid make /opt/peers/nvrx/.installed

# In there
/opt/peers/%/.installed: benchmarks/leaderboard/requirements/debian/%.txt
	apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends python3-venv
	python3 -m venv --clear $(@D)
	$(@D)/bin/python -m pip install --quiet --no-cache-dir --disable-pip-version-check $(PIP_ARGS) -r $<
	touch $@

leaderboard: system venv plugin peers   ## Unicron beside torchrun, torchft, NVRx, lm-resiliency and plain Slurm: the same failures, one run; with `make peers-debian` first also NVRx 0.7
	$(BIN)/python -m benchmarks.leaderboard --json leaderboard.json $(LEADERBOARD_ARGS)

clean:           ## removes the virtual environment, caches and build outputs
	-$(MAKE) -C slurm_plugin/spank clean
	rm -rf $(VENV) .peers build ./*.egg-info .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .hypothesis
