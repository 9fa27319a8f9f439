"""What glibc does with the memory that a process has freed."""

import ctypes
import os
import platform
import subprocess
import sys
import threading
from unittest import mock

import pytest

from mlcn_jax import allocator

_GLIBC = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="has glibc keep memory")
_NOT_SET = pytest.mark.skipif(
    any(name.startswith(("GLIBC_TUNABLES", "MALLOC_")) for name in os.environ), reason="set elsewhere"
)
# Each step fills a block. Once, small ones empty the thread's cache, which then takes bytes beside the large one.
_BLOCKS = """
import ctypes, sys
from mlcn_jax import allocator

libc = ctypes.CDLL(None)
libc.aligned_alloc.restype, libc.aligned_alloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t] * 2
libc.free.argtypes, libc.memset.argtypes = [ctypes.c_void_p], [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
allocator.keep_memory()
size = 2**26
block = allocator.StepBlock(size)

def resident(field):
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(field)).split()[1])

before = resident("VmHWM")
for step in range(20):
    if sys.argv[1] == "watched":
        block.prepare()
    address = libc.aligned_alloc(64, size)
    libc.memset(address, 1, size)
    if not step:
        libc.aligned_alloc(64, 2**22)  # stays, as what the first step returns
    libc.free(address)
    if step == 5:
        for small in range(24, 120, 16):
            for _ in range(8):
                libc.aligned_alloc(16, small)
print((resident("VmHWM") - before) / size)
"""


@_GLIBC
@_NOT_SET
def test_the_block_of_a_step_is_held_once():
    def grown(how):
        done = subprocess.run([sys.executable, "-c", _BLOCKS, how], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return float(done.stdout)

    assert grown("watched") < 1.5
    if allocator._blocks_move():
        assert grown("unwatched") > 2  # or there is nothing to watch for


@pytest.mark.parametrize(("lanes", "calls"), [("mlcn2:w4*2,resnet:w1*1", 0), ("", 1)])
def test_only_capsnet_has_one_heap(monkeypatch, lanes, calls):
    mallopt = mock.Mock()
    monkeypatch.setattr(allocator, "_mallopt", mallopt)
    allocator.share_heaps(lanes)
    assert mallopt.call_count == calls


@_GLIBC
@_NOT_SET
def test_a_thread_takes_the_memory_that_it_has_freed():
    import resource

    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
    size, faults = 40 * 2**20, []  # two do not fit into one heap of a thread

    def work():
        first = libc.malloc(size)
        for _ in range(5):
            before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
            second = libc.malloc(size)
            libc.memset(second, 1, size)
            libc.free(second)
            faults.append(resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before)
        libc.free(first)

    allocator.keep_memory()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert max(faults[1:]) < 2000  # a page each time would be 10,240
