"""What this machine is: its cores, memory, devices and versions, and where compiled programs are kept."""

import ctypes
import hashlib
import importlib.metadata
import os
import platform
import resource
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import jax

if TYPE_CHECKING:
    pass

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


def environment() -> dict:
    """Device and versions, to stand beside every measured figure."""
    device = jax.local_devices()[0]
    return {
        "device": name_of(device),
        "platform": device.platform,
        "num_devices": jax.device_count(),
        "cpu_count": num_cores(),
        "versions": {
            "python": platform.python_version(),
            **{package: importlib.metadata.version(package) for package in _PACKAGES},
        },
    }


def name_of(device: jax.Device) -> str:
    """Which hardware it is, such as `NVIDIA H200` or a CPU's model."""
    return _cpu_model() if device.platform == "cpu" else device.device_kind


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def usable_memory_bytes() -> int:
    """Memory for programs: of the accelerator, or the share of the machine's that belongs to this process's cores."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"])
    return _machine_memory_bytes() * num_cores() // (os.cpu_count() or 1)


def total_memory_bytes() -> int:
    """All memory for programs: of every accelerator of the run, or of this machine."""
    stats = [device.memory_stats() for device in jax.local_devices()]
    if all(found and "bytes_limit" in found for found in stats):
        return jax.process_count() * sum(int(found["bytes_limit"]) for found in stats if found)
    return jax.process_count() * _machine_memory_bytes()


def _machine_memory_bytes() -> int:
    """Physical memory, or less where the container that this process runs in has a limit."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        return min(memory, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):
        return memory


def peak_memory_bytes() -> int:
    """Most memory held so far: of the accelerator where it counts it, of this process otherwise."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "peak_bytes_in_use" in stats:
        return int(stats["peak_bytes_in_use"])
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def return_unused_memory() -> None:
    """Gives memory that the C library holds but does not use back to the system, where the library can.

    Compiling a training step takes hundreds of MiB that nothing needs afterwards.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, musl does not
        if trim is not None:
            trim(0)


def keep_compiled_programs(least_seconds: float = 1.0) -> Path | None:
    """Keeps programs that took so long to compile in a folder between runs, where that is safe; returns the folder.

    A program compiled for one CPU can crash on another, so the folder's name holds a digest of this CPU's
    features; where they cannot be read (other systems than Linux), programs for the CPU are not kept.
    `JAX_COMPILATION_CACHE_DIR`, where set, is left to decide.
    """
    jax.config.update("jax_persistent_cache_min_compile_time_secs", least_seconds)
    if os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return Path(os.environ["JAX_COMPILATION_CACHE_DIR"])
    features = _cpu_features()
    if jax.default_backend() == "cpu" and not features:
        return None
    root = Path(os.environ.get("MLCN_JAX_CACHE", Path.home() / ".cache" / "mlcn_jax"))
    folder = root / f"compiled-{cpu_digest()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    return folder


def cpu_digest() -> str:
    """12 hexadecimal digits of a kind of CPU: programs for one may crash on another, or round otherwise."""
    return hashlib.sha256(f"{platform.machine()} {_cpu_features()}".encode()).hexdigest()[:12]


def _cpu_features() -> str:
    return _cpuinfo("flags") or _cpuinfo("Features")


def _cpu_model() -> str:
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def _cpuinfo(field: str) -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(field)), "")
