"""What a user of dpctl expects of an array: it is there, or the error says what to do instead."""

import copy
import pickle
from typing import Any

import dpctl
import dpnp
import numpy as np
import pytest

import ctxalloc
from ctxalloc import usm


def test_it_has_the_names_that_dpctls_arrays_have(kind: str) -> None:
    array, theirs = usm.zeros((2, 3), np.float32, kind=kind), dpnp.zeros((2, 3), dtype=np.float32, usm_type=kind)
    for name in ("shape", "dtype", "ndim", "size", "nbytes", "itemsize", "usm_type", "sycl_device"):
        assert getattr(array, name) == getattr(theirs, name), name
    assert type(array.usm_type) is str
    assert array.sycl_context == array.sycl_queue.sycl_context
    assert array.sycl_queue.sycl_device == dpctl.SyclDevice()


@pytest.mark.parametrize(
    "key", [..., 1, (0, 2), (slice(None), slice(None, None, 2)), slice(None, None, -1), slice(0, 0)]
)
def test_item_assignment_is_numpys(kind: str, key: Any) -> None:
    values = np.arange(12).reshape(3, 4)
    array = usm.asarray(values, kind=kind)
    for value in (7, np.array(9), 2.5, np.float32(3), usm.asarray(5), usm.zeros((), kind="device"), True):
        values[key] = value.asnumpy() if isinstance(value, usm.Array) else value
        array[key] = value
        assert np.array_equal(array.asnumpy(), values)
    part = values[key] + 1
    values[key] = part
    array[key] = usm.asarray(part, kind=kind)
    assert np.array_equal(array.asnumpy(), values)
    if part.size:
        array[key] = part.tolist()
        assert np.array_equal(array.asnumpy(), values)


def test_an_assignment_that_cannot_be_is_an_error(kind: str) -> None:
    array = usm.zeros((3, 4), np.uint8, kind=kind)
    with pytest.raises(ValueError, match="could not broadcast"):
        array[:2] = [1, 2, 3]
    with pytest.raises(IndexError, match="an int, a slice"):
        array[[0, 1]] = 1
    with pytest.raises((ValueError, OverflowError)):
        array[0] = 300
    host = np.zeros(3)
    host.flags.writeable = False
    readonly = usm.asarray(OnHost(host))
    with pytest.raises(ValueError, match="read-only"):
        readonly[0] = 1


class OnHost:
    """Read-only USM."""

    def __init__(self, values: np.ndarray) -> None:
        self.array = usm.asarray(values)
        interface = self.array.__sycl_usm_array_interface__
        self.__sycl_usm_array_interface__ = interface | {"data": (interface["data"][0], True)}


@pytest.mark.parametrize("shape", [(24,), 24, (4, 6), (2, -1, 2), (-1,), (1, 24, 1), [3, 8]])
def test_reshape_is_a_view(kind: str, shape: Any) -> None:
    values = np.arange(24).reshape(2, 3, 4)
    array = usm.asarray(values, kind=kind)
    for view in (array.reshape(shape), array.reshape(*shape) if isinstance(shape, tuple) else array.reshape(shape)):
        assert view.address == array.address
        assert np.array_equal(view.asnumpy(), values.reshape(shape))
    assert np.array_equal(array[:, :, ::2].reshape(2, 3, 2, 1).asnumpy(), values[:, :, ::2, None])
    assert usm.zeros((0, 3)).reshape(0).shape == (0,)


def test_a_reshape_that_needs_a_copy_says_so(kind: str) -> None:
    array = usm.zeros((3, 4), kind=kind)
    with pytest.raises(ValueError, match=r"only in a copy: copy_to\(\)\.reshape"):
        array.T.reshape(12)
    assert array.T.copy_to().reshape(12).shape == (12,)
    for shape in (5, (5, -1), (-1, -1), (3, 5), (-2, 6), "x"):
        with pytest.raises(ValueError, match=r"is no shape|have no shape"):
            array.reshape(shape)


def test_what_computes_is_refused_and_says_what_to_do() -> None:
    array = usm.zeros(3)
    for ask in (lambda: array == array, lambda: array != 1, lambda: 1 == array, lambda: array in [usm.zeros(3), 1]):  # noqa: PLR0124, SIM300
        with pytest.raises(TypeError, match=r"computes nothing; compare dpnp\.asarray"):
            ask()
    with pytest.raises(TypeError, match="the truth of"):
        bool(array)
    with pytest.raises(TypeError, match="unhashable"):
        hash(array)
    with pytest.raises(TypeError, match="unsupported operand"):
        array + 1


def test_pickling_is_refused_and_copying_copies(kind: str) -> None:
    array = usm.asarray(np.arange(4), kind=kind)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        with pytest.raises(TypeError, match=r"cannot be pickled.*pickle array\.asnumpy"):
            pickle.dumps(array, protocol)
    for made in (copy.copy(array), copy.deepcopy(array), copy.deepcopy([array])[0]):
        assert made.address != array.address
        assert (made.kind, made.asnumpy().tolist()) == (kind, [0, 1, 2, 3])


def test_more_axes_than_numpy_has_are_refused() -> None:
    assert usm.zeros((1,) * 64).ndim == 64
    with pytest.raises(ValueError, match=r"65 axes is too long.*at most 64"):
        usm.empty((1,) * 65)
    with pytest.raises(ValueError, match=r"65 axes is too long.*at most 64"):
        usm.zeros(1).reshape((1,) * 65)
    with pytest.raises(IndexError, match="64"):
        usm.zeros((1,) * 64)[None]


@pytest.mark.parametrize("dtype", [np.longdouble, np.clongdouble])
def test_long_doubles_are_refused(dtype: Any) -> None:
    with usm.use():
        host = np.zeros(3, dtype)
    for ask in (lambda: usm.empty(3, dtype), lambda: usm.asarray(host), lambda: usm.export(host)):
        with pytest.raises(TypeError, match="floats of at most 64 bits"):
            ask()


def test_memory_of_another_context_is_named_so() -> None:
    device = dpctl.SyclDevice()
    apart = dpctl.SyclQueue(dpctl.SyclContext([device, *device.create_sub_devices(partition=1)]), device)
    with usm.use():
        array = np.zeros(3)
    assert ctxalloc.handler_of(array) is ctxalloc.handler("usm_shared")
    with pytest.raises(ValueError, match="in 'shared' USM of another context than that of queue="):
        usm.export(array, queue=apart)
    assert usm.export(array, queue=apart, copy=True).sycl_queue == apart
