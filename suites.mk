# What looks at the project from outside: other packages' own test suites, hours of mixed work, the crate as it would be
# published. Included by the Makefile.

.PHONY: test-suites test-suites-part test-suites-whole test-crashes test-scripts soak package
# NumPy's suite whole, parts of SciPy's and pandas'; each test in requests, and in the pool. Two hours on two cores.
SUITE_WAYS := request limited pool

test-suites: $(DONE)/suites ## NumPy's, SciPy's and pandas' own tests in requests and in the pool, compared with their default
	$(PY) tests/suites/run.py $(foreach way,$(SUITE_WAYS),--way $(way)) $(SUITE_ARGS)

test-suites-part: $(DONE)/suites ## a few minutes of it: each test in a request with a limit and a budget
	$(PY) tests/suites/run.py --part --way limited $(SUITE_ARGS)

test-suites-whole: $(DONE)/suites ## CPython's own tests, and parts of NumPy's and pandas', with everything counted: request(whole=True)
	$(PY) tests/suites/whole.py
	$(PY) tests/suites/run.py --suite numpy --part --way whole $(SUITE_ARGS)
	$(PY) tests/suites/run.py --suite pandas --part --way whole $(SUITE_ARGS) \
		$(foreach part,frame.methods io.parser strings,--package pandas.tests.$(part))

test-crashes: $(DONE)/suites ## NumPy's tests while memory fails at random: each crash must be one that plain C has too
	$(PY) tests/suites/run.py --suite numpy --package numpy._core $(foreach seed,1 2 3,--way faulty:$(seed)) $(SUITE_ARGS)

$(DONE)/suites: $(DONE)/package requirements/suites.txt requirements/test.txt requirements/pins.txt
	$(PY) $(pip_install) -r requirements/suites.txt
	touch $@

test-scripts: $(DONE)/scripts ## examples of scikit-learn and scikit-image under `ctxalloc run`: the same output, every pixel
	$(PY) tests/scripts/run.py

$(DONE)/scripts: $(DONE)/package requirements/scripts.txt requirements/pins.txt
	$(PY) $(pip_install) -r requirements/scripts.txt
	touch $@

SOAK_SECONDS ?= 600

soak: $(DONE)/package $(DONE)/tools ## requests, escapes, forks, cancellations, threads for SOAK_SECONDS: memory and time stay flat
	$(PY) tests/soak/run.py --seconds $(SOAK_SECONDS)

# The tests are not in the package; the documents that doc tests read are.
PACKAGED := target/package/ctxalloc-$(VERSION)

package: ## cargo publish --dry-run, then the doc tests of the crate as it was packed
	$(CARGO) publish --quiet --locked --dry-run --allow-dirty
	$(CARGO) package --quiet --locked --no-verify --allow-dirty
	rm -rf target/packaged && mkdir -p target/packaged
	tar -xzf $(PACKAGED).crate -C target/packaged
	cd target/packaged/ctxalloc-$(VERSION) && $(CARGO) test --quiet --doc $(services) --target-dir $(CURDIR)/target/package-build
