"""Runs networks in several frameworks, each in a process of its own, and lets them take turns.

`benchmarks.train_step` and `benchmarks.inference` are the commands; here is what they share, and how other benchmarks,
too, go on with the results that a file has.
"""

import contextlib
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import jax
import numpy as np
from absl import flags
from flax import traverse_util

from benchmarks import networks
from benchmarks.networks import Network
from mlcn_jax import host
from mlcn_jax.errors import InputError, differences
from mlcn_jax.files import read_json, write_json

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
VERSION = 2  # raised with every change after which results cannot stand beside older ones
OURS, CHOSEN, ONNX = "mlcn_jax", "chosen", "onnxruntime"
_ENVIRONMENT = {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "2"}  # where the user has set neither
_CACHES = ("MLCN_JAX_CACHE", "TORCHINDUCTOR_CACHE_DIR")  # those of the user would spare a process what is measured
_PLAIN_TORCH = ("eager", "compiled", "eager_grouped", "compiled_grouped")
_KERAS = ("graph", "graph_xla")
_FROZEN_TORCH = ("compiled_frozen", "compiled_grouped_frozen")
VARIANTS = {  # tried for each network; the fastest takes part. "frozen" compiles the weights in
    "train": {OURS: ("vmap",), "keras": _KERAS, "torch": (*_PLAIN_TORCH, *(f"{v}_nchw" for v in _PLAIN_TORCH))},
    "infer": {
        OURS: ("xla",),  # the export as `predict` and `serve` run it with XLA alone
        CHOSEN: ("auto",),  # and with the runtime that they choose
        ONNX: ("default",),
        "keras": _KERAS,
        "torch": tuple(v + layout for v in (*_FROZEN_TORCH, *_PLAIN_TORCH) for layout in ("", "_nchw")),
    },
}
_RATIOS = ("ours_over_fastest_peer", "chosen_over_fastest")
_MODULES = {"train": {}, "infer": {OURS: "artifact", CHOSEN: "artifact"}}  # of `frameworks`, where named otherwise
_OF_A_FOLDER = ("artifact", ONNX)  # they read an exported or converted model
_MOST_BUSY = 0.2  # cores that other work may use before there is a warning
_ROUND_SECONDS = {"train": 1.0, "infer": 0.25}  # of a process in a round
_WARMING = {"train": 1, "infer": 50}  # steps that begin a turn and are not timed
_TRIAL_SECONDS = 0.3  # in which two of a framework's variants are compared
_TRIALS = 5  # times, in turn
_HOPELESS = 1.5  # times as long as the fastest variant, from which on another takes no turns with it
_SURE = 1.1  # times as long in every turn, from which on two turns are enough
_REST_SECONDS = 3.0  # that a process may take to use no CPU any more
_LOOK_SECONDS, _IDLE_SECONDS = 0.05, 0.001  # how often that is looked at, and what a thread may use in between
_DEFAULT_ALLOCATOR = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}  # where it is set, `keep_memory` changes nothing
_TOLERANCE = 1e-4  # of probabilities, over the largest, and of the loss before the first step
_LATER_TOLERANCE = 2e-2  # of the losses after one, two and three steps: Adam makes large steps of small differences
_SLACK = {"float32": 1, "tensorfloat32": 40, "bfloat16": 300}  # by what the products are computed in; 2^-24, -11, -8


def define_networks(values: flags.FlagValues, default: Sequence[str] = ("all",)) -> None:
    """The flag that names networks, for `networks.chosen`."""
    meaning = "sets (all, published, resnet) and networks: " + ", ".join(networks.NETWORKS)
    flags.DEFINE_list("networks", list(default), meaning, flag_values=values)


def define_batches(values: flags.FlagValues, default: Sequence[int]) -> None:
    """The flag that `batches` reads."""
    flags.DEFINE_list("batches", list(map(str, default)), "images per call", flag_values=values)


def batches(values: flags.FlagValues) -> list[int]:
    """The numbers of images of `--batches`; raises InputError where one is none."""
    if not all(given.isdecimal() and int(given) for given in values.batches):
        raise InputError(f"--batches={','.join(values.batches)}: give numbers of images, such as 1,8")
    return list(map(int, values.batches))


def define_onnx_python(values: flags.FlagValues) -> None:
    meaning = "interpreter of `make onnx`, which converts models"
    flags.DEFINE_string("onnx_python", ".venv-onnx/bin/python", meaning, flag_values=values)


def define_out(values: flags.FlagValues, name: str) -> None:
    """The flags that `results_so_far` and `kept` read; `results/NAME.json` is the default file."""
    meaning = "file to write, or to go on with; BACKEND in it stands for the platform, such as cpu"
    flags.DEFINE_string("out", str(RESULTS / f"{name}.json"), meaning, flag_values=values)
    meaning = "measure what the file has once more; if it is of other settings, versions or another device, start anew"
    flags.DEFINE_bool("again", False, meaning, flag_values=values)


def out_file(values: flags.FlagValues) -> Path:
    return Path(values.out.replace("BACKEND", jax.default_backend()))


def define_flags(values: flags.FlagValues, name: str, peers: Sequence[str] = ("keras", "torch")) -> None:
    """The flags of a comparison with `peers`, which writes `results/NAME.json`."""
    flags.DEFINE_list(
        "peers", list(peers), f"frameworks to compare with: {', '.join(peers)}; empty for none", flag_values=values
    )
    define_networks(values)
    flags.DEFINE_integer("rounds", 20, "interleaved rounds", lower_bound=1, flag_values=values)
    flags.DEFINE_enum(
        "dtype", "float32", ["float32", "bfloat16"], "type of convolutions and products", flag_values=values
    )
    flags.DEFINE_string(
        "peers_python", ".venv-peers/bin/python", "interpreter with benchmarks/requirements.txt", flag_values=values
    )
    define_out(values, name)


def environment() -> dict:
    """The date (UTC), device, kind of CPU and versions, which every benchmark writes beside its results."""
    return {"date": host.today(), "cpu": host.cpu_digest(), **host.environment()}


def stepping(step: Callable, state: Any, batch: Sequence) -> Callable[[], dict]:
    """A call for `in_turns` that takes the next training step and returns its metrics."""

    def call() -> dict:
        nonlocal state
        state, metrics = step(state, *batch)
        return metrics

    return call


def in_turns(calls: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each call, until its result is there, in rounds that all of them share, after one that warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 1):
        for name, call in calls.items():
            started = time.perf_counter()
            jax.block_until_ready(call())
            seconds[name].append(time.perf_counter() - started)
    return {name: taken[1:] for name, taken in seconds.items()}


def results_so_far(values: flags.FlagValues, settings: dict, *parts: str) -> dict:
    """What `--out` has of the same settings, device and versions, to go on with; the date is that of the last addition.

    Args:
      settings: what results must share to stand side by side, beside device and versions.
      parts: dictionaries of results by name, for `kept`; empty where there is no file.

    Raises:
      InputError: `--out` has results of other settings, versions or another device, which only `--again` replaces.
    """
    path, about = out_file(values), {"version": VERSION, **settings, **environment()}
    stored = read_json(path) if path.exists() else {}
    there, now = (traverse_util.flatten_dict(one, sep=".") for one in (stored, about))
    differ = differences(there, now, [name for name in now if name != "date"]) if stored else []
    if differ and not values.again:
        head, tail = f"{path} has results of something else:", "give another --out=FILE, or --again to replace them"
        raise InputError("\n".join([head, *differ, tail]))
    return about | {part: {} if differ else stored.get(part, {}) for part in parts}


def comparison_so_far(values: flags.FlagValues, do: str) -> dict:
    """`results_so_far` of a comparison with peers, with a place for failures.

    Raises:
      InputError: as there, or a peer is asked for that is not there.
    """
    known = [name for name in VARIANTS[do] if name not in (OURS, CHOSEN)]
    if unknown := [name for name in values.peers if name not in known]:
        raise InputError(f"--peers={','.join(values.peers)}: {unknown[0]!r} is none of {', '.join(known)}")
    if set(values.peers) - {ONNX}:
        check_peers_python(values.peers_python)
    settings = {"peers": values.peers, "rounds": values.rounds, "dtype": values.dtype}
    if do == "infer":
        settings["round_seconds"] = _ROUND_SECONDS[do]
    return results_so_far(values, settings, "networks", "families") | {"failed": {}}


@contextlib.contextmanager
def kept(values: flags.FlagValues, results: dict, part: str, name: str) -> Iterator[bool]:
    """Yields whether a part of the results is still to be measured, and writes what has been, with `busy_cores`.

    A failure is noted in the results where they have a place for it, and then does not end the others.
    """
    path = out_file(values)
    if name in results[part] and not values.again:
        print(f"{path} has {name}: --again measures it once more", flush=True)
        yield False
        return
    before = host.busy_cores()
    try:
        yield True
    except InputError as error:
        if "failed" not in results:
            raise
        results["failed"][name] = str(error)
        for process in list(Process.running):  # or they would keep their memory
            process.close()
        print(f"{name}: {error}", file=sys.stderr, flush=True)
    else:
        known = [busy for busy in (before, host.busy_cores()) if busy is not None]
        results[part][name]["busy_cores"] = busy = max(known, default=None)
        if busy is not None and busy > _MOST_BUSY:
            print(f"{name}: other work kept {busy:.2f} cores busy; --again measures it once more", file=sys.stderr)
    if "networks" in results:
        results["networks"] = dict(sorted(results["networks"].items(), key=lambda item: _place(item[0])))
    write_json(path, results)


def _place(name: str) -> tuple[int, int]:
    """Where a result stands: in the order of `NETWORKS`, then of its batch."""
    network, _, batch = name.partition("_batch_")
    return list(networks.NETWORKS).index(network), int(batch or 0)


class Process:
    """A `benchmarks.worker`: a network in a framework, from `in_mlcn_jax.prepare`; `more` variables are its own."""

    running: ClassVar[set["Process"]] = set()  # those that have not been closed

    def __init__(
        self,
        framework: str,
        variant: str,
        network: Network,
        do: str,
        batch: int,
        dtype: str,
        python: str,
        folder: Path,
        **more: str,
    ):
        self.framework, self.variant = framework, variant
        module = _MODULES[do].get(framework, framework)
        source = folder if module in _OF_A_FOLDER else folder / "weights.npz"
        self._folder = tempfile.TemporaryDirectory()
        self._errors = Path(self._folder.name) / "errors.txt"
        with self._errors.open("w") as errors:
            self._process = subprocess.Popen(
                [
                    *(python if framework in ("keras", "torch") else sys.executable, "-m", "benchmarks.worker"),
                    *(module, network.name, variant, str(batch), dtype, str(source)),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=ROOT,
                env={**_ENVIRONMENT, **os.environ, **{name: str(folder / name) for name in _CACHES}, **more},
            )
        self.running.add(self)

    def ask(self, do: str, **options):
        """Sends a command and waits for the answer.

        Raises:
          InputError: the process has ended.
        """
        try:
            self._process.stdin.write(json.dumps({"do": do, **options}) + "\n")
            self._process.stdin.flush()
            return json.loads(self._process.stdout.readline())
        except (BrokenPipeError, json.JSONDecodeError):
            self._process.wait()
            reason = self._errors.read_text().strip().splitlines() or ["no reason given"]
            raise InputError(f"the {self.framework} process ({self.variant}) ended: {reason[-1]}") from None

    def rest(self) -> None:
        """Waits until the process uses no CPU any more: threads of some frameworks spin for a while after a step."""
        last, used = time.monotonic() + _REST_SECONDS, self._cpu_seconds()
        while time.monotonic() < last:
            time.sleep(_LOOK_SECONDS)
            before, used = used, self._cpu_seconds()
            if used and before.keys() == used.keys() and all(used[t] - before[t] < _IDLE_SECONDS for t in used):
                return

    def _cpu_seconds(self) -> dict[str, float]:
        """CPU time of each of the process's threads; of none where the system does not tell."""
        found = {}
        for file in Path(f"/proc/{self._process.pid}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError):  # it has ended
                found[file.parent.name] = int(file.read_text().split()[0]) / 1e9
        return found

    def close(self) -> None:
        self.running.discard(self)
        with contextlib.suppress(BrokenPipeError):  # it has ended, and left something unread
            self._process.stdin.close()
        self._process.wait()
        self._folder.cleanup()


def check_peers_python(python: str) -> None:
    """Raises InputError where `python` cannot run the peers."""
    if not Path(python).exists():
        raise InputError(f"--peers_python={python} is not there: `make bench` installs the peers into .venv-peers")


def check_onnx_python(python: str) -> None:
    """Raises InputError where `python` cannot convert models."""
    if not Path(python).exists():
        raise InputError(f"--onnx_python={python} is not there: `make bench` installs it into .venv-onnx")


def take_turns(processes: Sequence[Process], do: str, steps: list[int], rounds: int) -> list[list[float]]:
    """Milliseconds per step of each process in each round; each round begins with another process.

    A turn is so many steps, after some that are not timed. The next one begins when the process uses no CPU any more.
    """
    times: list[list[float]] = [[] for _ in processes]
    for process in processes:
        process.rest()
    for first in range(rounds):
        for i in (*range(len(processes)), *range(len(processes)))[first % len(processes) :][: len(processes)]:
            processes[i].ask(do, steps=min(_WARMING[do], steps[i]))  # brings caches and memory back
            times[i].append(1000 * processes[i].ask(do, steps=steps[i])["seconds"] / steps[i])
            processes[i].rest()
    return times


def warm_up(process: Process, do: str) -> dict:
    """Takes a few steps: seconds of the first, `values` (losses or probabilities), and milliseconds of later ones."""
    first = process.ask(do, steps=1)
    more = process.ask(do, steps=3)
    steps = max(2, round(_TRIAL_SECONDS * 3 / more["seconds"]))
    milliseconds = 1000 * process.ask(do, steps=steps)["seconds"] / steps
    key = "losses" if do == "train" else "probabilities"
    values = first[key] + more[key] if do == "train" else first[key]
    return {"first_seconds": first["seconds"], "values": np.array(values), "milliseconds": milliseconds}


def compare(
    network: Network, batch: int, peers: list[str], do: str, rounds: int, dtype: str, python: str, folder: Path
) -> dict:
    """Ours against the peers on one network, each peer in the variant that is fastest there.

    Args:
      do: `train` or `infer`.
      python: the interpreter of the peers' environment.
      folder: what `in_mlcn_jax.prepare` wrote.

    Raises:
      InputError: no variant of a peer can run with our outputs or losses; variants that cannot are told in the results.
    """
    result: dict = {"title": network.title, "batch": batch, "frameworks": {}}
    chosen: list[Process] = []
    steps: list[int] = []
    ours = None
    for framework in (OURS, *([CHOSEN] if ONNX in peers else []), *peers):
        starts = [
            functools.partial(Process, framework, variant, network, do, batch, dtype, python, folder)
            for variant in VARIANTS[do][framework]
            if network.lanes > 1 or "grouped" not in variant
        ]

        def check(warm: dict, framework: str = framework, ours: np.ndarray | None = ours) -> None:
            error, later = _differences(warm["values"], warm["values"] if ours is None else ours, do)
            if not (error <= _slack(dtype) * _TOLERANCE and later <= _slack(dtype) * _LATER_TOLERANCE):  # NaN, too
                raise InputError(
                    f"{framework} does not compute what mlcn_jax does on {network.title}: relative differences "
                    f"{error:.2g} at first and {later:.2g} after steps of training"
                )

        process, warm, trials, failed = fastest_variant(do, starts, check)
        chosen.append(process)
        steps.append(max(2, round(1000 * _ROUND_SECONDS[do] / warm["milliseconds"])))
        ours = warm["values"] if ours is None else ours
        error, later = _differences(warm["values"], ours, do)
        result["frameworks"][framework] = {
            "variant": process.variant,
            "trials_milliseconds": trials,
            "failed_variants": failed,
            "first_step_seconds": warm["first_seconds"],
            "relative_difference_from_ours": {"at_first": error, "after_three_steps": later},
            "versions": process.ask("about"),
        }
    times = dict(zip(result["frameworks"], take_turns(chosen, do, steps, rounds), strict=True))
    for process in chosen:
        milliseconds = times[process.framework]
        entry = result["frameworks"][process.framework]
        entry |= {
            "milliseconds": spread(milliseconds),
            "images_per_second": 1000 * batch / statistics.median(milliseconds),
            **process.ask("memory"),
        }
        if process.framework == CHOSEN:
            entry["runtime"] = process.ask("runtime")
        for own, name in ((OURS, "ours_over_theirs"), (CHOSEN, "chosen_over_theirs")):
            if own in times and process.framework not in (own, *([CHOSEN] if own == OURS else [])):
                entry[name] = spread([a / b for a, b in zip(milliseconds, times[own], strict=True)])
        process.close()
    result |= ratios(result["frameworks"])
    if do == "train" and "torch" in result["frameworks"]:
        torch = result["frameworks"]["torch"]
        try:
            torch["peak_bytes_by_default"] = _peak_by_default(torch["variant"], network, batch, dtype, python, folder)
        except InputError as error:  # all else has been measured
            torch["peak_bytes_by_default_failed"] = str(error)
        result["peak_over_torch"] = peak_over_torch(result["frameworks"])
    return result


def _peak_by_default(variant: str, network: Network, batch: int, dtype: str, python: str, folder: Path) -> int:
    """PyTorch's peak memory in training, with the allocator's own settings and nothing compiled before."""
    anew = {**_DEFAULT_ALLOCATOR, "TORCHINDUCTOR_CACHE_DIR": str(folder / "anew")}
    process = Process("torch", variant, network, "train", batch, dtype, python, folder, **anew)
    try:
        warm_up(process, "train")
        return process.ask("memory")["peak_bytes"]
    finally:
        process.close()


def peak_over_torch(frameworks: dict[str, dict]) -> float:
    """Our peak memory over PyTorch's, which is the smaller of those with our allocator's settings and with its own."""
    theirs = frameworks["torch"]
    least = min(theirs[name] for name in ("peak_bytes", "peak_bytes_by_default") if name in theirs)
    return frameworks[OURS]["peak_bytes"] / least


def ratios(frameworks: dict[str, dict]) -> dict[str, float]:
    """Speed of ours over the fastest peer, ONNX Runtime apart, and of the runtime chosen over the fastest of all."""

    def medians(name: str, but: str = "") -> list[float]:
        return [entry[name]["median"] for other, entry in frameworks.items() if name in entry and other != but]

    found = dict(zip(_RATIOS, (medians("ours_over_theirs", but=ONNX), medians("chosen_over_theirs")), strict=True))
    return {name: min(values) for name, values in found.items() if values}


def fastest_variant(
    do: str, starts: list[Callable[[], Process]], check: Callable[[dict], None]
) -> tuple[Process, dict, dict[str, float], dict[str, str]]:
    """The fastest of several processes, what `warm_up` said of it, each one's milliseconds, and why others failed.

    Each takes turns with the fastest so far, so that no more than two hold memory, unless it is much slower at once.
    All but the fastest are closed.

    Args:
      do: `train` or `infer`.
      starts: each starts a process.
      check: is given what `warm_up` says, and raises InputError if it is wrong.

    Raises:
      InputError: none of them can run, or all are wrong.
    """
    best: tuple[Process, dict] | None = None
    trials: dict[str, float] = {}
    failed: dict[str, str] = {}
    for start in starts:
        process = start()
        try:
            warmed = warm_up(process, do)
            check(warmed)
        except InputError as error:
            process.close()
            failed[process.variant] = str(error)
            print(f"{process.variant} takes no part: {error}", file=sys.stderr, flush=True)
            continue
        if best and warmed["milliseconds"] > _HOPELESS * best[1]["milliseconds"]:
            trials[process.variant] = warmed["milliseconds"]
            process.close()
            continue
        pair = [*([best] if best else []), (process, warmed)]
        steps = [max(2, round(1000 * _TRIAL_SECONDS / warm["milliseconds"])) for _, warm in pair]
        if len(starts) > 1 and best:
            times = _trials([one for one, _ in pair], do, steps)
            for (_, warm), milliseconds in zip(pair, times, strict=True):
                warm["milliseconds"] = statistics.median(milliseconds)
        trials |= {one.variant: warm["milliseconds"] for one, warm in pair}
        best = min(pair, key=lambda one: one[1]["milliseconds"])
        for one, _ in pair:
            if one is not best[0]:
                one.close()
    if best is None:
        raise InputError("; ".join(failed.values()))
    return *best, trials, failed


def _trials(pair: Sequence[Process], do: str, steps: list[int]) -> list[list[float]]:
    """Milliseconds of two processes in two rounds, and in more unless one is slower in every turn."""
    times = take_turns(pair, do, steps, 2)
    least, most = zip(*((min(own), max(own)) for own in times), strict=True)
    if max(least) > _SURE * min(most):
        return times
    more = take_turns(pair, do, steps, _TRIALS - 2)
    return [[*own, *rest] for own, rest in zip(times, more, strict=True)]


def _slack(dtype: str) -> float:
    """By how much frameworks may differ, over float32; on a GPU they compute its products in TF32 (`gpu.sh`)."""
    return _SLACK["tensorfloat32" if dtype == "float32" and jax.default_backend() == "gpu" else dtype]


def spread(values: Sequence[float]) -> dict[str, float]:
    """What results tell of values from several rounds."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def _differences(theirs: np.ndarray, ours: np.ndarray, do: str) -> tuple[float, float]:
    """Largest relative difference before training and after its first steps."""
    difference = np.abs(theirs - ours)
    if do == "infer":
        return float(difference.max() / ours.max()), 0.0
    return float(difference[0] / ours[0]), float((difference / ours)[1:].max())


def table(results: list[dict]) -> str:
    """The comparison in Markdown: images per second, ratios, and peak memory."""
    lines = []
    for result in results:
        cells = [result["title"], str(result["batch"])]
        for entry in result["frameworks"].values():
            cells.append(f"{entry['images_per_second']:,.0f}")
        cells += [f"{result[name]:.2f}" if name in result else "-" for name in _RATIOS]
        cells += [f"{entry['peak_bytes'] / 2**20:,.0f}" for entry in result["frameworks"].values()]
        cells.append(f"{result['peak_over_torch']:.2f}" if result.get("peak_over_torch") else "-")
        lines.append("| " + " | ".join(cells) + " |")
    names = list(results[0]["frameworks"])
    head = ["network", "batch", *(f"{n} images/s" for n in names)]
    head += ["ours over fastest peer", "chosen over fastest"]
    head += [*(f"{n} MiB" for n in names), "memory over PyTorch's"]
    return "\n".join(["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *lines])
