# Other machines: what this one can type-check or run for them. Included by the Makefile; docs/development.md says what was
# seen. What is fetched and built for it lies below target/, and apt-get is asked for packages by name only.

.PHONY: check-platforms platform-targets test-aarch64 aarch64-tools python-3.14

# ---- by type ----------------------------------------------------------------------------------------

# PYO3_NO_PYTHON: the stable ABI needs no interpreter of that system. Windows: the core, docs/decisions/0027 says why.
MAC := aarch64-apple-darwin
WINDOWS := x86_64-pc-windows-msvc
check := $(CARGO) check --quiet --locked --lib --target-dir target/platforms
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

# aarch64 under qemu's user mode, as if this were one: the kernel starts qemu for its programs (binfmt_misc), also for those
# that a test starts. qemu emulates the instructions, and on x86-64 none of ARM's reorderings: those are loom's and Miri's.
ARM := aarch64-unknown-linux-gnu
# qemu 7.2 answers success to advice that it does not know (MADV_GUARD_INSTALL), so guard pages are readable there: the tests
# that wait for a fault at one. Those of `measured` (ci.mk) do a million of something, or measure memory.
qemu_cannot := a_guard_that_does_not_report a_read_past_the_end a_use_after_free a_write_past_the_end an_underrun_is \
	the_handler_that_was_there_before
test-aarch64: aarch64-tools ## the core's Rust tests on an aarch64 that qemu emulates
	rustup target add $(ARM)
	CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc QEMU_LD_PREFIX=/usr/aarch64-linux-gnu \
		$(CARGO) test --quiet --locked --no-default-features $(core_alone) --target $(ARM) --target-dir target/aarch64 \
		--no-fail-fast -- $(foreach test,$(qemu_cannot) $(measured),--skip $(test))

aarch64-tools:
	@command -v qemu-aarch64 >/dev/null && command -v aarch64-linux-gnu-gcc >/dev/null \
		&& [ -e /proc/sys/fs/binfmt_misc/qemu-aarch64 ] || { \
		echo 'error: qemu or a cross compiler is missing: as root, apt-get install' \
			'qemu-user qemu-user-binfmt binfmt-support gcc-aarch64-linux-gnu libc6-dev-arm64-cross' >&2; exit 1; }

# A released CPython that this machine has no package for; Debian's next release has it. NEWEST_PYTHON may name it.
newer := target/pythons/3.14/usr/bin/python3.14
python-3.14: $(newer) ## CPython 3.14 of Debian's next release, below target/, for NEWEST_PYTHON=... make test-newest
$(newer): scripts/debian_python.sh scripts/debian_root.sh
	scripts/debian_python.sh target/pythons/3.14 testing 3.14
