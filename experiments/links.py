"""What `parallel.plan=auto` chooses over links of different speed, against the fastest of all splits of equal result.

    mlcn_jax profile --cores=1 --output=profile.json
    python -m experiments.links --profile=profile.json            # about an hour on two cores, as root

Two processes of one core each, joined by loopback or by a shaped link between two network namespaces
(`experiments.packet_link`): the processes' collectives go over it packet by packet. Each link is measured as a run
measures it at its start. Each model trains in every split that `splits.candidates` finds: a mesh by batch, by lane,
stacks of each partitioner whose placement differs, and each process by itself; they take turns. What is chosen is what
is predicted to be fastest from the profile and the measured link. Writes `experiments/results/links.json`. Rows that
are there are not measured again, whichever links and models are asked for; with another profile or `VERSION`, the file
begins anew.
"""

import contextlib
import os
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from absl import flags

from experiments import RESULTS, kept_rows, quiet, workers
from experiments.packet_link import ADDRESSES, PacketLink
from experiments.simulator_check import digest
from mlcn_jax import host
from mlcn_jax.config import RunConfig
from mlcn_jax.errors import InputError
from mlcn_jax.files import write_json
from mlcn_jax.launch import launch_script
from mlcn_jax.nn.spec import ModelSpec
from mlcn_jax.placement import simulate
from mlcn_jax.placement.profile import DeviceProfile
from mlcn_jax.training import plan, splits

LINKS: dict[str, dict[str, float]] = {
    "loopback": {},
    "100 Mbit/s, 5 ms": {"delay_ms": 5, "rate_mbit": 100},
    "10 Mbit/s, 50 ms": {"delay_ms": 50, "rate_mbit": 10},
}
MODELS = ("mlcn1:w4*4", "mlcn1:w2*8", "mlcn1:w3d2*2,mlcn2:w2*3", "resnet:w2*4")
VERSION = 4  # raised with every change after which rows cannot stand beside older ones
_BATCH = 100
_WITHIN = 0.1  # of the fastest


def config_of(lanes: str, data: str, dtype: str) -> RunConfig:
    """A run of a model; a part of a batch must hold whole groups of images that are normalised together."""
    changes = {"data.name": data, "model.lanes": lanes, "train.batch_size": _BATCH, "parallel.exchange_dtype": dtype}
    if "resnet" in lanes:
        changes["model.norm_group"] = _BATCH // 2
    return workers.config_of(changes)


def name_of(candidate: splits.Candidate) -> str:
    """What a split is called in the results."""
    if candidate.placement:
        return f"stacks, {candidate.placement.partitioner}"
    return f"mesh, data={candidate.data}, lane={candidate.lane}" if candidate.data * candidate.lane > 1 else "alone"


def candidates_over(
    link: Mapping[str, float], spec: ModelSpec, profile: DeviceProfile, dtype: str
) -> dict[str, splits.Candidate]:
    """Every split over two processes of this machine, with its prediction, by its name."""
    between = simulate.Link(**link)
    cluster = simulate.Cluster((0, 1), splits.slowest_link([profile]), between, ("here", "here"))
    found = splits.candidates(spec, _BATCH, [profile] * 2, plan.TRIED, 2, cluster, splits.Messages(dtype))
    return {name_of(candidate): candidate for candidate in found}


def measure(row: Mapping[str, str], profile: DeviceProfile, values: flags.FlagValues) -> dict[str, Any]:
    """Measured and predicted seconds of a step in every split of a model over a link."""
    config = config_of(row["lanes"], values.data, values.exchange_dtype)
    spec = config.model_spec(*config.data.shape())
    cores = [[core] for core in sorted(os.sched_getaffinity(0))[:2]]
    with contextlib.ExitStack() as stack:
        where: dict[str, Any] = {}
        if LINKS[row["link"]]:
            shaped = stack.enter_context(PacketLink(**LINKS[row["link"]]))
            where = {"prefixes": [shaped.prefix(0), shaped.prefix(1)], "address": ADDRESSES[0]}

        def start(candidate: splits.Candidate) -> workers.Group:
            changes = {
                "data.name": values.data,
                "model.lanes": row["lanes"],
                "model.norm_group": spec.norm_group,
                "train.batch_size": _BATCH,
                "parallel.data": candidate.data,
                "parallel.lane": candidate.lane,
                "parallel.exchange_dtype": values.exchange_dtype,
            }
            device_of = candidate.placement.device_of if candidate.placement else ()
            alone = candidate.data * candidate.lane == 1
            group = workers.Group(workers.Run(changes, cores, device_of=device_of, alone=alone, **where))
            stack.callback(group.close)
            return group

        guess = candidates_over({"latency_seconds": 0.0, "bytes_per_second": 1e9}, spec, profile, values.exchange_dtype)
        groups = {name: start(candidate) for name, candidate in guess.items()}
        for group in groups.values():
            group.seconds(1)  # until none compiles
        busy = quiet.busy_cores()
        steps = {name: max(2, round(values.turn_seconds / group.seconds(1))) for name, group in groups.items()}
        link = next(iter(groups.values())).link()
        seconds: dict[str, list[float]] = {name: [] for name in groups}
        for _ in range(values.rounds):
            for name, group in groups.items():
                seconds[name].append(group.seconds(steps[name]))
    found = candidates_over(link, spec, profile, values.exchange_dtype)
    cluster = simulate.Cluster((0, 1), simulate.Link(**link), simulate.Link(**link), ("here", "here"))
    measured = {name: statistics.median(taken) for name, taken in seconds.items()}
    predicted = {name: found[name].step.total_seconds for name in measured if name in found}
    others = plan.faster_otherwise(spec, _BATCH, [profile] * 2, cluster, 0.0, min(predicted.values()))
    chosen, fastest = (min(table, key=table.__getitem__) for table in (predicted, measured))
    return {
        **row,
        "measured_link": link,
        "measured_seconds": measured,
        "predicted_seconds": predicted,
        "chosen": chosen,
        "fastest": fastest,
        "chosen_over_fastest": measured[chosen] / measured[fastest],
        # Without the command to type, which has a path where the package is not installed.
        "recommended_seconds": {what.partition(" (")[0]: seconds for what, seconds in others.items()},
        "turns": values.rounds,
        "busy_cores": busy,
    }


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_string("profile", "profile.json", "Profile of one core.", flag_values=values)
    flags.DEFINE_string("data", "fashion_mnist", "Dataset whose image shape is taken.", flag_values=values)
    flags.DEFINE_string("exchange_dtype", "float32", "As parallel.exchange_dtype.", flag_values=values)
    flags.DEFINE_string("links", ";".join(LINKS), "Links to measure, separated by ;", flag_values=values)
    flags.DEFINE_string("models", ";".join(MODELS), "Lanes of each model, separated by ;", flag_values=values)
    flags.DEFINE_string("output", str(RESULTS / "links.json"), "File to write.", flag_values=values)
    flags.DEFINE_integer("rounds", 7, "Turns of each split.", lower_bound=1, flag_values=values)
    flags.DEFINE_float("turn_seconds", 2.0, "Length of a turn, but at least two steps.", flag_values=values)


def main(values: flags.FlagValues) -> None:
    profile = workers.one_core_profile(values.profile)
    path = Path(values.output)
    about = {"version": VERSION, "batch": _BATCH, "profile": digest(profile)}
    rows = kept_rows.stored_results(path, about).get("rows", [])
    links, models = values.links.split(";"), values.models.split(";")
    if unknown := [link for link in links if link not in LINKS]:
        raise InputError(f"--links has {unknown[0]!r}; there are {'; '.join(LINKS)}")
    same = {"data": values.data, "exchange_dtype": values.exchange_dtype}
    for row in ({"link": link, "lanes": lanes, **same} for link in links for lanes in models):
        if any(kept_rows.is_row(one, row) for one in rows):
            continue
        rows.append(measure(row, profile, values))
        print(f"{rows[-1]['chosen_over_fastest']:.2f}  {rows[-1]['chosen']}  {row}", flush=True)
        ratios = [one["chosen_over_fastest"] for one in rows]
        summary = {"largest": max(ratios), "within": sum(ratio <= 1 + _WITHIN for ratio in ratios), "of": len(ratios)}
        path.parent.mkdir(exist_ok=True)
        write_json(path, {**about, **host.environment(), "chosen_over_fastest": summary, "rows": rows})


if __name__ == "__main__":
    launch_script(define, main)
