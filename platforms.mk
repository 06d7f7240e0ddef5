# Other machines: what this one can type-check, build or run for them. Included by the Makefile; docs/development.md says what was
# seen. What is fetched and built for it lies below target/, and apt-get is asked for packages by name only.

.PHONY: check-platforms platform-targets test-musl test-musl-python test-aarch64 test-aarch64-python aarch64-tools python-3.14
.PHONY: test-3.14 test-free-threaded
.PHONY: wheels-all check-wheels wheel-pythons wheel-targets miri-seeds

ARM := aarch64-unknown-linux-gnu
MUSL := x86_64-unknown-linux-musl
ARM_MUSL := aarch64-unknown-linux-musl
WHEELS_ALL := target/wheels-all
MUSL_PYTHON := target/pythons/musl

# ---- by type ----------------------------------------------------------------------------------------

# PYO3_NO_PYTHON: the stable ABI needs no interpreter of that system. Windows: the core, docs/decisions/0027 says why. On a Mac
# with a processor of Intel's a few lines differ (src/os/macos.rs).
MAC := aarch64-apple-darwin
INTEL_MAC := x86_64-apple-darwin
WINDOWS := x86_64-pc-windows-msvc
check := env RUSTFLAGS='-D warnings' $(CARGO) check --quiet --locked --lib --target-dir target/platforms
platform-targets:
	rustup target add $(MAC) $(INTEL_MAC) $(WINDOWS) $(MUSL)

check-platforms: platform-targets ## macOS and Windows by type: every set of features, and the core (warnings are errors)
	$(check) --target $(MAC) --no-default-features
	$(check) --target $(MAC)
	$(check) --target $(MAC) --features capi,usm
	$(check) --target $(MAC) $(services)
	env -u PYO3_PYTHON PYO3_NO_PYTHON=1 $(check) --target $(MAC) --features abi3
	env -u PYO3_PYTHON PYO3_NO_PYTHON=1 $(check) --target $(INTEL_MAC) --features abi3
	$(check) --target $(WINDOWS) --no-default-features
	$(check) --target $(WINDOWS)
	$(check) --target $(WINDOWS) --features capi
	$(check) --target $(WINDOWS) $(services)

# ---- by running -------------------------------------------------------------------------------------

# What needs neither a compiler for that machine, nor the example extension, nor a service.
bare_suite := blocks every_strategy events handler_of messages names one_truth oracle request request_budgets \
	request_decorator request_handlers request_promises scope_type set_reset settings strategies table tracking use \
	use_decorator use_generators use_async_generators
needs_example := tests/python/test_events.py::test_a_hook_that_panics_in_rust_takes_nothing_down

# musl runs here: its tests are static programs.
test-musl: ## the core's Rust tests with musl in place of glibc
	@command -v musl-gcc >/dev/null || { echo 'error: musl-gcc is missing: apt-get install musl-tools' >&2; exit 1; }
	rustup target add $(MUSL)
	CC_x86_64_unknown_linux_musl=musl-gcc $(CARGO) test --quiet --locked --no-default-features $(core_alone) \
		--target $(MUSL) --target-dir target/musl --no-fail-fast

# The wheel with NumPy's, in the CPython with musl that `wheel-pythons` builds. It has no zlib, which numpy.random needs (and
# hypothesis, which these tests do without).
no_zlib := tests/python/test_handler_of.py::test_what_numpy_makes_lives_in_the_current_handler_and_numpy_agrees[random]
musl_packages := target/pythons/musl-packages
musl_pip := $(pip_install) --target $(musl_packages) --only-binary=:all: --python-version 3.13 --implementation cp \
	--platform musllinux_1_2_x86_64
test-musl-python: $(MUSL_PYTHON)/stamp $(WHEELS_ALL)/$(MUSL) ## half of the Python suite, in a CPython with musl
	rm -rf $(musl_packages)
	$(PY) $(musl_pip) -r requirements/numpy.txt -c requirements/pins.txt pytest $(WHEELS_ALL)/$(MUSL)/*.whl
	PYTHONPATH=$(CURDIR)/$(musl_packages) $(MUSL_PYTHON)/bin/python3.13 \
		-m pytest -p no:cacheprovider -m "not once" $(foreach name,$(bare_suite),tests/python/test_$(name).py) \
		--deselect '$(no_zlib)' --deselect $(needs_example)

# aarch64 under qemu's user mode, as if this were one: the kernel starts qemu for its programs (binfmt_misc), also for those
# that a test starts. qemu emulates the instructions, and on x86-64 none of ARM's reorderings: those are loom's and Miri's.
# qemu 7.2 answers success to advice that it does not know (MADV_GUARD_INSTALL), so guard pages are readable there: the tests
# that wait for a fault at one. And it fails an assertion of its own (qemu_plugin_vcpu_init_hook) where a child of `fork` starts
# a thread. Those of `measured` (ci.mk) do a million of something, or measure memory.
qemu_cannot := a_guard_that_does_not_report a_read_past_the_end a_use_after_free a_write_past_the_end an_underrun_is \
	the_handler_that_was_there_before a_pool_may_be_the_global_allocator
arm_skip := $(qemu_cannot) $(measured)
test-aarch64: aarch64-tools ## the core's Rust tests on an aarch64 that qemu emulates
	rustup target add $(ARM)
	CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc QEMU_LD_PREFIX=/usr/aarch64-linux-gnu \
		$(CARGO) test --quiet --locked --no-default-features $(core_alone) --target $(ARM) --target-dir target/aarch64 \
		--no-fail-fast -- $(foreach test,$(arm_skip),--skip $(test))
	@echo 'test-aarch64: left out, since qemu cannot or they measure: $(arm_skip)'

aarch64-tools:
	@command -v qemu-aarch64 >/dev/null && command -v aarch64-linux-gnu-gcc >/dev/null \
		&& [ -e /proc/sys/fs/binfmt_misc/qemu-aarch64 ] || { \
		echo 'error: qemu or a cross compiler is missing: as root, apt-get install' \
			'qemu-user qemu-user-binfmt binfmt-support gcc-aarch64-linux-gnu libc6-dev-arm64-cross;' \
			'mount -t binfmt_misc none /proc/sys/fs/binfmt_misc; update-binfmts --enable qemu-aarch64' >&2; exit 1; }

# Debian's Python for aarch64, and musl's loader for it, unpacked.
ARM_PYTHON := target/pythons/aarch64
$(ARM_PYTHON)/stamp: scripts/debian_root.sh
	rm -rf $(ARM_PYTHON)
	scripts/debian_root.sh $(ARM_PYTHON) arm64 bookworm python3.11 libstdc++6 musl
	touch $@

arm_packages := target/pythons/aarch64-packages
arm_pip := $(pip_install) --target $(arm_packages) --only-binary=:all: --python-version 3.11 --implementation cp \
	--platform manylinux_2_28_aarch64 --platform manylinux_2_27_aarch64 --platform manylinux_2_17_aarch64
test-aarch64-python: $(ARM_PYTHON)/stamp $(WHEELS_ALL)/$(ARM) aarch64-tools ## half of the Python suite, in Debian's Python for aarch64 under qemu
	rm -rf $(arm_packages)
	$(PY) $(arm_pip) -r requirements/numpy.txt -c requirements/pins.txt pytest hypothesis $(WHEELS_ALL)/$(ARM)/*.whl
	QEMU_LD_PREFIX=$(CURDIR)/$(ARM_PYTHON) PYTHONPATH=$(CURDIR)/$(arm_packages) $(ARM_PYTHON)/usr/bin/python3.11 \
		-m pytest -p no:cacheprovider -m "not once" $(foreach name,$(bare_suite),tests/python/test_$(name).py) \
		--deselect $(needs_example)

# A released CPython that this machine has no package for; Debian's next release has it. NEWEST_PYTHON may name it.
newer := target/pythons/3.14/usr/bin/python3.14
python-3.14: $(newer) ## CPython 3.14 of Debian's next release, below target/, for NEWEST_PYTHON=... make test-newest
$(newer): scripts/debian_python.sh scripts/debian_root.sh
	scripts/debian_python.sh target/pythons/3.14 testing 3.14

# What a thread starts with is an option of 3.14.
test-3.14: $(newer) ## the Python suite on CPython 3.14, threads with their starter's context and without
	PYTHON_THREAD_INHERIT_CONTEXT=0 $(MAKE) test-newest NEWEST_PYTHON=$(CURDIR)/$(newer)
	PYTHON_THREAD_INHERIT_CONTEXT=1 $(MAKE) test-newest NEWEST_PYTHON=$(CURDIR)/$(newer)

# Without a GIL. pyo3 takes such a CPython from 3.14 on, of which no sources are to be had; it has a switch for its own tests
# that takes 3.13 too. Hypothesis has no wheel for it now; this one is of Python alone. What grows by repeating is measured by
# tracemalloc, which without a GIL counts some 30 KB once: `test_references` is left out. And where a thread was started it
# clears a module's names before its objects, also without us: the test whose finalizers use them.
FREE_PYTHON := target/pythons/free-threaded
FREE_VENV := target/pythons/free-threaded-venv
free_wheels := target/pythons/free-threaded-wheels
free_build := env -u PYO3_PYTHON UNSAFE_PYO3_SKIP_VERSION_CHECK=1 CARGO_PROFILE_RELEASE_LTO=off \
	CARGO_PROFILE_RELEASE_CODEGEN_UNITS=16 $(WHEEL_TOOLS)/bin/maturin build --quiet --release --locked \
	--interpreter $(FREE_VENV)/bin/python --compatibility linux --target-dir target/free-threaded --out $(free_wheels)
early_end := tests/python/test_tracking.py::test_arrays_that_live_to_the_end_of_the_interpreter_do_no_harm
free_suite := $(bare_suite) processes request_stress stress
$(FREE_PYTHON)/stamp: scripts/free_threaded_python.sh scripts/debian_root.sh
	scripts/free_threaded_python.sh $(FREE_PYTHON) testing 3.13
	touch $@

test-free-threaded: $(FREE_PYTHON)/stamp $(DONE)/wheel-tools ## half of the Python suite and the stress tests, in a CPython 3.13 without a GIL
	rm -rf $(free_wheels)
	$(FREE_PYTHON)/bin/python3.13t -m venv --clear $(FREE_VENV)
	$(free_build)
	$(free_build) --manifest-path examples/extension/Cargo.toml
	$(FREE_VENV)/bin/python $(pip_install) --only-binary=:all: -r requirements/numpy.txt pytest 'hypothesis<6.145'
	$(FREE_VENV)/bin/python $(pip_install) --no-deps $(free_wheels)/*.whl
	$(FREE_VENV)/bin/python -I -W error -c 'import ctxalloc, ctxalloc_example, sys; assert not sys._is_gil_enabled()'
	$(FREE_VENV)/bin/python -m pytest -p no:cacheprovider -m "not once" \
		$(foreach name,$(free_suite),tests/python/test_$(name).py) --deselect $(early_end)

# ---- wheels -----------------------------------------------------------------------------------------

# For the oldest C libraries that Rust itself promises to work with; zig links for them. The stable ABI needs no interpreter.
wheels_for := x86_64-unknown-linux-gnu $(ARM) $(MUSL) $(ARM_MUSL)
wheel_tools := PATH="$(CURDIR)/$(WHEEL_TOOLS)/bin:$$PATH"
wheels-all: $(foreach target,$(wheels_for),$(WHEELS_ALL)/$(target)) $(WHEELS_ALL)/sdist check-wheels ## wheels for manylinux and musllinux, x86-64 and aarch64, and the sdist: built, checked, tried

# What is published: a copy, whose README.md has links that work elsewhere too.
PUBLISHED := target/published
$(PUBLISHED)/stamp: $(DONE)/venv scripts/published.py $(rust_sources) $(python_sources) pyproject.toml README.md
	$(PY) scripts/published.py $(PUBLISHED)
	touch $@

# Each wheel in a folder that is named after its target.
$(WHEELS_ALL)/%: $(DONE)/wheel-tools $(PUBLISHED)/stamp
	rustup target add $*
	rm -rf $@
	env -u PYO3_PYTHON PYO3_NO_PYTHON=1 $(wheel_tools) maturin build --quiet --release --locked --zig --target $* \
		--manifest-path $(PUBLISHED)/Cargo.toml --target-dir target/wheels-build --out $@ \
		--compatibility $(if $(findstring musl,$*),musllinux_1_2,manylinux_2_17)
	touch $@

$(WHEELS_ALL)/sdist: $(DONE)/wheel-tools $(PUBLISHED)/stamp
	rm -rf $@
	$(wheel_tools) maturin sdist --manifest-path $(PUBLISHED)/Cargo.toml --out $@
	touch $@

check-wheels: wheel-pythons
	$(wheel_tools) $(WHEEL_TOOLS)/bin/python scripts/check_wheels.py $(WHEELS_ALL)/*/*

# Where one cannot be had, its wheel is not tried, and that is said.
wheel-pythons:
	-@$(MAKE) --silent $(ARM_PYTHON)/stamp $(MUSL_PYTHON)/stamp --keep-going

$(MUSL_PYTHON)/stamp: scripts/musl_python.sh scripts/debian_root.sh
	scripts/musl_python.sh $(MUSL_PYTHON) testing 3.13
	touch $@

$(DONE)/wheel-tools: $(DONE)/venv requirements/wheels.txt requirements/pins.txt
	[ -x $(WHEEL_TOOLS)/bin/python ] || $(PYTHON) -m venv $(WHEEL_TOOLS)
	$(WHEEL_TOOLS)/bin/python $(pip_install) -r requirements/wheels.txt
	touch $@

# ---- weak memory ------------------------------------------------------------------------------------

# Tests in which threads meet in what ARCHITECTURE.md lists ("What orders what"), each under SEEDS schedules, with the stale
# values that a weakly ordered machine may show.
SEEDS ?= 16
meetings := a_lock_that_changes_hands one_that_is_half_made handler::table::tests a_record_is_one_requests_at_a_time \
	threads_call_a_struct_that_becomes_watched a_reader_never_sees_half_of_a_write threads_agree_on_a_name \
	threads_find_the_one_struct
miri-seeds: ## Miri's weak memory, with SEEDS schedules of each test in which threads meet (needs a nightly toolchain)
ifeq ($(NIGHTLY),)
	@echo '$@: skipped, there is no nightly toolchain'
else
	$(CARGO) +$(NIGHTLY) miri --version || rustup component add --toolchain $(NIGHTLY) miri rust-src
	MIRIFLAGS='-Zmiri-disable-isolation -Zmiri-ignore-leaks -Zmiri-permissive-provenance -Zmiri-many-seeds=0..$(SEEDS)' \
		$(CARGO) +$(NIGHTLY) miri test --quiet --locked --no-default-features --features capi --lib --target-dir target/miri \
		-- $(meetings)
endif
