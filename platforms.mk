# Other machines: what this one can type-check, build or run for them. Included by the Makefile; docs/development.md says what
# was seen. What is fetched and built for it lies below target/, and apt-get is asked for packages by name only.

.PHONY: check-platforms test-musl test-aarch64 test-aarch64-python test-3.14 test-free-threaded miri-seeds wheels-all

# ---- by type ----------------------------------------------------------------------------------------

# PYO3_NO_PYTHON: the stable ABI needs no interpreter of that system. Windows: the core, docs/decisions/0026 says why.
MAC := aarch64-apple-darwin
WINDOWS := x86_64-pc-windows-msvc
check := $(CARGO) check --quiet --locked --lib --target-dir target/platforms
.PHONY: platform-targets
platform-targets:
	rustup target add $(MAC) $(WINDOWS)

check-platforms: platform-targets ## macOS and Windows by type: every set of features, and the core
	$(check) --target $(MAC) --no-default-features
	$(check) --target $(MAC)
	$(check) --target $(MAC) --features capi,usm
	$(check) --target $(MAC) $(services)
	env -u PYO3_PYTHON PYO3_NO_PYTHON=1 $(check) --target $(MAC) --features abi3
	$(check) --target $(WINDOWS) --no-default-features
	$(check) --target $(WINDOWS) $(services)


# ---- by running -------------------------------------------------------------------------------------

# musl runs here. Its tests are static programs, so they need no loader of their own.
MUSL := x86_64-unknown-linux-musl
test-musl: ## the core's Rust tests with musl instead of glibc
	@command -v musl-gcc >/dev/null || { echo 'error: musl-gcc is missing: apt-get install musl-tools' >&2; exit 1; }
	rustup target add $(MUSL)
	CC_x86_64_unknown_linux_musl=musl-gcc \
		$(CARGO) test --quiet --locked --no-default-features $(core_alone) --target $(MUSL) --target-dir target/musl

# aarch64 under qemu's user mode, as if this were one: the kernel starts qemu for its programs (binfmt_misc), also for those
# that a test starts. qemu emulates the instructions, and on x86-64 none of ARM's reorderings: those are loom's and Miri's.
ARM := aarch64-unknown-linux-gnu
ARM_ROOT := /usr/aarch64-linux-gnu
arm := CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc CTXALLOC_EMULATED=1
# What qemu 7.2 does otherwise than Linux; each has its line in docs/development.md.
qemu_cannot :=
test-aarch64: aarch64-tools ## the core's Rust tests on an emulated aarch64
	rustup target add $(ARM)
	$(arm) QEMU_LD_PREFIX=$(ARM_ROOT) $(CARGO) test --quiet --locked --no-default-features $(core_alone) --target $(ARM) \
		--target-dir target/aarch64 --no-fail-fast -- $(foreach test,$(qemu_cannot),--skip $(test))

.PHONY: aarch64-tools
aarch64-tools:
	@command -v qemu-aarch64 >/dev/null && command -v aarch64-linux-gnu-gcc >/dev/null && [ -e /proc/sys/fs/binfmt_misc/qemu-aarch64 ] || { \
		echo 'error: qemu or a cross compiler is missing: as root, apt-get install' \
			'qemu-user qemu-user-binfmt binfmt-support gcc-aarch64-linux-gnu libc6-dev-arm64-cross' >&2; exit 1; }

# Debian's Python for aarch64, with NumPy's wheel for it.
ARM_PYTHON := target/pythons/aarch64
$(ARM_PYTHON)/stamp: scripts/debian_root.sh
	rm -rf $(ARM_PYTHON)
	scripts/debian_root.sh $(ARM_PYTHON) arm64 bookworm python3.11 musl
	touch $@

ARM_SITE := $(ARM_PYTHON)/site
ARM_PLATFORMS := --platform manylinux_2_28_aarch64 --platform manylinux_2_27_aarch64 --platform manylinux2014_aarch64
arm_python := QEMU_LD_PREFIX=$(CURDIR)/$(ARM_PYTHON) PYTHONPATH=$(CURDIR)/$(ARM_SITE) CTXALLOC_EMULATED=1 \
	$(ARM_PYTHON)/usr/bin/python3.11
# The core of the suite: what needs neither a C compiler for aarch64 nor the example extension, nor a service.
arm_core := blocks every_strategy handler_of names one_truth request request_budgets request_decorator request_handlers \
	request_promises scope_type set_reset strategies table use use_decorator use_generators
# Of these, what qemu 7.2 does otherwise than Linux: docs/development.md has a line for each.
qemu_cannot_in_python :=
test-aarch64-python: $(ARM_PYTHON)/stamp aarch64-tools ## part of the Python suite in Debian's Python for aarch64, emulated
	[ -e "$$(echo $(WHEELS_ALL)/*manylinux*aarch64.whl)" ] || $(wheel) --target $(ARM) --compatibility manylinux_2_17
	rm -rf $(ARM_SITE)
	$(PY) $(pip_install) --target $(ARM_SITE) --only-binary=:all: --python-version 3.11 $(ARM_PLATFORMS) \
		-r requirements/numpy.txt -c requirements/pins.txt pytest hypothesis $(WHEELS_ALL)/*manylinux*aarch64.whl
	$(arm_python) -m pytest -p no:cacheprovider -m "not once" $(foreach name,$(arm_core),tests/python/test_$(name).py) \
		$(foreach test,$(qemu_cannot_in_python),--deselect $(test))

# A released CPython that this machine has no package for; Debian's next release has it.
NEWER := 3.14
newer := target/pythons/$(NEWER)/usr/bin/python$(NEWER)
$(newer): scripts/debian_python.sh scripts/debian_root.sh
	scripts/debian_python.sh target/pythons/$(NEWER) testing $(NEWER)

test-3.14: $(newer) ## test-newest on CPython 3.14, unpacked from Debian's next release
	$(MAKE) test-newest NEWEST_PYTHON=$(CURDIR)/$(newer)

# ---- wheels -----------------------------------------------------------------------------------------

$(DONE)/wheels-tools: $(DONE)/build-tools requirements/wheels.txt requirements/pins.txt
	$(PY) $(pip_install) -r requirements/wheels.txt
	touch $@

WHEELS_ALL := target/wheels-all
wheel := $(in_venv) PYO3_NO_PYTHON=1 maturin build --quiet --release --locked --zig --target-dir target/wheels-build --out $(WHEELS_ALL)
# The oldest C libraries that Rust itself promises to work with: glibc 2.17, musl 1.2.
wheels-all: $(DONE)/wheels-tools ## wheels for manylinux and musllinux, x86-64 and aarch64, and the sdist: built, checked, tried
	rustup target add $(ARM) $(MUSL) x86_64-unknown-linux-gnu aarch64-unknown-linux-musl
	rm -rf $(WHEELS_ALL) && mkdir -p $(WHEELS_ALL)
	$(wheel) --target x86_64-unknown-linux-gnu --compatibility manylinux_2_17
	$(wheel) --target $(ARM) --compatibility manylinux_2_17
	$(wheel) --target $(MUSL) --compatibility musllinux_1_2
	$(wheel) --target aarch64-unknown-linux-musl --compatibility musllinux_1_2
	$(in_venv) maturin sdist --quiet --out $(WHEELS_ALL)
	$(MAKE) check-wheels

.PHONY: check-wheels
check-wheels: $(DONE)/wheels-tools $(ARM_PYTHON)/stamp
	$(in_venv) scripts/check_wheels.py $(WHEELS_ALL)

# ---- weak memory ------------------------------------------------------------------------------------

# Tests in which threads meet in what ARCHITECTURE.md lists ("What orders what"), each under SEEDS schedules, with the stale
# values that a weakly ordered machine may show.
SEEDS ?= 16
meetings := one_that_is_half_made a_lock_that_changes_hands handler::table::tests many_threads_of_requests_lose_no_slot \
	threads_count_exactly_while_others_read threads_at_once_never_pass_a_limit a_second_thread
miri-seeds: ## Miri's weak memory with SEEDS schedules of each test in which threads meet
ifeq ($(NIGHTLY),)
	@echo '$@: skipped, there is no nightly toolchain'
else
	$(CARGO) +$(NIGHTLY) miri --version || rustup component add --toolchain $(NIGHTLY) miri rust-src
	MIRIFLAGS='-Zmiri-disable-isolation -Zmiri-ignore-leaks -Zmiri-permissive-provenance -Zmiri-many-seeds=0..$(SEEDS)' \
		$(CARGO) +$(NIGHTLY) miri test --quiet --locked --no-default-features --lib --test requests --test metrics \
		--test requests_model --target-dir target/miri -- $(meetings)
endif
