"""Whatever C code hands over, by the table of `ctxalloc.h`: an answer or an error that says why, and never a crash.

Random structs, names, addresses, sizes and copies against a model of a few lines. `test_foreign_bytes.py` runs it in a
process of its own, which it fills with handlers; by hand: `python tests/python/foreign_bytes.py 10000`.
"""

import contextlib
import ctypes
import sys
from typing import Any

import numpy as np
import numpy_c
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ctxalloc

EXAMPLES = int(sys.argv[1]) if __name__ == "__main__" and len(sys.argv) > 1 else 100  # of each check

_P, _N, _S, _I = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_int
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "error_code": (_I,),
    "error_message": (_S,),
    "clear_error": (None,),
    "register": (_P, _P, _P),
    "find": (_P, _S),
    "default_handler": (_P,),
    "set_handler": (_P, _P),
    "get_handler": (_P,),
    "handler_name": (_S, _P),
    "handler_version": (_I, _P),
    "handler_alignment": (_N, _P),
    "draft1_set_handler": (_P, _P),
    "draft1_get_handler_name": (_S, _P),
    "draft2_set_handler": (_P, _P),
    "draft2_get_handler_name": (_S, _P),
    "set_event_hook": (_P, _P, _P, _P),
    "new": (_P, _N),
    "new_zeroed": (_P, _N, _N),
    "renew": (_P, _P, _N),
    "free": (_I, _P),
    "block_handler": (_P, _P),
    "copy_in": (_I, _P, _P, _N),
    "copy_out": (_I, _P, _P, _N),
    "copy": (_I, _P, _P, _N),
}


class Api:
    """`ctxalloc_api` of the header, its functions by their names there."""

    def __init__(self) -> None:
        # The name in the capsule is whatever it is called there: asked for, not known.
        name = ctypes.pythonapi.PyCapsule_GetName
        name.restype, name.argtypes = ctypes.c_char_p, [ctypes.py_object]
        table = numpy_c._get_pointer(ctxalloc._C_API, name(ctxalloc._C_API))
        # Two 32-bit numbers and the version's text come first.
        addresses = ctypes.cast(table + 16, ctypes.POINTER(ctypes.c_void_p))
        for number, (function, (result, *arguments)) in enumerate(_FUNCTIONS.items()):
            setattr(self, function, ctypes.PYFUNCTYPE(result, *arguments)(addresses[number]))

    def __getattr__(self, function: str) -> Any:
        raise AttributeError(function)

    def refused(self) -> bool:
        """Whether the last call failed; then it must say why, in UTF-8."""
        code, message = self.error_code(), self.error_message().decode()
        assert (code == 0) == (message == ""), (code, message)
        assert code in {0, 1, 2, 3}, (code, message)
        return code != 0


API = Api()
_FUNCTION_NAMES = ("malloc", "calloc", "realloc", "free")
_working = numpy_c.ForeignHandler("working").functions
_kept: list[Any] = []  # structs that entered the table

names = st.one_of(
    st.binary(max_size=127),
    st.text(max_size=130).map(lambda text: text.encode("utf-8", "surrogatepass")),
    st.sampled_from([b"pool", b"system", "鵜".encode() * 42, b"x" * 126, b"x" * 127, b"\xff\xfe", b"a\0b"]),
)
# Where something may be: nowhere, at odd places, in memory that is no block.
_memory = np.zeros(4096, np.uint8)
addresses = st.one_of(
    st.integers(0, 4096),
    st.integers(0, (1 << 64) - 1),
    st.integers(0, 4095).map(lambda offset: numpy_c.address_of(_memory) + offset),
)
sizes = st.one_of(
    st.integers(0, 5000), st.integers(0, 40).map(lambda power: 1 << power), st.integers((1 << 62), (1 << 64) - 1)
)
fuzzed = settings(
    max_examples=EXAMPLES, deadline=None, database=None, print_blob=True, suppress_health_check=list(HealthCheck)
)


def struct_of(name: bytes, version: int, missing: set[str]) -> numpy_c.HandlerStruct:
    struct = numpy_c.HandlerStruct(version=version)
    ctypes.memmove(ctypes.addressof(struct), name[:127], min(len(name), 127))  # not terminated, if it has 127 bytes
    for function in _FUNCTION_NAMES:
        if function not in missing:
            setattr(struct.allocator, function, _working[function])
    return struct


def name_in(struct: numpy_c.HandlerStruct) -> str | None:
    """The name as C reads it; None where it cannot be one."""
    raw = ctypes.string_at(ctypes.addressof(struct), 127)
    with contextlib.suppress(UnicodeDecodeError):
        return raw[: raw.index(0)].decode() if 0 in raw else None
    return None


any_text = st.text(st.characters(exclude_categories=()), max_size=140)  # lone surrogates too
missing_functions = st.one_of(st.just(set()), st.sets(st.sampled_from(_FUNCTION_NAMES)))
versions = st.one_of(st.just(1), st.integers(0, 255))


@fuzzed
@given(name=names, version=versions, missing=missing_functions)
def check_register(name: bytes, version: int, missing: set[str]) -> None:
    struct = struct_of(name, version, missing)
    known = {handler.name for handler in ctxalloc.handlers()}
    meant = name_in(struct)
    good = version == 1 and not missing and bool(meant) and meant not in known
    c_struct = API.register(ctypes.addressof(struct), None)
    assert (c_struct is not None) is good is not API.refused(), (name, version, missing, API.error_message())
    if good:
        _kept.append(struct)
        assert c_struct == ctypes.addressof(struct)
        assert API.handler_name(c_struct).decode() == meant
        assert API.find(API.handler_name(c_struct)) == c_struct
        assert API.register(c_struct, None) == c_struct
    else:
        assert {handler.name for handler in ctxalloc.handlers()} == known


@fuzzed
@given(name=names, version=versions, missing=missing_functions, asked=st.none() | any_text)
def check_adopt(name: bytes, version: int, missing: set[str], asked: str | None) -> None:
    struct = struct_of(name, version, missing)
    known = {handler.name for handler in ctxalloc.handlers()}
    capsule = numpy_c.capsule_around(ctypes.addressof(struct))
    try:
        handler = ctxalloc.adopt(capsule, name=asked)
    except ValueError:
        assert {handler.name for handler in ctxalloc.handlers()} == known
    else:
        _kept.append((struct, capsule))
        assert not missing
        assert handler.version == version  # reported, not judged
        assert handler.name == (asked if asked is not None else name_in(struct))
        assert ctxalloc.handler(handler.name) is handler


@fuzzed
@given(name=names)
def check_find(name: bytes) -> None:
    if b"\0" in name:
        name = name[: name.index(0)]
    known = {handler.name.encode() for handler in ctxalloc.handlers()}
    assert (API.find(name) is not None) is (name in known) is not API.refused()
    with contextlib.suppress(UnicodeDecodeError):
        text = name.decode()
        try:
            assert ctxalloc.handler(text).name == text
        except ctxalloc.UnknownHandlerError:
            assert name not in known


@fuzzed
@given(address=addresses.filter(lambda address: address != 0))
def check_addresses_that_are_no_handler(address: int) -> None:
    before = API.get_handler()
    assert (API.handler_name(address), API.refused()) == (None, True)
    assert (API.handler_version(address), API.refused()) == (-1, True)
    assert (API.handler_alignment(address), API.refused()) == (0, True)
    assert (API.set_handler(address), API.refused()) == (None, True)
    assert API.get_handler() == before


@fuzzed
@given(address=addresses.filter(lambda address: address != 0), size=sizes)
def check_addresses_that_are_no_block(address: int, size: int) -> None:
    assert (API.free(address), API.refused()) == (-1, True)
    assert (API.renew(address, size), API.refused()) == (None, True)
    assert (API.block_handler(address), API.refused()) == (None, True)
    assert (API.copy_in(address, address, max(size, 1)), API.refused()) == (-1, True)
    assert (API.copy_out(address, address, max(size, 1)), API.refused()) == (-1, True)
    assert (API.copy(address, address, max(size, 1)), API.refused()) == (-1, True)


steps = st.lists(
    st.tuples(
        st.sampled_from(["new", "new_zeroed", "renew", "free", "copy_in", "copy_out", "copy"]),
        st.integers(0, 1 << 30),
        st.integers(0, 1 << 30),
        sizes,
        st.sampled_from(["system", "aligned64", "pool", "tracked", "default_allocator"]),
    ),
    max_size=40,
)


@fuzzed
@given(steps=steps)
def check_blocks(steps: list[tuple[str, int, int, int, str]]) -> None:
    """Blocks of any size keep their bytes; what leads past an end is refused, and changes nothing."""
    live: dict[int, bytes] = {}
    host = ctypes.create_string_buffer(bytes(range(251)) * 30, 251 * 30)

    def chosen(number: int) -> int:
        return list(live)[number % len(live)]

    def bytes_of(block: int) -> bytes:
        return ctypes.string_at(block, len(live[block]))

    def enters(block: int | None, size: int, start: bytes) -> None:
        assert (block is None) is API.refused()
        assert block is not None or size > 5000, f"{size} bytes were refused: {API.error_message()}"
        if block is None:
            return
        if size > 1 << 20:  # large ones are there, and go: no model of each
            assert API.free(block) == 0
            return
        assert block not in live
        ctypes.memmove(block + len(start), host, max(0, min(size, len(host)) - len(start)))
        live[block] = start + host.raw[: max(0, min(size, len(host)) - len(start))]
        assert bytes_of(block) == live[block]

    for what, which, other, size, handler in steps:
        with ctxalloc.use(handler):
            if what == "new":
                enters(API.new(size), size, b"")
            elif what == "new_zeroed":
                nelem = which % 7
                enters(API.new_zeroed(nelem, size), nelem * size, b"")
            elif not live:
                continue
            elif what == "renew":
                block = chosen(which)
                old = live[block]
                moved = API.renew(block, size)
                if moved is None:
                    assert API.refused()
                    assert bytes_of(block) == old
                else:
                    del live[block]
                    enters(moved, size, b"") if size > 1 << 20 else enters(moved, size, old[:size])
            elif what == "free":
                block = chosen(which)
                del live[block]
                assert API.free(block) == 0
            else:
                block, second = chosen(which), chosen(other)
                length = len(live[block])
                at, count = which % (length + 1), min(size, len(host))
                fits = at + count <= length
                if what == "copy_in":
                    status = API.copy_in(block + at, host, count)
                elif what == "copy_out":
                    scratch = ctypes.create_string_buffer(len(host))
                    status = API.copy_out(scratch, block + at, count)
                    assert status != 0 or scratch.raw[:count] == live[block][at : at + count] or not fits
                else:
                    status = API.copy(block + at, second, min(count, len(live[second])))
                assert (status == 0) is not API.refused()
                if fits and what != "copy":
                    assert status == 0, API.error_message()
                live[block] = bytes_of(block)  # what was copied in, by the functions themselves
    for block, content in live.items():
        assert bytes_of(block) == content
        assert API.free(block) == 0


def main() -> None:
    """Each check."""
    for name, check in list(globals().items()):
        if name.startswith("check_"):
            check()
    print("no crash")


if __name__ == "__main__":
    main()
