# How ctxalloc is built, tested, measured and shown: `make` lists the targets.
#
# Every target sets up what it needs from a fresh clone and writes to .venv*/ and target/ only; stamp files there make a
# repeat cheap. You need Rust (rustup's stable, with rustfmt and clippy), CPython 3.11+ and make. The heavy suites are in ci.mk.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
# One target after another: most use both processors by themselves. Those that do not ask for this: `$(side_by_side) one other`.
ifndef SIDE_BY_SIDE
.NOTPARALLEL:
endif
side_by_side = $(MAKE) --no-print-directory --jobs=2 --output-sync=target SIDE_BY_SIDE=yes

PYTHON ?= python3
CARGO ?= cargo
# Tests run side by side, on every processor. One by one: PYTEST_ARGS=, for some of them (metrics have room for 128 names
# a process).
PYTEST_ARGS ?= -n auto --dist worksteal
# Those of tests/python often wait, for a child or for a loop's turn: so twice as many at a time as there are processors.
test-python test-long test-newest test-oldest-numpy: export PYTEST_XDIST_AUTO_NUM_WORKERS ?= $(shell $(PYTHON) -c 'import os; print(2 * (os.cpu_count() or 1))')
# No test needs NumPy's linear algebra on many threads, whose start is a sixth of NumPy's import. CI's other two
# environments have them.
test-python test-long: export OPENBLAS_NUM_THREADS ?= 1
STRESS ?= 500
# What pyproject.toml promises (numpy>=1.26); everything else is tested with the NumPy of requirements/numpy.txt.
OLDEST_NUMPY := 1.26.0
# Empty without a nightly toolchain (or rustup): the targets that need one then say so and do nothing.
NIGHTLY := $(shell rustup toolchain list 2>/dev/null | sed -n 's/^\(nightly[^ ]*\).*/\1/p' | head -n 1)
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
HOST := $(shell rustc -vV 2>/dev/null | sed -n 's/^host: //p')

VENV := .venv
PY := $(VENV)/bin/python
DONE := $(VENV)/stamps
NEWEST := .venv-newest
OLDEST := .venv-oldest-numpy
USM := .venv-usm
DPEX := .venv-dpex
SERVICES := .venv-services
LIBRARIES := .venv-libraries
CLUSTERS := .venv-clusters
OLDEST_CLUSTERS := .venv-oldest-clusters
ADVISED := .venv-advised
WHEEL_TOOLS := .venv-wheels
WHEELS := target/wheels
EXTENSION := examples/extension

# The features for services in Rust, without which docs/rust.md is not tested.
services := --features axum,rayon,metrics
rust_sources := $(shell find src -name '*.rs' -o -name '*.c') build.rs Cargo.toml Cargo.lock
python_sources := $(shell find python include -name '*.py' -o -name '*.pyi' -o -name py.typed -o -name '*.h' -o -name '*.pc')
python_folders := $(shell find python include -type d -not -name __pycache__)
extension_sources := $(shell find $(EXTENSION) -name target -prune -o \( -name '*.rs' -o -name '*.toml' \
	-o -name '*.lock' -o -name '*.pyi' -o -name '*.py' \) -print 2>/dev/null)

# clippy and rustdoc build the Python binding too; they use this interpreter, whatever else is on PATH.
export PYO3_PYTHON = $(CURDIR)/$(PY)
export PIP_QUIET := 1
# The tests start a thousand Pythons: each would compile all of ctxalloc anew.
unexport PYTHONDONTWRITEBYTECODE
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# maturin installs into the environment named here. Without make's flags: cargo would look for its jobserver.
in_venv := MAKEFLAGS= VIRTUAL_ENV=$(CURDIR)/$(VENV) PATH="$(CURDIR)/$(VENV)/bin:$$PATH"
pip_install := -m pip install

.PHONY: help
help: ## list the targets
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/\1|\2/p' $(MAKEFILE_LIST) | while IFS='|' read -r name text; do \
		printf '  make %-18s %s\n' "$$name" "$$text"; done

# ---- set-up -----------------------------------------------------------------------------------------

.PHONY: build extension wheels tools
build: $(DONE)/package ## the release build of the package, into .venv (.venv/bin/python -c 'import ctxalloc')
extension: $(DONE)/extension ## the example extension module ctxalloc_example, into .venv
wheels: $(WHEELS)/stamp ## the abi3 wheels of both, into target/wheels
tools: $(DONE)/tools

$(DONE)/venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "error: '$(PYTHON)' is not a CPython 3.11 or newer ($$($(PYTHON) --version 2>&1 || true));" \
			"name one: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || { \
		echo "error: '$(PYTHON)' cannot make virtual environments; on Debian: apt-get install python3-venv" >&2; \
		exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	mkdir -p $(@D) && touch $@

$(DONE)/build-tools: $(DONE)/venv requirements/build.txt requirements/numpy.txt requirements/pins.txt
	$(PY) $(pip_install) -r requirements/build.txt
	touch $@

$(DONE)/demo: $(DONE)/build-tools requirements/demo.txt
	$(PY) $(pip_install) -r requirements/demo.txt
	touch $@

$(DONE)/tools: $(DONE)/demo requirements/test.txt requirements/once.txt requirements/lint.txt
	$(PY) $(pip_install) -r requirements/test.txt -r requirements/once.txt -r requirements/lint.txt
	touch $@

# Editable: a change in python/ is there at once, only Rust needs a build.
$(DONE)/package: $(DONE)/build-tools $(rust_sources) pyproject.toml
	$(in_venv) maturin develop --quiet --release --locked
	touch $@

# In a target directory of its own: there ctxalloc is a dependency and no extension module, and cargo would build it anew
# at each change between the two.
of_extension := --manifest-path $(EXTENSION)/Cargo.toml --target-dir target/extension
$(DONE)/extension: $(DONE)/package $(extension_sources)
	$(in_venv) maturin develop --quiet --release --locked $(of_extension)
	touch $@

# What takes long of both, which ends on one processor: so at the same time. The extension is installed after the package,
# on which it depends.
.PHONY: compiled
compiled: $(DONE)/build-tools
	$(side_by_side) $(DONE)/package target/extension/compiled
target/extension/compiled: $(rust_sources) $(extension_sources)
	$(in_venv) maturin build --quiet --release --locked --out target/extension/wheels $(of_extension)
	touch $@

# Built with the oldest supported CPython, and tested with the newest too.
$(WHEELS)/stamp: $(DONE)/extension $(python_sources) README.md
	mkdir -p $(WHEELS) && rm -f $(WHEELS)/*.whl
	$(in_venv) maturin build --quiet --release --locked --out $(WHEELS)
	$(in_venv) maturin build --quiet --release --locked --out $(WHEELS) $(of_extension)
	ls -s -h $(WHEELS)/*.whl
	touch $@

# The C library without Python. PREFIX=/usr/local installs it there.
PREFIX ?= $(CURDIR)/target/c
C_FLAGS := -std=c99 -D_POSIX_C_SOURCE=200809L -Wall -Wextra -pedantic -Werror -O1 -g -pthread -I$(PREFIX)/include
# What Rust's standard library needs where it is linked statically: `rustc --print native-static-libs`.
C_LIBRARIES := -lgcc_s -lutil -lrt -lpthread -lm -ldl -lc
VALGRIND_ARGS := --quiet --suppressions=tests/c/valgrind.supp --error-exitcode=1 --leak-check=full --show-leak-kinds=definite,indirect,possible \
	--errors-for-leak-kinds=definite,indirect,possible

.PHONY: c-library
c-library: ## the C library without Python, its header and its pkg-config file, into target/c (or PREFIX=...)
	MAKEFLAGS= $(CARGO) rustc --quiet --release --locked --lib --no-default-features --features capi --target-dir target/c-build \
		--crate-type cdylib,staticlib -- -C link-arg=-Wl,-soname,libctxalloc.so.0
	install -d $(PREFIX)/include $(PREFIX)/lib/pkgconfig
	install -m 644 include/ctxalloc.h $(PREFIX)/include
	install -m 644 target/c-build/release/libctxalloc.a $(PREFIX)/lib
	install -m 755 target/c-build/release/libctxalloc.so $(PREFIX)/lib/libctxalloc.so.0
	ln -sf libctxalloc.so.0 $(PREFIX)/lib/libctxalloc.so
	sed -e 's|@VERSION@|$(VERSION)|' -e 's|@LIBRARIES@|$(C_LIBRARIES)|' scripts/ctxalloc.pc.in > $(PREFIX)/lib/pkgconfig/ctxalloc.pc

# ---- the tests of every change ----------------------------------------------------------------------

.PHONY: test lint lint-rust lint-python types types-stubs types-sources doc \
	test-rust test-rust-services test-rust-recording test-rust-core test-rust-whole test-rust-optimized \
	test-c oracle test-c-and-oracle test-python test-long test-newest test-oldest-numpy
test: lint-rust doc compiled lint-python types test-rust test-c-and-oracle test-python ## what every change must pass; CI also runs test-long, test-newest and test-oldest-numpy
	@echo 'make test: passed. Not run here, but in CI: make test-long test-newest test-oldest-numpy'
lint: lint-rust lint-python types ## formatters, linters and type checks only

lint-rust: $(DONE)/build-tools ## cargo fmt --check, and clippy for each set of features (warnings are errors)
	$(CARGO) fmt --all --check
	$(CARGO) clippy --quiet --locked --all-targets --no-default-features -- -D warnings
	$(CARGO) clippy --quiet --locked --all-targets -- -D warnings
	$(CARGO) clippy --quiet --locked --all-targets --features capi -- -D warnings
	$(CARGO) clippy --quiet --locked --all-targets $(services) -- -D warnings
	$(CARGO) clippy --quiet --locked --all-targets --features usm,cuda -- -D warnings
	$(CARGO) clippy --quiet --locked --all-targets --features abi3 -- -D warnings
	$(CARGO) clippy --quiet --locked --all-targets -p ctxalloc-example -- -D warnings

doc: $(DONE)/build-tools ## rustdoc without and with Python (warnings are errors)
	RUSTDOCFLAGS='-D warnings' $(CARGO) doc --quiet --locked --no-deps --no-default-features
	RUSTDOCFLAGS='-D warnings' $(CARGO) doc --quiet --locked --no-deps $(services)
	RUSTDOCFLAGS='-D warnings' $(CARGO) doc --quiet --locked --no-deps --features abi3

lint-python: $(DONE)/tools $(DONE)/package ## ruff: lint rules and format; the command's pages are what its parser says
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) scripts/command_pages.py check

# Each on one processor: so at the same time.
types: $(DONE)/tools $(DONE)/extension ## mypy --strict on the package, the examples and the README; stubtest on the stubs
	$(side_by_side) types-stubs types-sources
types-stubs: $(DONE)/stubs-agree
# Half a minute, so not again for the same package, stubs and tools. The folders are named because of files that are gone.
$(DONE)/stubs-agree: $(DONE)/tools $(DONE)/package $(python_sources) $(python_folders) pyproject.toml tests/stubtest.txt
	MYPYPATH=python $(PY) -m mypy.stubtest --mypy-config-file pyproject.toml --allowlist tests/stubtest.txt ctxalloc
	touch $@
types-sources:
	$(PY) -m mypy
	$(PY) scripts/typed_documents.py README.md

# Those of the C interface and of CUDA's sources too: alone, each took as long to build as a tenth of all tests.
tested := $(services),cuda,capi
# The Python binding is tested from Python: only what is tested of `whole` in Rust links libpython. The core alone has no
# tokio and reports nothing to tracing (src/trace.rs): what takes long and touches neither is not run a second time.
core_skips := $(foreach test,apart_under_many_threads what_a_frame_says blocks_taken_and_given_back,--skip $(test))
core_alone := --lib --test rust --test requests --test process --test events --test guard --test global
# Level 1 (Cargo.toml) inlines nothing: tests of recordings, decay, room and requests took twice as long with it. The
# other sets are over in seconds: to optimize them takes longer than it saves.
inlined := CARGO_PROFILE_DEV_OPT_LEVEL=2
# Many of them wait, for memory to be given back or for a child: so more at a time than there are processors.
test_threads := --test-threads=4
# These measure the memory of their whole process, one after the other: beside the others they take no time.
in_turn := hostile::
# Cargo builds one after the other; then all run at the same time. Without make's flags: cargo would look for its jobserver.
test-rust: $(DONE)/venv ## cargo test: with tokio and tracing, and the core alone
	$(inlined) $(CARGO) test --quiet --locked $(tested) --no-run
	$(CARGO) test --quiet --locked --no-default-features $(core_alone) --no-run
	$(side_by_side) test-rust-services test-rust-core test-rust-recording
	$(side_by_side) test-rust-whole test-rust-optimized
test-rust-services:
	MAKEFLAGS= $(inlined) $(CARGO) test --quiet --locked $(tested) -- $(test_threads) --skip $(in_turn)
test-rust-recording:
	MAKEFLAGS= $(inlined) $(CARGO) test --quiet --locked $(tested) --test recording -- $(in_turn)
# Of two profiles, which cargo builds at the same time.
test-rust-whole:
	MAKEFLAGS= $(CARGO) test --quiet --locked --features whole,metrics --lib -- whole:: metrics::
test-rust-optimized:
	MAKEFLAGS= $(CARGO) test --quiet --locked --profile optimized --test optimized
test-rust-core:
	MAKEFLAGS= $(CARGO) test --quiet --locked --no-default-features $(core_alone) -- $(test_threads) $(core_skips)

# Under valgrind: no error, and no lost block (what is immortal is still reachable).
test-c: c-library ## a C program without Python, linked statically and dynamically, under valgrind where there is one
	$(CC) $(C_FLAGS) -o target/c-shared tests/c/program.c -L$(PREFIX)/lib -lctxalloc -Wl,-rpath,$(PREFIX)/lib
	$(CC) $(C_FLAGS) -o target/c-static tests/c/program.c $(PREFIX)/lib/libctxalloc.a $(C_LIBRARIES)
	target/c-shared && target/c-static
	@if command -v valgrind >/dev/null; then valgrind $(VALGRIND_ARGS) target/c-static; else \
		echo 'test-c: not under valgrind, which is not installed'; fi

oracle: $(DONE)/tools $(DONE)/package ## random programs: CPython and Rust must select the same handler at every step
	MAKEFLAGS= $(PY) tests/oracle/run.py --programs 3000 --seed 1 --seed fresh

# The C library is linked on one processor for half a minute, and neither measures anything.
test-c-and-oracle: $(DONE)/tools $(DONE)/package
	$(side_by_side) test-c oracle

test-python: $(DONE)/tools $(DONE)/extension ## pytest in .venv, without what `make test-long` runs
	$(PY) -m pytest -m "not long" $(PYTEST_ARGS)

# Most of them replay recordings, in rounds, until an advice is sure. That is their time, and nobody's who changes other things.
test-long: $(DONE)/tools $(DONE)/extension ## pytest in .venv: the Python tests that take more than some two seconds of a processor
	$(PY) -m pytest -m long $(PYTEST_ARGS)

# Installs the wheels and what their tests need into an environment, unless that was done since all of them changed.
wheels_in = [ -z "$$(find $(WHEELS)/stamp requirements -newer $(1)/installed 2>&1)" ] || { \
	$(1)/bin/python $(pip_install) -r requirements/test.txt $(2); \
	$(1)/bin/python $(pip_install) --force-reinstall --no-deps $(WHEELS)/*.whl; touch $(1)/installed; }

test-newest: $(WHEELS)/stamp ## pytest with the wheels on the newest CPython of this machine (NEWEST_PYTHON=...)
	@newest="$${NEWEST_PYTHON:-$$($(PY) scripts/newest_python.py)}"; \
	if [ -z "$$newest" ]; then \
		echo "test-newest: skipped, there is no CPython newer than $$($(PY) --version) here"; exit 0; fi; \
	echo "test-newest: $$("$$newest" --version) ($$newest)"; \
	[ "$$(readlink -f $(NEWEST)/bin/python)" = "$$(readlink -f "$$newest")" ] || "$$newest" -m venv --clear $(NEWEST); \
	$(call wheels_in,$(NEWEST),-r requirements/demo.txt); \
	$(NEWEST)/bin/python -m pytest -p no:cacheprovider -m "not once" $(PYTEST_ARGS)

# Marks of the tests say what depends on which: pyproject.toml explains them.
test-oldest-numpy: $(WHEELS)/stamp ## pytest with the wheels on the oldest supported NumPy
	@if $(PY) -c 'import sys; sys.exit(sys.version_info < (3, 13))'; then \
		echo "test-oldest-numpy: skipped, that NumPy has no wheel for $$($(PY) --version)"; exit 0; fi; \
	[ -x $(OLDEST)/bin/python ] || $(PY) -m venv $(OLDEST); \
	$(call wheels_in,$(OLDEST),'numpy==$(OLDEST_NUMPY)'); \
	$(OLDEST)/bin/python -m pytest -p no:cacheprovider -m "not once and not any_numpy" $(PYTEST_ARGS)

# ---- to show and to measure -------------------------------------------------------------------------

.PHONY: demo demo-whole demo-handlers demo-waiting bench compare chromium page test-page prometheus test-grafana
demo: $(DONE)/package $(DONE)/demo ## two tenants on one service: the greedy one is refused, the other served
	$(PY) -m examples.tenants

demo-whole: $(DONE)/package $(DONE)/demo ## the same with JSON, pictures and rows of SQLite, which no array shows: request(whole=True)
	$(PY) -m examples.tenants.whole

demo-handlers: $(DONE)/demo $(DONE)/extension ## a picture service, each route under its own handler, each array checked
	$(PY) -m examples.service

demo-waiting: $(DONE)/package ## a burst on a service that has too little memory for it: its queue, and how it drains
	$(PY) -m examples.waiting

compare: $(DONE)/package ## three well-known NumPy programs, by NumPy's default and by `pool`: the README's table
	for program in examples/compare/*.py; do $(PY) -m ctxalloc run --compare --rounds 3 "$$program"; done

# Debian's packages, as root; the lists of a bare machine are fetched first.
apt_install = { apt-get install -y --no-install-recommends $(1) || { apt-get update && apt-get install -y --no-install-recommends $(1); }; }

chromium: ## a headless Chromium by apt, as root: for the tests of the live page, and its picture
	@command -v chromium-headless-shell chromium google-chrome >/dev/null || $(call apt_install,chromium-headless-shell)

test-page: $(DONE)/tools $(DONE)/package chromium ## the live page in a headless Chromium: `make test` has none
	$(PY) -m pytest tests/python/test_page.py tests/python/test_page_profiles.py

page: $(DONE)/package $(DONE)/demo chromium ## docs/images/page.png: the live page of the demo's service, in a headless Chromium
	$(PY) scripts/draw_page.py

prometheus:
	@command -v promtool >/dev/null || $(call apt_install,prometheus)

test-grafana: $(DONE)/tools $(DONE)/package prometheus ## examples/grafana in a real Prometheus, which it installs by apt, as root
	$(PY) -m pytest tests/python/test_grafana.py -p no:xdist

bench: $(DONE)/tools $(DONE)/extension $(DONE)/libraries ## ratios against named peers, measured in one run, into benches/RESULTS.md
	$(CARGO) bench --locked $(services)
	for script in $(filter-out $(OWN_BENCHES),$(wildcard benches/*.py)); do $(PY) "$$script"; done
	$(bench_whole)
	cd benches && ../$(PY) -m harness.report

# These have targets of their own, and environments with the libraries that they measure.
OWN_BENCHES := benches/advised.py benches/clusters.py benches/pinned.py benches/whole.py
bench_whole = PYTHONPATH=$(CURDIR)/python $(LIBRARIES)/bin/python benches/whole.py

.PHONY: bench-small bench-whole
bench-whole: $(DONE)/package $(DONE)/libraries ## what request(whole=True) costs on json, pandas, sqlite3, lxml, scikit-learn and a service
	$(bench_whole)

JEMALLOC := $(CURDIR)/target/allocators/libjemalloc.so.2
bench-small: $(DONE)/tools target/allocators ## small blocks in Rust against malloc, mimalloc and jemalloc, in the shapes of mimalloc-bench: a minute after the build
	$(CARGO) bench --locked --bench small
	rm -f target/bench/small-jemalloc.jsonl
	[ ! -e $(JEMALLOC) ] || $(CARGO) bench --locked --bench small --config "target.'cfg(unix)'.runner='env SMALL_ROWS=small-jemalloc LD_PRELOAD=$(JEMALLOC)'"
	cd benches && ../$(PY) -m harness.small

include ci.mk
include suites.mk
include platforms.mk
include release.mk

# ---- clean ------------------------------------------------------------------------------------------

.PHONY: clean
clean: ## remove everything that these targets made
	$(CARGO) clean
	rm -rf $(VENV) $(NEWEST) $(OLDEST) $(USM) $(DPEX) $(SERVICES) $(LIBRARIES) $(CLUSTERS) $(OLDEST_CLUSTERS) $(ADVISED) $(WHEEL_TOOLS) $(SITE) .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find python examples -name '*.so' -delete
	find python examples tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +
