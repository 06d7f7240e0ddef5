"""docs/c.md, held to the compiler: each piece of C in it is compiled as it stands, and the modules are run."""

import re
from pathlib import Path

import c_extensions
import documents
import numpy as np
import pytest

import ctxalloc

pytestmark = pytest.mark.skipif(not c_extensions.compiler(), reason="there is no C compiler")

GUIDE = Path(__file__).parents[2] / "docs" / "c.md"
BLOCKS = [block.text for block in documents.blocks(GUIDE.read_text()) if block.language == "c"]
MODULES = {name: text for text in BLOCKS for name in re.findall(r"PyInit_(\w+)", text)}


def test_every_piece_of_c_is_a_module_or_a_program() -> None:
    assert set(MODULES) == {"mine", "ported"}
    assert sum("int main(" in text for text in BLOCKS) == len(BLOCKS) - len(MODULES) == 1


@pytest.mark.parametrize("text", [text for text in BLOCKS if "int main(" in text])
def test_a_program_compiles_as_it_stands(text: str) -> None:
    c_extensions.compile_text(text, with_python=False)


def test_the_module_registers_and_selects() -> None:
    module = c_extensions.built_from("mine", MODULES["mine"])
    assert module.select() == "default_allocator"
    try:
        assert ctxalloc.current().name == "mine"
        array = np.zeros(1000)
        array.resize(5000, refcheck=False)
        assert not array.any()
        assert module.select() == "mine"
    finally:
        ctxalloc.set_handler(None)
    assert ctxalloc.handler_of(array) is ctxalloc.handler("mine")
    assert ctxalloc.handler("mine").alignment == 16


def test_the_ported_draft_selects_and_puts_back() -> None:
    module = c_extensions.built_from("ported", MODULES["ported"])
    with ctxalloc.use("pool"):
        assert module.begin() == "secret"
        array = np.ones(1000)
        assert module.end() is None
        assert ctxalloc.current().name == "pool"
    assert ctxalloc.handler_of(array) is ctxalloc.handler("secret")
