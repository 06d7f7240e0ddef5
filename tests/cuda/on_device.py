"""CUDA's driver by ctypes, for tests on a real device: copies, kernels, captures, and gates that hold a stream back."""

import ctypes
from typing import Any

import numpy as np

# `gate` spins until its word is not 0, or writes 2 there when its time is over; `next` writes each byte plus 1;
# `crash` accesses what it must not. The driver compiles this for the device that is there.
PTX = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry gate(.param .u64 word, .param .u64 nanoseconds)
{
    .reg .pred %p<3>;
    .reg .b32 %r<3>;
    .reg .b64 %d<6>;
    ld.param.u64 %d0, [word];
    ld.param.u64 %d1, [nanoseconds];
    mov.u64 %d2, %globaltimer;
again:
    ld.volatile.global.u32 %r0, [%d0];
    setp.ne.u32 %p0, %r0, 0;
    @%p0 bra opened;
    mov.u64 %d3, %globaltimer;
    sub.u64 %d4, %d3, %d2;
    setp.lt.u64 %p1, %d4, %d1;
    @%p1 bra again;
    mov.u32 %r1, 2;
    st.volatile.global.u32 [%d0], %r1;
opened:
    ret;
}
.visible .entry next(.param .u64 to, .param .u64 from, .param .u64 count)
{
    .reg .pred %p<2>;
    .reg .b16 %h<3>;
    .reg .b32 %r<6>;
    .reg .b64 %d<8>;
    ld.param.u64 %d0, [to];
    ld.param.u64 %d1, [from];
    ld.param.u64 %d2, [count];
    mov.u32 %r0, %ctaid.x;
    mov.u32 %r1, %ntid.x;
    mov.u32 %r2, %tid.x;
    mov.u32 %r3, %nctaid.x;
    mad.lo.u32 %r4, %r0, %r1, %r2;
    cvt.u64.u32 %d3, %r4;
    mul.wide.u32 %d4, %r1, %r3;
again:
    setp.ge.u64 %p0, %d3, %d2;
    @%p0 bra end;
    add.u64 %d5, %d1, %d3;
    add.u64 %d6, %d0, %d3;
    ld.global.u8 %h0, [%d5];
    add.u16 %h1, %h0, 1;
    st.global.u8 [%d6], %h1;
    add.u64 %d3, %d3, %d4;
    bra again;
end:
    ret;
}
.visible .entry crash()
{
    .reg .b32 %r<2>;
    .reg .b64 %d<2>;
    mov.u32 %r0, 1;
    mov.u64 %d0, 4096;
    st.global.u32 [%d0], %r0;
    ret;
}
"""
NON_BLOCKING, GLOBAL = 1, 0
WORDS = 1024
CLOSED, OPENED, OVER = 0, 1, 2


class CudaError(Exception):
    """A call of the driver that failed, and its code."""

    def __init__(self, name: str, code: int) -> None:
        super().__init__(f"{name} returned {code}")
        self.code = code


def address(array: np.ndarray) -> int:
    """Where an array's first element is."""
    return int(array.__array_interface__["data"][0])


class Gate:
    """Holds a stream back until it is opened. After some seconds it opens by itself, so that nothing hangs."""

    def __init__(self, word: ctypes.c_uint32) -> None:
        self._word = word

    def open(self) -> None:
        """Let the stream go on."""
        if self._word.value == CLOSED:
            self._word.value = OPENED

    def is_closed(self) -> bool:
        """Whether the stream is held back."""
        return self._word.value == CLOSED

    def is_over(self) -> bool:
        """Whether it opened by itself: somebody waited for the stream."""
        return self._word.value == OVER


class Device:
    """Device 0 in its primary context, which the libraries use too, or in a context of its own."""

    def __init__(self, *, own_context: bool = False) -> None:
        self._c = ctypes.CDLL("libcuda.so.1")
        self.context = ctypes.c_void_p()
        self("cuInit", 0)
        if own_context:
            self("cuCtxCreate_v2", ctypes.byref(self.context), 0, 0)
        else:
            self("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), 0)
        self.enter()
        module = ctypes.c_void_p()
        self("cuModuleLoadData", ctypes.byref(module), PTX)
        self._kernels = {}
        for name in ("gate", "next", "crash"):
            kernel = ctypes.c_void_p()
            self("cuModuleGetFunction", ctypes.byref(kernel), module, name.encode())
            self._kernels[name] = kernel
        words = ctypes.c_void_p()
        self("cuMemHostAlloc", ctypes.byref(words), ctypes.c_size_t(4 * WORDS), 3)
        self._words = (ctypes.c_uint32 * WORDS).from_address(words.value or 0)
        self._next = 0
        self._gates: list[Gate] = []
        self._streams: list[int] = []
        self._memory: list[int] = []
        self.gate(0).open()  # a kernel's first launch loads it, and may wait for the device
        self.next(self.allocate(1), self._memory[0], 1)
        self.rest()

    def __call__(self, name: str, *arguments: Any) -> None:
        code = getattr(self._c, name)(*arguments)
        if code:
            raise CudaError(name, code)

    def enter(self) -> None:
        """Makes the context this thread's."""
        self("cuCtxSetCurrent", self.context)

    def stream(self, flags: int = NON_BLOCKING) -> int:
        """A new stream."""
        made = ctypes.c_void_p()
        self("cuStreamCreate", ctypes.byref(made), flags)
        self._streams.append(made.value or 0)
        return self._streams[-1]

    def launch(self, kernel: str, stream: int, *arguments: int, blocks: int = 1, threads: int = 1) -> None:
        """Queues a kernel, whose arguments are all of 64 bits."""
        values = [ctypes.c_uint64(argument) for argument in arguments]
        places = (ctypes.c_void_p * max(1, len(values)))(*(ctypes.addressof(value) for value in values))
        grid = (blocks, 1, 1, threads, 1, 1)
        self("cuLaunchKernel", self._kernels[kernel], *grid, 0, ctypes.c_void_p(stream), places, None)

    def gate(self, stream: int, seconds: float = 5.0) -> Gate:
        """Holds a stream back from here on."""
        word = ctypes.c_uint32.from_buffer(self._words, 4 * (self._next % WORDS))
        self._next += 1
        word.value = CLOSED
        self.launch("gate", stream, ctypes.addressof(word), int(seconds * 1e9))
        self._gates.append(Gate(word))
        return self._gates[-1]

    def next(self, to: int, source: int, count: int, stream: int = 0) -> None:
        """Queues a kernel that writes each byte plus 1."""
        self.launch("next", stream, to, source, count, blocks=128, threads=256)

    def allocate(self, size_bytes: int) -> int:
        """Memory of the device, until `rest`."""
        found = ctypes.c_uint64()
        self("cuMemAlloc_v2", ctypes.byref(found), ctypes.c_size_t(size_bytes))
        self._memory.append(found.value)
        return found.value

    def filled(self, size_bytes: int, value: int) -> int:
        """Memory of the device with a value in each byte."""
        place = self.allocate(size_bytes)
        self("cuMemsetD8_v2", ctypes.c_uint64(place), value, ctypes.c_size_t(size_bytes))
        self.wait()
        return place

    def to_device(self, place: int, array: np.ndarray, stream: int) -> None:
        """Queues a copy."""
        self("cuMemcpyHtoDAsync_v2", ctypes.c_uint64(place), ctypes.c_void_p(address(array)),
             ctypes.c_size_t(array.nbytes), ctypes.c_void_p(stream))  # fmt: skip

    def from_device(self, array: np.ndarray, place: int, stream: int) -> None:
        """Queues a copy."""
        self("cuMemcpyDtoHAsync_v2", ctypes.c_void_p(address(array)), ctypes.c_uint64(place),
             ctypes.c_size_t(array.nbytes), ctypes.c_void_p(stream))  # fmt: skip

    def copy(self, to: int, source: int, size_bytes: int, stream: int) -> None:
        """Queues a copy between any two addresses."""
        self("cuMemcpyAsync", ctypes.c_uint64(to), ctypes.c_uint64(source), ctypes.c_size_t(size_bytes),
             ctypes.c_void_p(stream))  # fmt: skip

    def bytes_at(self, place: int, count: int) -> np.ndarray:
        """What is in the device's memory; waits for its default stream."""
        found = np.empty(count, np.uint8)
        self("cuMemcpyDtoH_v2", ctypes.c_void_p(address(found)), ctypes.c_uint64(place), ctypes.c_size_t(count))
        return found

    def wait(self, stream: int | None = None) -> None:
        """Waits for a stream, or for all."""
        if stream is None:
            self("cuCtxSynchronize")
        else:
            self("cuStreamSynchronize", ctypes.c_void_p(stream))

    def begin_capture(self, stream: int) -> None:
        """The stream captures a graph from here on."""
        self("cuStreamBeginCapture_v2", ctypes.c_void_p(stream), GLOBAL)

    def end_capture(self, stream: int) -> ctypes.c_void_p:
        """The graph, ready to be launched."""
        graph, ready = ctypes.c_void_p(), ctypes.c_void_p()
        self("cuStreamEndCapture", ctypes.c_void_p(stream), ctypes.byref(graph))
        self("cuGraphInstantiateWithFlags", ctypes.byref(ready), graph, ctypes.c_uint64(0))
        return ready

    def has_context(self) -> bool:
        """Whether the device's primary context is there."""
        flags, is_there = ctypes.c_uint(), ctypes.c_int()
        self("cuDevicePrimaryCtxGetState", 0, ctypes.byref(flags), ctypes.byref(is_there))
        return bool(is_there.value)

    def end(self) -> None:
        """Ends a context of its own."""
        self("cuCtxDestroy_v2", self.context)

    @staticmethod
    def handle(stream: int) -> ctypes.c_void_p:
        """As the driver takes a stream."""
        return ctypes.c_void_p(stream)

    def open_gates(self) -> None:
        """Opens what a test left closed."""
        for gate in self._gates:
            gate.open()
        self._gates.clear()

    def rest(self) -> None:
        """Waits for all, and frees what was made."""
        self.enter()
        self.wait()
        for place in self._memory:
            self("cuMemFree_v2", ctypes.c_uint64(place))
        for stream in self._streams:
            self("cuStreamDestroy_v2", ctypes.c_void_p(stream))
        self._memory.clear()
        self._streams.clear()
