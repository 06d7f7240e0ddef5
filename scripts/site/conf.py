"""Sphinx's settings for the site. `build.py` makes the pages that it reads, and says where they are."""

import functools
import inspect
import re
from pathlib import Path

import stubs

import ctxalloc

project = "ctxalloc"
author = "The ctxalloc contributors"
release = version = ctxalloc.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton"]

html_theme = "furo"
html_show_copyright = False
html_title = f"ctxalloc {release}"
html_static_path = [str(Path(__file__).with_name("static"))]
html_css_files = ["site.css"]
html_search_scorer = str(Path(__file__).with_name("scorer.js"))
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {"navigation_with_keys": True}

# As GitHub makes them: the guides link to headings.
myst_heading_anchors = 4
myst_enable_extensions = ["smartquotes"]
highlight_language = "default"  # examples of docstrings are Python, and what is none is left plain
copybutton_exclude = ".linenos, .gp, .go"
# ">>> " and "... " of examples are not copied.
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_class_signature = "mixed"
python_maximum_signature_line_length = 88
toc_object_entries_show_parents = "hide"

# pyo3's functions know the names of their parameters; the types are in the stubs.
STUBS = stubs.read(Path(ctxalloc.__file__).with_name("_native.pyi"))


# What a module says to those who change it: which other files it has to do with.
NEIGHBOURS = re.compile(r"\s*Neighbours:.*?(?:(?=docs/[\w-]+\.md is the guide)|\Z)", re.DOTALL)
GUIDE = re.compile(r"[.;]?\s*docs/([\w-]+)\.md is the guide")
PRIVATE_TYPE = re.compile(r"\b_(?=[A-Z])")

read_module = functools.cache(stubs.read)


def signature(_app, _what, name, found, _options, arguments, returned):
    native = STUBS.get(stubs.unqualified(name)) or in_source(found)
    return native.signature if native and native.signature else (arguments, returned)


def in_source(found):
    """What the module that defines it says of it, with the names of types that are its own shown as public ones."""
    try:
        path = Path(inspect.getsourcefile(found))
    except TypeError:  # a value, or what C has made
        return None
    name = getattr(found, "__qualname__", "")
    native = read_module(path).get(name) if path.is_relative_to(Path(ctxalloc.__file__).parent) else None
    if native is None or native.signature is None:
        return None
    return native._replace(signature=tuple(part and PRIVATE_TYPE.sub("", part) for part in native.signature))


def for_readers(_app, what, _name, _object, _options, lines):
    if what == "module":
        paragraphs = "\n".join(lines).split("\n\n")
        kept = (NEIGHBOURS.sub("", paragraph) for paragraph in paragraphs)
        lines[:] = GUIDE.sub(r". The guide is :doc:`/\1`", "\n\n".join(kept)).splitlines()


def add_type(_app, what, name, _object, _options, lines):
    native = STUBS.get(stubs.unqualified(name))
    if what in ("attribute", "property") and native and native.type:
        lines += ["", f":type: {native.type}"]


def hide(_app, _what, name, found, skip, _options):
    """What has no underscore but is another library's: not ours to explain."""
    module = getattr(found, "__module__", None) or ""
    if inspect.isroutine(found) and module and not module.startswith(("ctxalloc", "builtins")):
        return True
    return True if name.startswith("_") and name != "__version__" else skip


def setup(app):
    app.connect("autodoc-process-signature", signature)
    app.connect("autodoc-process-docstring", add_type)
    app.connect("autodoc-process-docstring", for_readers)
    app.connect("autodoc-skip-member", hide)
