"""This machine's cores, memory, devices and versions, and where compiled programs are cached."""

import datetime
import hashlib
import importlib.metadata
import os
import platform
import resource
import sys
import time
from pathlib import Path

import jax

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


def environment() -> dict:
    """Device and versions, recorded with every measurement."""
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
    """The name of the hardware, such as `NVIDIA H200` or a CPU's model."""
    return _cpu_model() if device.platform == "cpu" else device.device_kind


def cores() -> list[int]:
    """Numbers of the cores that this process may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def num_cores() -> int:
    """How many cores this process may use."""
    return len(cores())


def num_threads() -> int:
    """How many threads compute in this process: as the variable `PJRT_NPROC` says, which XLA reads, or one a core."""
    given = os.environ.get("PJRT_NPROC", "")
    return max(1, int(given)) if given.isdecimal() else num_cores()


def busy_cores(seconds: float = 1.0) -> float | None:
    """How many cores of this machine are busy on average while this process sleeps; None where Linux does not tell.

    What is timed beside other work takes longer than it should, so measurements keep this number.
    """

    def idle() -> float:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
        return (int(fields[3]) + int(fields[4])) / os.sysconf("SC_CLK_TCK")  # idle, and waiting for disks

    try:
        before, started = idle(), time.monotonic()
        time.sleep(seconds)
        return max(0.0, (os.cpu_count() or 1) - (idle() - before) / (time.monotonic() - started))
    except (OSError, ValueError, IndexError):
        return None


def usable_memory_bytes() -> int:
    """Memory for programs: the accelerator's, or a share of the machine's in proportion to this process's cores.

    The limit of a container belongs to its cores, and is not shared out again.
    """
    limit = device_memory_bytes()
    if limit is not None:
        return limit
    return min(_physical_memory_bytes() * num_cores() // (os.cpu_count() or 1), machine_memory_bytes())


def device_memory_bytes(device: jax.Device | None = None) -> int | None:
    """Memory for programs of a device, by default this process's first, if it states a limit, as accelerators do."""
    stats = (device or jax.local_devices()[0]).memory_stats()
    return int(stats["bytes_limit"]) if stats and "bytes_limit" in stats else None


def total_memory_bytes() -> int:
    """Total memory for programs, of every accelerator in the run, or of as many machines like this as processes."""
    stats = [device.memory_stats() for device in jax.local_devices()]
    if all(found and "bytes_limit" in found for found in stats):
        return jax.process_count() * sum(int(found["bytes_limit"]) for found in stats if found)
    return jax.process_count() * machine_memory_bytes()


def machine_memory_bytes() -> int:
    """Physical memory, or the limit of this process's container if that is lower."""
    memory = _physical_memory_bytes()
    try:
        return min(memory, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):
        return memory


def _physical_memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def peak_memory_bytes() -> int:
    """Peak memory so far: the accelerator's if it reports one, otherwise this process's."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "peak_bytes_in_use" in stats:
        return int(stats["peak_bytes_in_use"])
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def compute_in_turn() -> None:
    """Makes a CPU run each program in the thread that calls it; has no effect once JAX has looked for its devices.

    Otherwise steps wait in a queue, and each holds its temporary buffers from the moment it is queued. This also saves
    thread switches. If a process has several CPU devices, each still has its own thread.
    """
    forced = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if jax.config.values["jax_num_cpu_devices"] <= 1 and not forced:
        jax.config.update("jax_cpu_enable_async_dispatch", False)


def today() -> str:
    """The date (UTC), as in results."""
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def set_up_jax(least_seconds: float = 1.0) -> Path | None:
    """Sets how JAX computes on a CPU (`compute_in_turn`), and caches compiled programs; returns the cache folder.

    JAX then computes in float32, whatever `JAX_ENABLE_X64` says.

    Call it before JAX looks for its devices, which it does itself.
    Programs that took at least `least_seconds` to compile are cached, where that is safe.
    A program compiled for one CPU can crash on another, so the folder's name holds a digest of this CPU's
    features; where they cannot be read (systems other than Linux), CPU programs are not cached.
    `JAX_COMPILATION_CACHE_DIR` takes precedence if set.
    """
    compute_in_turn()
    jax.config.update("jax_enable_x64", False)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", least_seconds)
    if os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return Path(os.environ["JAX_COMPILATION_CACHE_DIR"])
    features = _cpu_features()
    if jax.default_backend() == "cpu" and not features:
        return None
    try:
        folder = cache_folder() / f"compiled-{cpu_digest()}"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # the latter where this user has no home directory
        return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    return folder


def cache_folder() -> Path:
    """The folder for files that can be recreated: the variable `MLCN_JAX_CACHE`, else `~/.cache/mlcn_jax`."""
    given = os.environ.get("MLCN_JAX_CACHE")
    return Path(given).expanduser() if given else Path.home() / ".cache" / "mlcn_jax"


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def cpu_digest() -> str:
    """12 hexadecimal digits that identify a kind of CPU: programs for one may crash or round differently on another."""
    return hashlib.sha256(f"{platform.machine()} {_cpu_features()}".encode()).hexdigest()[:12]


def adds_bytes_exactly() -> bool:
    """Whether ONNX Runtime sums products of 8-bit numbers exactly here: x86 CPUs without VNNI saturate at 16 bits."""
    return platform.machine() not in ("x86_64", "AMD64") or has_vnni()


def has_vnni() -> bool:
    """Whether this CPU has VNNI instructions, by the flags in /proc/cpuinfo."""
    return "vnni" in _cpu_features()


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
