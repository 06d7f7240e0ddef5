# The heavy suites: what CI runs beside `make test`, and what is run by hand before a release. The Makefile includes this
# file, so `make loom` works as `make test` does, and `make` lists the targets of both.

.PHONY: miri miri-part minimal-versions loom shuffled sanitize asan tsan stress stress-part mutants \
	mutants-rust test-numpy test-numpy-part fuzz
# Leaks are left to LeakSanitizer: handlers are immortal, and only tests/leaks.supp can say so.
containers := --features allocator-api2,allocator-api2-02
miri: MIRI := $(containers) --lib --test rust --test requests --test requests_model
miri-part: MIRI := $(containers) --test rust
miri: ## the core and every strategy under Miri (needs a nightly toolchain)
miri-part: ## Miri for the table, the selection and Buffer only
miri miri-part:
ifeq ($(NIGHTLY),)
	@echo '$@: skipped, there is no nightly toolchain'
else
	$(CARGO) +$(NIGHTLY) miri --version || rustup component add --toolchain $(NIGHTLY) miri rust-src
	MIRIFLAGS='-Zmiri-disable-isolation -Zmiri-ignore-leaks -Zmiri-permissive-provenance $(MIRIFLAGS)' \
		$(CARGO) +$(NIGHTLY) miri test --quiet --locked --no-default-features $(MIRI) --target-dir target/miri
endif

# As cargo-fuzz builds it, which need not be there: libFuzzer comes with the crate libfuzzer-sys. What it finds, and the
# corpus that grows, are in target/fuzz.
FUZZ_SECONDS ?= 600
FUZZ := target/fuzz/$(HOST)/release/recording
coverage := -Cpasses=sancov-module $(foreach option,level=4 inline-8bit-counters pc-table trace-compares,\
	-Cllvm-args=-sanitizer-coverage-$(option))
fuzz: ## any bytes as a recording: reader, info, exports, plan; for FUZZ_SECONDS, under AddressSanitizer (needs a nightly toolchain)
ifeq ($(NIGHTLY),)
	@echo '$@: skipped, there is no nightly toolchain'
else
	RUSTFLAGS='--cfg ctxalloc_fuzz $(coverage) -Zsanitizer=address' $(CARGO) +$(NIGHTLY) build --quiet --release --locked \
		--manifest-path fuzz/Cargo.toml --target $(HOST) --target-dir target/fuzz
	mkdir -p target/fuzz/corpus
	$(FUZZ) target/fuzz/corpus fuzz/seeds -max_total_time=$(FUZZ_SECONDS) -max_len=4096 -rss_limit_mb=1024 -timeout=20 \
		-artifact_prefix=target/fuzz/
endif

loom: ## the lock-free parts in every interleaving, under loom
	RUSTFLAGS='--cfg ctxalloc_loom' CARGO_PROFILE_RELEASE_LTO=off CARGO_PROFILE_RELEASE_CODEGEN_UNITS=16 \
		$(CARGO) test --quiet --release --lib --no-default-features --target-dir target/loom loom

# In a copy, for Cargo.lock must stay as it is. Nightly chooses the versions, and the usual toolchain compiles them.
minimal-versions: MINIMAL := target/minimal-versions
minimal-versions: $(DONE)/venv ## compiles the crate with the oldest releases that Cargo.toml allows (needs nightly)
ifeq ($(NIGHTLY),)
	@echo '$@: skipped, there is no nightly toolchain'
else
	rm -rf $(MINIMAL) && mkdir -p $(MINIMAL)
	git ls-files -z | tar --null --files-from - --create | tar --extract --directory $(MINIMAL)
	cd $(MINIMAL) && $(CARGO) +$(NIGHTLY) update --quiet -Z direct-minimal-versions
	for features in --no-default-features '' '$(services)' '--features usm,python' '--workspace'; do \
		( cd $(MINIMAL) && $(CARGO) check --quiet --locked $$features --target-dir $(CURDIR)/target/minimal-build ) \
			|| exit 1; \
	done
endif

# Only nightly's test harness has the option, unless a stable one is told otherwise; cargo itself is not, or it would build
# everything anew.
SHUFFLES ?= 3
shuffled: ## the Rust tests in random orders, SHUFFLES times: none may depend on what another one left behind
	for round in $$(seq $(SHUFFLES)); do \
		CARGO_TARGET_$(shell tr a-z- A-Z_ <<< '$(HOST)')_RUNNER='env RUSTC_BOOTSTRAP=1' \
			$(CARGO) test --quiet --locked $(services) --tests -- -Z unstable-options --shuffle $(test_threads); \
	done

sanitize: asan tsan ## the core's tests under AddressSanitizer, LeakSanitizer and ThreadSanitizer

# Absurd sizes are asked for on purpose, and must come back as NULL.
may_fail := allocator_may_return_null=1

# Left out under sanitizers: tests that use up all mappings (sanitizers need some), that check mlock (which they ignore), or
# that measure memory (which they hold back).
measured := memory_of_a_burst dropped_pools an_arena_ a_million_requests a_fork_costs an_idle_process trim_gives_back \
	a_child_of_fork an_end_with_an_escape growth_beside_the_pools measured::
# Sanitizers also replace the signal stack that one of these tests measures, and need minutes for a million of anything.
measured += signals_in_the_middle a_chain_of_successors budgets_a_million requests_nested forgotten_contexts \
	limits_hold_after hostile::
skip := $(foreach test,a_process_without_mappings what_is_handed_out_is_locked a_limit_without_room $(measured),--skip $(test))

# The standard library has no frame pointers: only the slow unwinder finds every function that leaks.supp names.
asan:
	ASAN_OPTIONS=$(may_fail):fast_unwind_on_malloc=0 LSAN_OPTIONS=suppressions=$(CURDIR)/tests/leaks.supp:print_suppressions=0 \
		RUSTC_BOOTSTRAP=1 RUSTFLAGS='-Zsanitizer=address' \
		$(CARGO) test --quiet --locked --tests --no-fail-fast --target $(HOST) --target-dir target/asan -- \
		$(skip) 2>&1 \
		| sed '/WARNING: AddressSanitizer failed to allocate/d'

# A child of `fork` may start the thread that gives memory back, of which ThreadSanitizer would die. Two of these tests
# start threads in a child themselves, and the two of sources take minutes there.
tsan_options := $(may_fail):die_after_fork=0
tsan_skip := $(skip) --skip what_another_thread_drops --skip a_pool_may_be_the_global_allocator \
	--skip a_pool_goes_on_after_its_source --skip wrappers_go_on_after_a_source

# The standard library is built and instrumented too: what goes through its locks and channels looks like a race otherwise.
tsan_toolchain := $(if $(NIGHTLY),+$(NIGHTLY))
tsan:
	[ -d "$$(rustc $(tsan_toolchain) --print sysroot)/lib/rustlib/src/rust/library" ] || \
		rustup component add $(if $(NIGHTLY),--toolchain $(NIGHTLY)) rust-src
	TSAN_OPTIONS=$(tsan_options) RUST_BACKTRACE=0 RUSTC_BOOTSTRAP=1 RUSTFLAGS='-Zsanitizer=thread --cfg ctxalloc_tsan' \
		$(CARGO) $(tsan_toolchain) test --quiet -Zbuild-std --tests --no-fail-fast --target $(HOST) --target-dir target/tsan -- \
		$(tsan_skip)

# CTXALLOC_STRESS multiplies the work that the same tests do in `make test`.
stress: $(DONE)/tools $(DONE)/extension ## threads and tasks by the million, two million oracle programs (STRESS=...)
	CTXALLOC_STRESS=$(STRESS) $(CARGO) test --release --locked --test stress --test requests_model --test recording
	CTXALLOC_STRESS=$$(($(STRESS) * 5)) $(CARGO) test --release --locked --test room # a million of its programs
	CTXALLOC_STRESS=$(STRESS) $(PY) -m pytest -k 'stress or whoever_reaches or known_answer' $(PYTEST_ARGS)
	$(PY) tests/oracle/run.py --profile release --programs $$(($(STRESS) * 4000)) --seed fresh

stress-part: STRESS := 5
stress-part: stress ## a hundredth of `make stress`

mutants: $(DONE)/tools $(DONE)/package ## breaks the selection in 60 ways; the oracle must notice each (MUTANTS="name ..." for some)
	$(PY) tests/mutants/run_oracle.py $(MUTANTS)

mutants-rust: ## takes each guard of the tower layer and of GlobalScoped out; their tests must notice (MUTANTS="name" for one)
	$(PYTHON) tests/mutants/run_rust.py $(if $(MUTANTS),"$(MUTANTS)")

# One run for each handler; NUMPY_HANDLERS="guard" chooses. CI runs the part, with three.
test-numpy-part: NUMPY_HANDLERS := system aligned64 pool
NUMPY_HANDLERS := system aligned64 pool arena tracked hugepages locked guard numa zeroing budgeted fallback faulty \
	callbacks sharedmemory
numpy_handlers = $(foreach name,$(NUMPY_HANDLERS),--handler $(name))

test-numpy: $(DONE)/package $(DONE)/tools ## NumPy's own tests of numpy._core under every handler
	$(PY) tests/numpy_suite/run.py $(numpy_handlers)

test-numpy-part: $(DONE)/package $(DONE)/tools ## the same under three handlers, without NumPy's slow tests
	$(PY) tests/numpy_suite/run.py --part $(numpy_handlers)

# In an environment of its own (2 GB), with the CPU as SYCL device. The package finds dpctl by itself; Rust is told the path.
.PHONY: test-usm bench-usm
usm_python := PYTHONPATH=$(CURDIR)/python $(USM)/bin/python

usm_runtime := OCL_ICD_FILENAMES="$(CURDIR)/$(USM)/lib/libintelocl.so" \
	CTXALLOC_DPCTL="$$(echo $(CURDIR)/$(USM)/lib/python3.*/site-packages/dpctl)/libDPCTLSyclInterface.so"

test-usm: $(DONE)/package $(DONE)/usm ## ctxalloc.usm with dpctl and dpnp on a real SYCL runtime
	$(usm_runtime) $(CARGO) test --quiet --locked --features usm --test usm
	$(usm_python) -m pytest -p no:cacheprovider tests/usm $(PYTEST_ARGS)

bench-usm: $(DONE)/package $(DONE)/usm ## SYCL memory from dpctl against our pool; docs/usm.md has the figures
	$(usm_runtime) $(CARGO) bench --quiet --locked --features usm --bench usm
	$(usm_python) scripts/usm_costs.py

.PHONY: usm-environment
usm-environment: $(DONE)/usm

$(DONE)/usm: $(DONE)/venv requirements/usm.txt requirements/test.txt
	[ -x $(USM)/bin/python ] || $(PYTHON) -m venv $(USM)
	$(USM)/bin/python $(pip_install) -r requirements/usm.txt -r requirements/test.txt
	touch $@

# Needs a CUDA device, and says which of CuPy, PyTorch, RMM and Numba it does not find; it installs none of them.
.PHONY: bench-cuda
CUDA_PYTHON ?= $(PY)
bench-cuda: $(DONE)/package ## pinned against pageable copies, pools, the reuse hazard, on a CUDA device: the table in benches/RESULTS.md
	PYTHONPATH=$(CURDIR)/python $(CUDA_PYTHON) benches/pinned.py

# The same; CUDA_PYTHON has pytest too. Without a device each test is skipped, and says why.
.PHONY: test-cuda-device
test-cuda-device: $(DONE)/package $(DONE)/tools ## what docs/cuda.md says, on a CUDA device
	PYTHONPATH=$(CURDIR)/python $(CUDA_PYTHON) -m pytest -p no:cacheprovider tests/cuda

# Servers, frameworks and other event loops, in an environment of their own; CTXALLOC_REQUESTS says how many requests.
.PHONY: test-services services-environment
services_python := PYTHONPATH=$(CURDIR)/python $(SERVICES)/bin/python

test-services: $(DONE)/package $(DONE)/services ## the middlewares behind uvicorn, hypercorn, granian and gunicorn, under load
	$(services_python) -m pytest -p no:cacheprovider tests/services $(PYTEST_ARGS)

services-environment: $(DONE)/services

.PHONY: test-libraries
test-libraries: $(DONE)/package $(DONE)/libraries ## docs/coverage.md on pandas, Arrow, Polars, OpenCV, Numba and others, measured
	PYTHONPATH=$(CURDIR)/python $(LIBRARIES)/bin/python -m pytest -p no:cacheprovider tests/libraries $(PYTEST_ARGS)

.PHONY: test-whole
test-whole: $(DONE)/package $(DONE)/libraries target/allocators ## request(whole=True) with Arrow, and what a limit does to which library: docs/whole.md
	LD_LIBRARY_PATH=$(CURDIR)/target/allocators$${LD_LIBRARY_PATH:+:$$LD_LIBRARY_PATH} PYTHONPATH=$(CURDIR)/python \
		$(LIBRARIES)/bin/python -m pytest -p no:cacheprovider tests/whole $(PYTEST_ARGS)

# PyTorch with all that its wheel needs: 3 GB to fetch.
.PHONY: test-whole-torch
test-whole-torch: $(DONE)/package $(DONE)/libraries ## what a limit does to PyTorch on the CPU (5 GB installed)
	$(LIBRARIES)/bin/python $(pip_install) -r requirements/torch.txt
	PYTHONPATH=$(CURDIR)/python $(LIBRARIES)/bin/python -m pytest -p no:cacheprovider tests/whole/test_limits.py -k torch $(PYTEST_ARGS)

# Allocators that people preload, unpacked and not installed; where there is no apt, those that the system has are tried.
target/allocators: | target
	rm -rf $@.new && mkdir -p $@.new
	cd $@.new && if command -v apt-get dpkg >/dev/null && apt-get download --quiet --quiet libjemalloc2 libmimalloc2.0 \
			libtcmalloc-minimal4; then for package in *.deb; do dpkg -x $$package .; done; \
		cp -P usr/lib/*/lib{jemalloc,mimalloc,tcmalloc_minimal}.so* .; rm -rf usr *.deb; \
		else echo 'test-whole: no apt, so only allocators that are installed stand beside it'; fi
	mv $@.new $@

target:
	mkdir -p $@

$(DONE)/libraries: $(DONE)/venv requirements/libraries.txt
	[ -x $(LIBRARIES)/bin/python ] || $(PYTHON) -m venv $(LIBRARIES)
	$(LIBRARIES)/bin/python $(pip_install) -r requirements/libraries.txt
	touch $@

$(DONE)/services: $(DONE)/venv requirements/services.txt requirements/test.txt
	[ -x $(SERVICES)/bin/python ] || $(PYTHON) -m venv $(SERVICES)
	$(SERVICES)/bin/python $(pip_install) -r requirements/services.txt -r requirements/test.txt
	touch $@

# Dask and Ray with real workers, joblib and Celery, in an environment of their own; those of Dask and Ray again with the
# oldest releases that ctxalloc takes. One after the other: each has processes of its own already.
.PHONY: test-clusters test-clusters-part bench-clusters clusters-proof clusters-picture clusters-environment
clusters_python := PYTHONPATH=$(CURDIR)/python $(CLUSTERS)/bin/python

test-clusters: $(DONE)/package $(DONE)/clusters ## each task of Dask, Ray, joblib and Celery in a request of its own, on real workers
	$(clusters_python) -m pytest -p no:cacheprovider tests/clusters
	PYTHONPATH=$(CURDIR)/python $(OLDEST_CLUSTERS)/bin/python -m pytest -p no:cacheprovider tests/clusters/test_dask*.py \
		tests/clusters/test_ray.py

# What ends within minutes: without the runs of minutes, and without those that fill the machine until something is killed.
clusters_part := -k "not 20000 and not spilled and not guide and not kill_workers"

test-clusters-part: $(DONE)/package $(DONE)/clusters ## the part of it that ends within minutes
	$(clusters_python) -m pytest -p no:cacheprovider tests/clusters $(clusters_part)
	PYTHONPATH=$(CURDIR)/python $(OLDEST_CLUSTERS)/bin/python -m pytest -p no:cacheprovider tests/clusters/test_dask*.py \
		$(clusters_part)

bench-clusters: $(DONE)/package $(DONE)/clusters ## what a request around each task of Dask costs; docs/clusters.md has the figures
	$(clusters_python) benches/clusters.py

clusters-proof: $(DONE)/package $(DONE)/clusters ## what becomes of 3000 tasks and four greedy ones on Dask and on Ray, without ctxalloc and with it
	$(clusters_python) tests/clusters/proof.py
	$(clusters_python) tests/clusters/proof.py --on proof_ray

clusters-picture: $(DONE)/package $(DONE)/clusters ## docs/images/clusters.png: thousands of tasks of Dask and a few greedy ones, without the plugin and with it
	$(clusters_python) scripts/draw_clusters.py

clusters-environment: $(DONE)/clusters

$(DONE)/clusters: $(DONE)/venv requirements/clusters.txt requirements/clusters-oldest.txt requirements/pins.txt
	[ -x $(CLUSTERS)/bin/python ] || $(PYTHON) -m venv $(CLUSTERS)
	$(CLUSTERS)/bin/python $(pip_install) -r requirements/clusters.txt
	[ -x $(OLDEST_CLUSTERS)/bin/python ] || $(PYTHON) -m venv $(OLDEST_CLUSTERS)
	$(OLDEST_CLUSTERS)/bin/python $(pip_install) -r requirements/clusters-oldest.txt
	touch $@

# Services of others' making, not in CI.
.PHONY: bench-advised
bench-advised: $(DONE)/package $(DONE)/advised ## two services of others' making, recorded, advised and measured as advised; benches/RESULTS.md has the figures
	PYTHONPATH=$(CURDIR)/python $(ADVISED)/bin/python benches/advised.py

$(DONE)/advised: $(DONE)/venv requirements/advised.txt
	[ -x $(ADVISED)/bin/python ] || $(PYTHON) -m venv $(ADVISED)
	$(ADVISED)/bin/python $(pip_install) -r requirements/advised.txt
	touch $@

# numba-dpex ended in 2024 and needs the Numba, NumPy and dpctl of its time (CPython 3.11 or 3.12): 3 GB, not in CI.
.PHONY: test-dpex
dpex_runtime := LD_LIBRARY_PATH="$(CURDIR)/$(DPEX)/lib" OCL_ICD_FILENAMES="$(CURDIR)/$(DPEX)/lib/libintelocl.so"

test-dpex: $(WHEELS)/stamp $(DONE)/dpex ## numba-dpex kernels on our memory, without a copy
	$(DPEX)/bin/python $(pip_install) --force-reinstall --no-deps $(WHEELS)/ctxalloc-*.whl
	$(dpex_runtime) $(DPEX)/bin/python tests/dpex/kernels.py

$(DONE)/dpex: $(DONE)/venv requirements/dpex.txt
	[ -x $(DPEX)/bin/python ] || $(PYTHON) -m venv $(DPEX)
	$(DPEX)/bin/python $(pip_install) -r requirements/dpex.txt
	touch $@
