"""Runs networks in several frameworks, each in a process of its own, and lets them take turns.

`benchmarks.train_step` and `benchmarks.inference` are the commands; here is what they share.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from absl import flags

from benchmarks import networks
from benchmarks.frameworks import in_mlcn_jax
from benchmarks.networks import Network
from mlcn_jax import host
from mlcn_jax.errors import InputError

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
OURS = "mlcn_jax"
_ENVIRONMENT = {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "2"}  # where the user has set neither
_TORCH = ("eager", "compiled", "eager_grouped", "compiled_grouped")
VARIANTS = {  # tried for each network; the fastest takes part. "frozen" compiles the weights in
    "train": {OURS: ("vmap",), "keras": ("graph",), "torch": _TORCH},
    "infer": {
        OURS: ("vmap", "vmap_frozen"),
        "keras": ("graph",),
        "torch": (*_TORCH, "compiled_frozen", "compiled_grouped_frozen"),
    },
}
_ROUND_SECONDS = 1.0
_TRIAL_SECONDS = 0.3  # in which a framework's variants are compared
_PAUSE_SECONDS = 0.3  # so that another framework's threads have gone to sleep
_TOLERANCE = 1e-4  # of probabilities, over the largest, and of the loss before the first step
_LATER_TOLERANCE = 2e-2  # of the losses after one, two and three steps: Adam makes large steps of small differences


def define_flags(values: flags.FlagValues, name: str) -> None:
    """The flags of a comparison with the peers, which writes `results/NAME.json`."""
    flags.DEFINE_list(
        "peers", ["keras", "torch"], "frameworks to compare with: keras, torch; empty for none", flag_values=values
    )
    flags.DEFINE_list("networks", [n.name for n in networks.TARGETS], "; ".join(networks.NETWORKS), flag_values=values)
    flags.DEFINE_integer("rounds", 20, "interleaved rounds", lower_bound=1, flag_values=values)
    flags.DEFINE_enum(
        "dtype", "float32", ["float32", "bfloat16"], "type of convolutions and products", flag_values=values
    )
    flags.DEFINE_string(
        "peers_python", ".venv-peers/bin/python", "interpreter with benchmarks/requirements.txt", flag_values=values
    )
    flags.DEFINE_string("out", str(RESULTS / f"{name}.json"), "file to write", flag_values=values)


def no_results(values: flags.FlagValues) -> dict:
    """Where the results of a comparison go; raises InputError if a peer is asked for that is not installed."""
    if values.peers:
        check_peers_python(values.peers_python)
    return {"rounds": values.rounds, "dtype": values.dtype, **host.environment(), "networks": {}}


class Process:
    """A `benchmarks.worker`: one network in one framework."""

    def __init__(self, framework: str, variant: str, network: Network, do: str, batch: int, dtype: str, python: str):
        self.framework, self.variant = framework, variant
        self._folder = tempfile.TemporaryDirectory()
        weights = Path(self._folder.name) / "weights.npz"
        np.savez(weights, **in_mlcn_jax.start_weights(network, folded=do == "infer"))
        self._errors = Path(self._folder.name) / "errors.txt"
        arguments = (framework, network.name, variant, str(batch), dtype, str(weights))
        with self._errors.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable if framework == OURS else python, "-m", "benchmarks.worker", *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=ROOT,
                env={**_ENVIRONMENT, **os.environ},
            )

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

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()
        self._folder.cleanup()


def check_peers_python(python: str) -> None:
    """Raises InputError where `python` cannot run the peers."""
    if not Path(python).exists():
        raise InputError(f"--peers_python={python} is not there: `make bench` installs the peers into .venv-peers")


def take_turns(processes: list[Process], do: str, steps: list[int], rounds: int) -> list[list[float]]:
    """Milliseconds per step of each process in each round; each round begins with another process.

    A turn is so many steps, after one that is not timed.
    """
    times: list[list[float]] = [[] for _ in processes]
    for first in range(rounds):
        for i in (*range(len(processes)), *range(len(processes)))[first % len(processes) :][: len(processes)]:
            time.sleep(_PAUSE_SECONDS)
            processes[i].ask(do, steps=1)  # brings caches and memory back
            times[i].append(1000 * processes[i].ask(do, steps=steps[i])["seconds"] / steps[i])
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


def compare(network: Network, batch: int, peers: list[str], do: str, rounds: int, dtype: str, python: str) -> dict:
    """Ours against the peers on one network, each peer in the variant that is fastest there.

    Args:
      do: `train` or `infer`.
      python: the interpreter of the peers' environment.

    Raises:
      InputError: a peer's outputs or losses are not ours, or it cannot run.
    """
    result: dict = {"title": network.title, "batch": batch, "frameworks": {}}
    chosen: list[Process] = []
    steps: list[int] = []
    for framework in (OURS, *peers):
        trials: dict[str, tuple[Process, dict]] = {}
        for variant in VARIANTS[do][framework]:
            process = Process(framework, variant, network, do, batch, dtype, python)
            trials[variant] = process, warm_up(process, do)
        variant, (process, warm) = min(trials.items(), key=lambda item: item[1][1]["milliseconds"])
        for other, _ in trials.values():
            if other is not process:
                other.close()
        chosen.append(process)
        steps.append(max(2, round(1000 * _ROUND_SECONDS / warm["milliseconds"])))
        if framework == OURS:
            ours = warm["values"]
        error, later = _differences(warm["values"], ours, do)
        slack = 1 if dtype == "float32" else 300
        if error > slack * _TOLERANCE or later > slack * _LATER_TOLERANCE:
            raise InputError(
                f"{framework} does not compute what mlcn_jax does on {network.title}: relative differences {error:.2g} "
                f"at first and {later:.2g} after steps of training"
            )
        result["frameworks"][framework] = {
            "variant": variant,
            "trials_milliseconds": {name: trial["milliseconds"] for name, (_, trial) in trials.items()},
            "first_step_seconds": warm["first_seconds"],
            "relative_difference_from_ours": {"at_first": error, "after_three_steps": later},
            "versions": process.ask("about"),
        }
    times = take_turns(chosen, do, steps, rounds)
    for process, milliseconds in zip(chosen, times, strict=True):
        entry = result["frameworks"][process.framework]
        entry |= {
            "milliseconds": {
                "median": statistics.median(milliseconds),
                "min": min(milliseconds),
                "max": max(milliseconds),
            },
            "images_per_second": 1000 * batch / statistics.median(milliseconds),
            **process.ask("memory"),
        }
        if process.framework != OURS:
            ratios = [theirs / ours for theirs, ours in zip(milliseconds, times[0], strict=True)]
            entry["ours_over_theirs"] = _spread(ratios)
        process.close()
    if peers:
        medians = (result["frameworks"][peer]["ours_over_theirs"]["median"] for peer in peers)
        result["ours_over_fastest_peer"] = min(medians)
    return result


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def _differences(theirs: np.ndarray, ours: np.ndarray, do: str) -> tuple[float, float]:
    """Largest relative difference before training and after its first steps."""
    difference = np.abs(theirs - ours)
    if do == "infer":
        return float(difference.max() / ours.max()), 0.0
    return float(difference[0] / ours[0]), float((difference / ours)[1:].max())


def table(results: list[dict]) -> str:
    """The comparison in Markdown: images per second, ratio to the faster peer, and peak memory."""
    lines = []
    for result in results:
        cells = [result["title"], str(result["batch"])]
        for entry in result["frameworks"].values():
            cells.append(f"{entry['images_per_second']:,.0f}")
        if "ours_over_fastest_peer" in result:
            cells.append(f"{result['ours_over_fastest_peer']:.2f}")
        cells += [f"{entry['peak_bytes'] / 2**20:,.0f}" for entry in result["frameworks"].values()]
        lines.append("| " + " | ".join(cells) + " |")
    names = list(results[0]["frameworks"])
    head = ["network", "batch", *(f"{n} images/s" for n in names)]
    head += ["ratio"] if len(names) > 1 else []
    head += [f"{n} MiB" for n in names]
    return "\n".join(["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *lines])
