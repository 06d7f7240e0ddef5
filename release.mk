# What strangers see: the site, the release and what is promised to stay. Included by the Makefile.

.PHONY: site site-environment api-environment lint-workflows release-check release-nightly release-versions licences advisories test-api test-api-python test-api-rust api
SITE := .venv-site
PUBLIC_API := target/release-tools/bin/cargo-public-api
site_python := PYTHONPATH=$(CURDIR)/python:$(CURDIR)/scripts/site $(SITE)/bin/python

# ---- the site ---------------------------------------------------------------------------------------

site: $(DONE)/site $(DONE)/package ## the guides, a reference of the package and rustdoc, as a site: target/site/VERSION/index.html
	RUSTDOCFLAGS='-D warnings' $(CARGO) doc --quiet --locked --no-deps $(services),usm,cuda
	$(site_python) scripts/site/build.py $(VERSION)

site-environment: $(DONE)/site

$(DONE)/site: $(DONE)/venv requirements/site.txt requirements/numpy.txt requirements/pins.txt
	[ -x $(SITE)/bin/python ] || $(PYTHON) -m venv $(SITE)
	$(SITE)/bin/python $(pip_install) -r requirements/site.txt -r requirements/numpy.txt
	touch $@

.PHONY: command-pages
command-pages: $(DONE)/tools $(DONE)/package ## the man page of `ctxalloc` and its completion for bash, zsh and fish, into python/installed
	$(PY) scripts/command_pages.py write

# ---- what is promised to stay -----------------------------------------------------------------------

# docs/stability.md explains it. The public surface is written down in tests/api; `make api` writes it anew, once the
# changelog has an entry for what changed.
test-api: test-api-python test-api-rust
test-api-python: $(DONE)/package $(DONE)/site ## the public names and signatures are those of tests/api, whose changes the changelog tells
	$(site_python) scripts/api.py check python
test-api-rust:
	@if [ -z "$(NIGHTLY)" ]; then echo 'test-api-rust: skipped, it needs a nightly toolchain'; \
		else $(MAKE) --no-print-directory $(PUBLIC_API) && $(PY) scripts/api.py check rust $(PUBLIC_API) $(NIGHTLY); fi

# What `test-api` fetches, for .ci/run.
api-environment: $(DONE)/site $(if $(NIGHTLY),$(PUBLIC_API))

api: $(DONE)/package $(DONE)/site $(PUBLIC_API) ## writes tests/api anew
	$(site_python) scripts/api.py write python
	$(PY) scripts/api.py write rust $(PUBLIC_API) $(NIGHTLY)

$(PUBLIC_API):
	$(CARGO) install --quiet --locked --root target/release-tools cargo-public-api@0.52.0

# ---- the release ------------------------------------------------------------------------------------

lint-workflows: $(DONE)/site ## the workflows and the issue forms: their schemas, and what an attacker could use
	$(SITE)/bin/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(SITE)/bin/check-jsonschema --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/[!c]*.yml
	$(SITE)/bin/check-jsonschema --builtin-schema vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(SITE)/bin/zizmor --offline --persona pedantic .github

release-versions: $(DONE)/venv ## versions agree everywhere, the changelog has a dated section for this one, and no guide calls it unreleased
	$(PY) scripts/release.py $(VERSION)

licences: target/release-tools/bin/cargo-deny ## licences, sources and doubles of the dependencies
	target/release-tools/bin/cargo-deny --locked check --hide-inclusion-graph bans licenses sources

# No part of `release-check`, which needs nothing but the registries; release.yml runs both.
advisories: target/release-tools/bin/cargo-deny ## known vulnerabilities of the dependencies, by RustSec's list, which is on GitHub
	target/release-tools/bin/cargo-deny --locked check --hide-inclusion-graph advisories

target/release-tools/bin/cargo-deny:
	$(CARGO) install --quiet --locked --root target/release-tools cargo-deny@0.20.2

# Elsewhere what needs it is skipped; a release whose public surface nobody looked at is none.
release-nightly:
	@[ -n "$(NIGHTLY)" ] || { echo 'error: a release needs a nightly toolchain, for the public names of the crate:' \
		'rustup toolchain install nightly' >&2; exit 1; }

# All of a release but the upload; .github/workflows/release.yml does the same and then uploads.
release-check: release-nightly release-versions lint-workflows licences test-api package site wheels-all ## all of a release but the upload
	@echo "release-check: $(VERSION) can be released; the wheels are in $(WHEELS_ALL)"
