# How ctxalloc is built, tested, measured and shown: `make` lists the targets.
#
# Every target does its own set-up from a fresh clone and writes to .venv*/ and target/ only. Stamp files
# there make a repeat cheap. Needed: Rust (rustup's stable, with rustfmt and clippy), CPython 3.11+, make.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:

PYTHON ?= python3
CARGO ?= cargo
PYTEST_ARGS ?=
STRESS ?= 500
# Where there is no nightly toolchain (or no rustup), the targets that need one say so and do nothing.
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
WHEELS := target/wheels
EXTENSION := examples/extension

rust_sources := $(shell find src -name '*.rs') Cargo.toml Cargo.lock
python_sources := $(shell find python include -name '*.py' -o -name '*.pyi' -o -name py.typed -o -name '*.h' -o -name '*.pc')
extension_sources := $(shell find $(EXTENSION) -name target -prune -o \( -name '*.rs' -o -name '*.toml' \
	-o -name '*.lock' -o -name '*.pyi' -o -name '*.py' \) -print 2>/dev/null)

# clippy and rustdoc look at the Python face too: through this interpreter, whatever else is on PATH.
export PYO3_PYTHON = $(CURDIR)/$(PY)
export PIP_QUIET := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# maturin works on the environment that is named here.
in_venv := VIRTUAL_ENV=$(CURDIR)/$(VENV) PATH="$(CURDIR)/$(VENV)/bin:$$PATH"
pip_install := -m pip install

.PHONY: help
help: ## list the targets
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/\1|\2/p' $(MAKEFILE_LIST) | while IFS='|' read -r name text; do \
		printf '  make %-18s %s\n' "$$name" "$$text"; done

# ---- set-up -----------------------------------------------------------------------------------------

.PHONY: build extension wheels tools
build: $(DONE)/package ## the package, optimised, into .venv: .venv/bin/python -c 'import ctxalloc'
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

$(DONE)/tools: $(DONE)/build-tools requirements/test.txt requirements/demo.txt requirements/lint.txt
	$(PY) $(pip_install) -r requirements/test.txt -r requirements/demo.txt -r requirements/lint.txt
	touch $@

# Editable: what is changed in python/ is there at once, only Rust needs a build.
$(DONE)/package: $(DONE)/build-tools $(rust_sources) pyproject.toml
	$(in_venv) maturin develop --quiet --release --locked
	touch $@

$(DONE)/extension: $(DONE)/package $(extension_sources)
	$(in_venv) maturin develop --quiet --release --locked --manifest-path $(EXTENSION)/Cargo.toml
	touch $@

# Built with the oldest supported CPython and tested with the newest.
$(WHEELS)/stamp: $(DONE)/extension $(python_sources) README.md
	mkdir -p $(WHEELS) && rm -f $(WHEELS)/*.whl
	$(in_venv) maturin build --quiet --release --locked --out $(WHEELS)
	$(in_venv) maturin build --quiet --release --locked --out $(WHEELS) --manifest-path $(EXTENSION)/Cargo.toml
	ls -s -h $(WHEELS)/*.whl
	touch $@

# The C face without Python. PREFIX=/usr/local installs it there.
PREFIX ?= $(CURDIR)/target/c
C_FLAGS := -std=c99 -D_POSIX_C_SOURCE=200809L -Wall -Wextra -pedantic -Werror -O1 -g -pthread -I$(PREFIX)/include
# What the Rust standard library wants where it is linked statically: `rustc --print native-static-libs`.
C_LIBRARIES := -lgcc_s -lutil -lrt -lpthread -lm -ldl -lc
VALGRIND_ARGS := --quiet --suppressions=tests/c/valgrind.supp --error-exitcode=1 --leak-check=full --show-leak-kinds=definite,indirect,possible \
	--errors-for-leak-kinds=definite,indirect,possible

.PHONY: c-library
c-library: ## libctxalloc.so, libctxalloc.a, ctxalloc.h and ctxalloc.pc, without Python, into target/c (or PREFIX=...)
	$(CARGO) rustc --quiet --release --locked --lib --no-default-features --features capi --target-dir target/c-build \
		--crate-type cdylib,staticlib -- -C link-arg=-Wl,-soname,libctxalloc.so.0
	install -d $(PREFIX)/include $(PREFIX)/lib/pkgconfig
	install -m 644 include/ctxalloc.h $(PREFIX)/include
	install -m 644 target/c-build/release/libctxalloc.a $(PREFIX)/lib
	install -m 755 target/c-build/release/libctxalloc.so $(PREFIX)/lib/libctxalloc.so.0
	ln -sf libctxalloc.so.0 $(PREFIX)/lib/libctxalloc.so
	sed -e 's|@VERSION@|$(VERSION)|' -e 's|@LIBRARIES@|$(C_LIBRARIES)|' scripts/ctxalloc.pc.in > $(PREFIX)/lib/pkgconfig/ctxalloc.pc

include suites.mk

# ---- the tests of every change ----------------------------------------------------------------------

.PHONY: test lint lint-rust lint-python types test-rust test-c doc oracle test-python test-newest test-oldest-numpy
test: lint-rust doc lint-python types test-rust test-c oracle test-python test-newest test-oldest-numpy ## all below, from a fresh clone
lint: lint-rust lint-python types ## formatters, linters and types only

lint-rust: $(DONE)/build-tools ## cargo fmt --check, clippy with warnings as errors, for each set of features
	$(CARGO) fmt --all --check
	$(CARGO) clippy --quiet --locked --all-targets --no-default-features -- -D warnings
	$(CARGO) clippy --quiet --locked --all-targets -- -D warnings
	$(CARGO) clippy --quiet --locked --all-targets --features capi -- -D warnings
	$(CARGO) clippy --quiet --locked --all-targets --features usm -- -D warnings
	$(CARGO) clippy --quiet --locked --all-targets --features abi3 -- -D warnings
	$(CARGO) clippy --quiet --locked --all-targets -p ctxalloc-example -- -D warnings

doc: $(DONE)/build-tools ## rustdoc with warnings as errors, without and with Python
	RUSTDOCFLAGS='-D warnings' $(CARGO) doc --quiet --locked --no-deps --no-default-features
	RUSTDOCFLAGS='-D warnings' $(CARGO) doc --quiet --locked --no-deps
	RUSTDOCFLAGS='-D warnings' $(CARGO) doc --quiet --locked --no-deps --features abi3

lint-python: $(DONE)/tools ## ruff: rules and format
	$(PY) -m ruff check
	$(PY) -m ruff format --check

types: $(DONE)/tools $(DONE)/extension ## mypy --strict, and stubtest: the stubs say what the module has
	$(PY) -m mypy
	MYPYPATH=python $(PY) -m mypy.stubtest ctxalloc

# The Python face is tested from Python: a test binary with it would have to link libpython.
test-rust: ## cargo test: the core alone, then with tokio and tracing
	$(CARGO) test --quiet --locked --no-default-features
	$(CARGO) test --quiet --locked

# By itself and, where there is a valgrind, under it: no error, and nothing lost but what is immortal, which is reachable.
test-c: c-library ## a program in C without Python, linked both ways: threads, the drafts, the hook, bad input
	$(CC) $(C_FLAGS) -o target/c-shared tests/c/program.c -L$(PREFIX)/lib -lctxalloc -Wl,-rpath,$(PREFIX)/lib
	$(CC) $(C_FLAGS) -o target/c-static tests/c/program.c $(PREFIX)/lib/libctxalloc.a $(C_LIBRARIES)
	target/c-shared && target/c-static
	@if command -v valgrind >/dev/null; then valgrind $(VALGRIND_ARGS) target/c-static; else \
		echo 'test-c: not under valgrind, which is not installed'; fi

oracle: $(DONE)/tools $(DONE)/package ## random programs: CPython and the Rust layer name the same handler at every step
	$(PY) tests/oracle/run.py --programs 3000 --seed 1 --seed fresh

test-python: $(DONE)/tools $(DONE)/extension ## pytest in .venv
	$(PY) -m pytest $(PYTEST_ARGS)

test-newest: $(WHEELS)/stamp ## pytest with the same wheels on the newest CPython of this machine (NEWEST_PYTHON=...)
	@newest="$${NEWEST_PYTHON:-$$($(PY) scripts/newest_python.py)}"; \
	if [ -z "$$newest" ]; then \
		echo "test-newest: skipped, there is no CPython newer than $$($(PY) --version) here"; exit 0; fi; \
	echo "test-newest: $$("$$newest" --version) ($$newest)"; \
	[ "$$(readlink -f $(NEWEST)/bin/python)" = "$$(readlink -f "$$newest")" ] || "$$newest" -m venv --clear $(NEWEST); \
	$(NEWEST)/bin/python $(pip_install) -r requirements/test.txt -r requirements/demo.txt; \
	$(NEWEST)/bin/python $(pip_install) --force-reinstall --no-deps $(WHEELS)/*.whl; \
	$(NEWEST)/bin/python -m pytest -p no:cacheprovider $(PYTEST_ARGS)

test-oldest-numpy: $(WHEELS)/stamp ## pytest with the same wheels on the oldest supported NumPy
	@if $(PY) -c 'import sys; sys.exit(sys.version_info < (3, 13))'; then \
		echo "test-oldest-numpy: skipped, that NumPy has no wheel for $$($(PY) --version)"; exit 0; fi; \
	[ -x $(OLDEST)/bin/python ] || $(PY) -m venv $(OLDEST); \
	$(OLDEST)/bin/python $(pip_install) -r requirements/numpy-oldest.txt -r requirements/test.txt; \
	$(OLDEST)/bin/python $(pip_install) --force-reinstall --no-deps $(WHEELS)/*.whl; \
	$(OLDEST)/bin/python -m pytest -p no:cacheprovider $(PYTEST_ARGS)

# ---- the heavy suites -------------------------------------------------------------------------------

.PHONY: miri miri-part loom sanitize asan tsan stress stress-part mutants test-numpy test-numpy-part
# Leaks are LeakSanitizer's: handlers are immortal, which only its list of exceptions can say.
containers := --features allocator-api2,allocator-api2-02
miri: MIRI := $(containers) --lib --test rust --test requests --test requests_model
miri-part: MIRI := $(containers) --test rust
miri: ## the core and every strategy under Miri (nightly)
miri-part: ## the table, the selection and Buffer only
miri miri-part:
ifeq ($(NIGHTLY),)
	@echo '$@: skipped, there is no nightly toolchain'
else
	$(CARGO) +$(NIGHTLY) miri --version || rustup component add --toolchain $(NIGHTLY) miri rust-src
	MIRIFLAGS='-Zmiri-disable-isolation -Zmiri-ignore-leaks -Zmiri-permissive-provenance $(MIRIFLAGS)' \
		$(CARGO) +$(NIGHTLY) miri test --quiet --locked --no-default-features $(MIRI) --target-dir target/miri
endif

loom: ## every lock-free part, in every interleaving, under loom
	RUSTFLAGS='--cfg ctxalloc_loom' CARGO_PROFILE_RELEASE_LTO=off CARGO_PROFILE_RELEASE_CODEGEN_UNITS=16 \
		$(CARGO) test --quiet --release --lib --no-default-features --target-dir target/loom loom

sanitize: asan tsan ## the core's tests under AddressSanitizer, LeakSanitizer and ThreadSanitizer

# Absurd sizes are asked for on purpose, and must come back as NULL.
may_fail := allocator_may_return_null=1

# Sanitizers need mappings themselves where a test takes them all, make nothing of mlock, and keep memory that tests measure.
measured := memory_of_a_burst dropped_pools an_arena_ a_million_requests a_fork_costs an_idle_process trim_gives_back \
	a_child_of_fork an_end_with_an_escape
# They bring a signal stack of their own for the one that a test measures, and take minutes for a million of anything.
measured += signals_in_the_middle a_chain_of_successors budgets_a_million requests_nested forgotten_contexts limits_hold_after
skip := $(foreach test,a_process_without_mappings what_is_handed_out_is_locked a_limit_without_room $(measured),--skip $(test))

# The standard library keeps no frame pointers: only the slow unwinder sees every function that leaks.supp may name.
asan:
	ASAN_OPTIONS=$(may_fail):fast_unwind_on_malloc=0 LSAN_OPTIONS=suppressions=$(CURDIR)/tests/leaks.supp:print_suppressions=0 \
		RUSTC_BOOTSTRAP=1 RUSTFLAGS='-Zsanitizer=address' \
		$(CARGO) test --quiet --locked --tests --no-fail-fast --target $(HOST) --target-dir target/asan -- \
		$(skip) 2>&1 \
		| sed '/WARNING: AddressSanitizer failed to allocate/d'

# With a nightly the standard library is instrumented too; without, only what we compile is.
tsan:
ifeq ($(NIGHTLY),)
	TSAN_OPTIONS=$(may_fail) RUSTC_BOOTSTRAP=1 RUSTFLAGS='-Zsanitizer=thread -Cunsafe-allow-abi-mismatch=sanitizer' \
		$(CARGO) test --quiet --locked --tests --no-fail-fast --target $(HOST) --target-dir target/tsan -- \
		$(skip)
else
	[ -d "$$(rustc +$(NIGHTLY) --print sysroot)/lib/rustlib/src/rust/library" ] || \
		rustup component add --toolchain $(NIGHTLY) rust-src
	TSAN_OPTIONS=$(may_fail) RUSTFLAGS='-Zsanitizer=thread' \
		$(CARGO) +$(NIGHTLY) test --quiet -Zbuild-std --tests --no-fail-fast --target $(HOST) --target-dir target/tsan -- \
		$(skip)
endif

# CTXALLOC_STRESS: how many times the work of `make test`.
stress: $(DONE)/tools $(DONE)/extension ## threads and tasks by the million, and two million programs of the oracle
	CTXALLOC_STRESS=$(STRESS) $(CARGO) test --release --locked --test stress --test requests_model
	CTXALLOC_STRESS=$(STRESS) $(PY) -m pytest -k stress $(PYTEST_ARGS)
	$(PY) tests/oracle/run.py --profile release --programs $$(($(STRESS) * 4000)) --seed fresh

stress-part: STRESS := 5
stress-part: stress ## the same, a hundredth of it

mutants: $(DONE)/tools $(DONE)/package ## 60 ways to break the selection: the oracle notices each (MUTANTS="name ..." for some)
	$(PY) tests/oracle/mutants.py $(MUTANTS)

# Each handler is a run of its own: NUMPY_HANDLERS="guard" for some. CI runs the part, so that has few of them.
test-numpy-part: NUMPY_HANDLERS := system aligned64 pool
NUMPY_HANDLERS := system aligned64 pool arena tracked hugepages locked guard numa zeroing budgeted fallback faulty \
	callbacks sharedmemory
numpy_handlers = $(foreach name,$(NUMPY_HANDLERS),--handler $(name))

test-numpy: $(DONE)/numpy-suite ## NumPy's own test suite of numpy._core under every handler there is, whole
	$(PY) tests/numpy_suite/run.py $(numpy_handlers)

test-numpy-part: $(DONE)/numpy-suite ## the same without what NumPy marks as slow, under three
	$(PY) tests/numpy_suite/run.py --part $(numpy_handlers)

$(DONE)/numpy-suite: $(DONE)/package requirements/numpy-suite.txt requirements/test.txt
	$(PY) $(pip_install) -r requirements/numpy-suite.txt
	touch $@

# In an environment of its own: 2 GB, with a SYCL device on the CPU, which is found by the package itself and named for Rust.
.PHONY: test-usm bench-usm
usm_python := PYTHONPATH=$(CURDIR)/python $(USM)/bin/python

usm_runtime := OCL_ICD_FILENAMES="$(CURDIR)/$(USM)/lib/libintelocl.so" \
	CTXALLOC_DPCTL="$$(echo $(CURDIR)/$(USM)/lib/python3.*/site-packages/dpctl)/libDPCTLSyclInterface.so"

test-usm: $(DONE)/package $(DONE)/usm ## SYCL memory (ctxalloc.usm) on a real runtime, with dpctl and dpnp
	$(usm_runtime) $(CARGO) test --quiet --locked --features usm --test usm
	$(usm_python) -m pytest -p no:cacheprovider tests/usm $(PYTEST_ARGS)

bench-usm: $(DONE)/package $(DONE)/usm ## what memory of SYCL costs from dpctl and from the pool; docs/usm.md has the figures
	$(usm_runtime) $(CARGO) bench --quiet --locked --features usm --bench usm
	$(usm_python) scripts/usm_costs.py

.PHONY: usm-environment
usm-environment: $(DONE)/usm

$(DONE)/usm: $(DONE)/venv requirements/usm.txt requirements/test.txt
	[ -x $(USM)/bin/python ] || $(PYTHON) -m venv $(USM)
	$(USM)/bin/python $(pip_install) -r requirements/usm.txt -r requirements/test.txt
	touch $@

# numba-dpex ended in 2024 and wants the Numba, NumPy and dpctl of its time (CPython 3.11 or 3.12): 3 GB, not in CI.
.PHONY: test-dpex
dpex_runtime := LD_LIBRARY_PATH="$(CURDIR)/$(DPEX)/lib" OCL_ICD_FILENAMES="$(CURDIR)/$(DPEX)/lib/libintelocl.so"

test-dpex: $(WHEELS)/stamp $(DONE)/dpex ## numba-dpex runs kernels over our memory, without a copy
	$(DPEX)/bin/python $(pip_install) --force-reinstall --no-deps $(WHEELS)/ctxalloc-*.whl
	$(dpex_runtime) $(DPEX)/bin/python tests/dpex/kernels.py

$(DONE)/dpex: $(DONE)/venv requirements/dpex.txt
	[ -x $(DPEX)/bin/python ] || $(PYTHON) -m venv $(DPEX)
	$(DPEX)/bin/python $(pip_install) -r requirements/dpex.txt
	touch $@

# ---- to show and to measure -------------------------------------------------------------------------

.PHONY: demo bench
demo: $(DONE)/tools $(DONE)/extension ## the main job: a real service over HTTP, each route under its own handler
	$(PY) -m examples.service

bench: $(DONE)/tools $(DONE)/extension requirements/bench.txt ## ratios against named peers, in one run; benches/RESULTS.md
	$(PY) $(pip_install) -r requirements/bench.txt
	$(CARGO) bench --locked
	for script in benches/*.py; do $(PY) "$$script"; done
	cd benches && ../$(PY) -m harness.report

# ---- clean ------------------------------------------------------------------------------------------

.PHONY: clean
clean: ## remove everything that the targets above made
	$(CARGO) clean
	rm -rf $(VENV) $(NEWEST) $(OLDEST) $(USM) $(DPEX) .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find python examples -name '*.so' -delete
	find python examples tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +
