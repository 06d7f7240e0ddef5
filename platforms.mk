# Other machines: what this one can type-check, build or run for them. Included by the Makefile; docs/development.md says what
# was seen. What is fetched and built for it lies below target/, and apt-get is asked for packages by name only.

.PHONY: check-platforms test-musl test-aarch64 test-aarch64-python test-3.14 test-free-threaded miri-seeds wheels-all

# ---- by type ----------------------------------------------------------------------------------------

# PYO3_NO_PYTHON: the stable ABI needs no interpreter of that system. Windows: the core, docs/decisions/0026 says why.
MAC := aarch64-apple-darwin
WINDOWS := x86_64-pc-windows-msvc
check := $(CARGO) check --quiet --locked --lib --target-dir target/platforms
check-platforms: ## macOS and Windows by type: every set of features, and the core
	rustup target add $(MAC) $(WINDOWS)
	$(check) --target $(MAC) --no-default-features
	$(check) --target $(MAC)
	$(check) --target $(MAC) --features capi,usm
	$(check) --target $(MAC) $(services)
	env -u PYO3_PYTHON PYO3_NO_PYTHON=1 $(check) --target $(MAC) --features abi3
	$(check) --target $(WINDOWS) --no-default-features
	$(check) --target $(WINDOWS) $(services)
