"""How the C library holds the memory of training steps on a CPU."""

import ctypes
import os
import platform
import sys

_MMAP_MAX, _TOP_PAD, _TRIM_THRESHOLD, _ARENA_MAX = -4, -2, -1, -8  # of malloc.h
_HEAP_BYTES = 2**26  # how far glibc's heaps of threads grow; one that is wholly free is kept if the pad is as large
_ALIGNMENT = 64  # of XLA's buffers on a CPU
_LEAST_BLOCK = 2**24  # bytes; a smaller one may be held twice
_MOST_MOVES = 16  # each costs a step's page faults; then blocks are no longer watched
_kept = False


def keep_memory() -> None:
    """Lets glibc keep the memory that this process has freed for the buffers of the next step.

    XLA allocates the buffers of a step on a CPU anew and frees them after it. By default glibc gives large ones back to
    the system each time, and page faults then take up to half of a step (`benchmarks/allocator.py`). Call it before JAX
    computes. It does nothing with another C library, or if `GLIBC_TUNABLES` or a `MALLOC_` variable is set.
    """
    global _kept
    _kept = _mallopt(_MMAP_MAX, 0) and _mallopt(_TRIM_THRESHOLD, -1) and _mallopt(_TOP_PAD, _HEAP_BYTES)


def share_heaps(lanes: str) -> None:
    """Has the threads of a step on a CPU take memory from one heap of glibc if there are no lanes, as in `model.lanes`.

    Threads that share a heap wait for each other where they allocate often, as XLA's 3x3 convolutions do for each of
    their blocks, so that a step of residual lanes can take longer with one heap. But only the first heap keeps blocks
    of over 64 MiB, such as CapsNet's, whose step takes longer with several (`benchmarks/allocator.py`). Call it before
    JAX looks for its devices, which starts its threads. It does nothing where `keep_memory` does nothing.
    """
    if not lanes:
        _mallopt(_ARENA_MAX, 1)


def return_unused_memory() -> None:
    """Returns unused memory held by the C library to the operating system, if the library supports it.

    Compiling a training step takes hundreds of MiB that are not needed afterwards.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, musl does not
        if trim is not None:
            trim(0)


class StepBlock:
    """The block of temporary buffers that XLA allocates anew for each step on a CPU, and that is to be held only once.

    Before version 2.39, glibc's `memalign` gives the bytes to spare beside a block to a cache of the thread, where they
    are not joined with it again when it is freed (its bug 30723). Now and then the free block is too small for the next
    step by these few bytes. That step then gets another one, while the pages of the first stay with the process.

    Args:
      num_bytes: size of the block, the `temp_size_in_bytes` of the compiled step.
    """

    def __init__(self, num_bytes: int):
        self._num_bytes, self._address, self._moves = num_bytes, None, 0
        self._watches = _kept and num_bytes >= _LEAST_BLOCK and _blocks_move()

    def prepare(self) -> None:
        """Returns the pages of the last step's block if the next step will have another one.

        Call it right before a step, in the thread that starts it. It does nothing where `keep_memory` does nothing.
        """
        if not self._watches:
            return
        libc = ctypes.CDLL(None)
        libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
        libc.aligned_alloc.restype, libc.aligned_alloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t] * 2
        libc.free.argtypes = [ctypes.c_void_p]
        for _ in range(2):  # the first may itself leave bytes in the cache
            address = libc.aligned_alloc(_ALIGNMENT, self._num_bytes)
            if address != self._address:
                return_unused_memory()
                if self._address is not None:
                    # Never written to nor freed: steps would otherwise change between this block and the last one.
                    libc.malloc(self._num_bytes // 2)
                    self._moves += 1
                self._address = address
            libc.free(address)
        self._watches = self._moves < _MOST_MOVES


def _mallopt(parameter: int, value: int) -> bool:
    """Whether glibc is there, is not set by the user, and took the value."""
    if sys.platform == "linux" and not any(name.startswith(("GLIBC_TUNABLES", "MALLOC_")) for name in os.environ):
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        return mallopt is not None and mallopt(parameter, value) == 1
    return False


def _blocks_move() -> bool:
    """Whether this glibc has the bug that `StepBlock` is for."""
    name, version = platform.libc_ver()
    return name == "glibc" and tuple(int(part) for part in version.split(".")) < (2, 39)
