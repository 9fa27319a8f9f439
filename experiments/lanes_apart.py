"""Lanes trained apart and joined, against lanes trained together, and against one larger lane of the same cost.

    python -m experiments.lanes_apart --workdir=runs/lanes_apart --minutes=60

Parts: `fashion`, Fashion-MNIST with mlcn2 lanes, 8 pairs; `cifar`, CIFAR-10 with resnet lanes, 3 pairs. A pair is a
model of 4 lanes that were trained apart, each with its own seeds, then joined, and one whose 4 lanes were trained
together, with other seeds. mlcn2 lanes are trained together in two ways: `together` with `margin_loss=per_lane`, where
the mean of their losses counts and the decoder's gradient trains them (the default, `joint`, is not compared), and
`alike`, with the settings of lanes trained apart, so that each lane has its own best checkpoint (added after `together`
had been seen to be the worse one; a lane had the checkpoint of all then, and `alike` was as bad). Which two make a pair
is arbitrary, so the 95 % interval of the difference is that of two samples, Welch's; it should be inside +-0.3 points.
`--pairs` adds pairs: with CIFAR-10, 3 did not suffice for an interval of that width, so 8 were trained, then 12, then
15, each number fixed after those before had been seen, which makes the interval narrower than one of 95 % is. Lanes are
joined as soon as all that a model needs have ended; a pair's decoder is trained, and timed. Lanes trained apart are
also joined one by one, up to 16, equal ones and a mix of sizes. Beside them stand single lanes at the cost of 4 and of
16 equal ones: of all widths, and depths up to 8, those whose training costs most nearly as much, decoders included.

10 epochs. Training takes 0.9 PFLOP for each part, 1.7 h at 150 GFLOP/s; compiling, scoring, decoders, and 60 and 29
starts come on top. `smoke` takes a step of each.

One JSON a run (`run.json`) and a join (`joined/NAME.json`); what has ended, in the workdir or in the results that are
kept with the code, is not run again. Writes `lanes_apart_SCALE`. Test accuracy is compared, for the record; weights are
fitted on validation images.
"""

import functools
import itertools
import json
import shutil
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from absl import flags

from experiments.published_rows import configure
from experiments.repeated_report import (
    Records,
    caption,
    carry_out,
    draw_caption,
    kept_results,
    number,
    select,
    write,
)
from experiments.repeated_runs import Facts, Request, Scale, Series, asked, chosen, define_flags
from mlcn_jax.analysis.join import join
from mlcn_jax.config import RunConfig
from mlcn_jax.files import markdown, read_json, write_json
from mlcn_jax.launch import launch_script
from mlcn_jax.placement.cost import decoder_step_flops, lane_cost

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VERSION = 3  # raised with every change after which results cannot stand beside older ones
SCALES = {"smoke": Scale("smoke", 1, 1, num_train=1000, num_test=100), "full": Scale("full", 10)}
KINDS = ("equal", "mixed")  # of joined lanes, in the curves
_TOGETHER = 1000  # added to the seeds of models whose lanes are trained together
_OF_PAIR, _MOST = 4, 16
_INSIDE = 0.3  # points, which the interval of the difference should not exceed
_DECODER_EPOCHS = 5  # of pairs
_COMMON = {"data.validation_fraction": 0.1, "data.split_seed": 0, "model.decoder": [128, 256]}


class Part(NamedTuple):
    """Data, the lane that pairs have, lanes of other sizes, single lanes by how many they cost, and pairs at least."""

    config: str
    lane: str
    others: tuple[str, ...]
    single: Mapping[int, str]
    num_pairs: int
    title: str

    @property
    def together(self) -> tuple[str, ...]:
        """The ways in which lanes are trained together; resnet lanes are alike by default, but for their checkpoint."""
        return ("together", "alike") if self.lane.startswith("mlcn") else ("together",)


PARTS = {
    "fashion": Part(
        "mlcn2_fashion", "mlcn2:w2", ("mlcn2:w3", "mlcn2:w1"), {4: "mlcn2:w3d3", 16: "mlcn2:w5d5"}, 8, "mlcn2"
    ),
    "cifar": Part("resnet_cifar", "resnet:w1d2", ("resnet:w1d1",), {4: "resnet:w3d1", 16: "resnet:w4d4"}, 3, "resnet"),
}


def define(values: flags.FlagValues) -> None:
    define_flags(values, SCALES)
    values.set_default("scale", "full")
    flags.DEFINE_list("parts", list(PARTS), f"Which of {', '.join(PARTS)}.", flag_values=values)
    text = "Pairs of each part, where these are more than it has at least; 0 takes those."
    flags.DEFINE_integer("pairs", 0, text, lower_bound=0, flag_values=values)


def main(values: flags.FlagValues) -> int:
    return run(asked(values, "lanes_apart", SCALES, ("parts", "pairs")), parts=values.parts, pairs=values.pairs)


def run(request: Request, *, parts: Sequence[str], pairs: int) -> int:
    """Trains and joins what has not been yet, reports after each, and returns the exit code.

    The request's repeats are those of each single lane; `pairs` is as many pairs of each part, if it needs no more.
    """
    parts = chosen("parts", parts, PARTS)
    runs = [facts for part in parts for facts in runs_of(part, request.repeats, request.scale.name == "smoke", pairs)]
    series = Series(
        request,
        "lanes_apart",
        VERSION,
        functools.partial(configure_run, request.directories),
        True,
        lambda folder, summary: {"test_accuracy": 100 * summary["test_accuracy"]},
        kept_results("lanes_apart", request.scale.name),
    )
    joins = {name: apart for part in parts for name, apart in joins_of(part, runs).items()}
    told = joined(series)
    again = [lane for name, lanes in joins.items() if name not in told for lane in lanes]
    return carry_out(series, runs, lambda records: text(series), functools.partial(report, joins), again=again)


def runs_of(part: str, repeats: int, smoke: bool, pairs: int = 0) -> list[Facts]:
    """The trainings of a part, in the order in which they are of use."""
    known = PARTS[part]
    num_pairs, most = (1, 2) if smoke else (max(known.num_pairs, pairs), _MOST)
    apart = [one_of(part, "apart", known.lane, seed) for seed in range(max(most, _OF_PAIR * num_pairs))]
    paired = [
        [*apart[_OF_PAIR * pair : _OF_PAIR * (pair + 1)], one_of(part, "together", known.lane, _TOGETHER + pair)]
        for pair in range(num_pairs)
    ]
    first = most // _OF_PAIR  # pairs whose lanes are those of the curves, too
    each = most // (1 + len(known.others))  # of every other size in the mixed model
    others = [one_of(part, "apart", lane, seed) for seed in range(each) for lane in known.others]
    single = [one_of(part, "single", lane, seed) for seed in range(repeats) for lane in known.single.values()]
    more = [one_of(part, mode, known.lane, _TOGETHER + i) for mode in known.together[1:] for i in range(num_pairs)]
    ordered = [*paired[:first], apart[_OF_PAIR * num_pairs :], others, *paired[first:], more, single]
    return list(itertools.chain(*ordered))


def one_of(part: str, mode: str, lane: str, seed: int) -> dict[str, Any]:
    return {"part": part, "mode": mode, "lane": lane.replace(":", "_"), "seed": seed}


def joins_of(part: str, runs: Sequence[Facts]) -> dict[str, list[Facts]]:
    """The models to be joined of a part's lanes: the pairs' and the curves'."""
    known = PARTS[part]

    def apart(lane: str) -> list[Facts]:
        name = lane.replace(":", "_")
        return [one for one in runs if (one["part"], one["mode"], one["lane"]) == (part, "apart", name)]

    equal = apart(known.lane)
    num_pairs = sum((one["part"], one["mode"]) == (part, "together") for one in runs)
    pairs = {f"{part}_pair{i}": equal[i * _OF_PAIR : (i + 1) * _OF_PAIR] for i in range(num_pairs)}
    sizes = [iter(apart(lane)) for lane in (known.lane, *known.others)]
    mixed = [lane for row in zip(*sizes, strict=False) for lane in row]
    mixed = [*mixed, *(lane for lane in equal if lane not in mixed)][:_MOST]
    return pairs | {f"{part}_equal": equal[:_MOST], f"{part}_mixed": mixed}


def configure_run(directories: Mapping[str, str], part: str, mode: str, lane: str, seed: int) -> RunConfig:
    """The run of a part: one lane `apart`, four `together` or `alike`, or a `single` larger one."""
    known, text = PARTS[part], lane.replace("_", ":")
    config = configure(known.config, text, directories).replace({**_COMMON, "train.seed": seed})
    published = text.startswith("mlcn")
    if mode == "together":
        loss = {"model.margin_loss": "per_lane"} if published else {}
        return config.replace({"model.lanes": f"{text}*{_OF_PAIR}"} | loss)
    alone = {"model.margin_loss": "per_lane_sum", "model.decoder_gradient": "none"} if published else {}
    seeds = [seed]
    if mode == "alike":
        text, first = f"{text}*{_OF_PAIR}", _OF_PAIR * (seed - _TOGETHER) + _TOGETHER
        seeds = list(range(first, first + _OF_PAIR))
    return config.replace({"model.lanes": text, "model.lane_seeds": seeds, "train.lanes_apart": True} | alone)


def join_due(series: Series, joins: Mapping[str, Sequence[Facts]]) -> None:
    """Joins lanes that have all been trained, unless that has been done, and keeps what is told of them."""
    told = joined(series)
    for name, lanes in joins.items():
        output = series.workdir / "joined" / name
        folders = [folder_of(series, facts) for facts in lanes]
        if name in told or not all(map(_is_trained, folders)):
            continue
        made = output, output.with_name(f"{name}.equal")
        for folder in made:  # left by one that was stopped
            shutil.rmtree(folder, ignore_errors=True)
        about = join(folders, made[0], decoder_epochs=_DECODER_EPOCHS if "_pair" in name else 0)
        equal = join(folders, made[1], decoder_epochs=0, weights="equal")
        for folder in made:
            shutil.rmtree(folder)
        told_of = {"lanes": lanes, "weighted": about, "equal": equal}
        write_json(output.with_suffix(".json"), json.loads(json.dumps(told_of).replace(f"{series.workdir}/", "")))


def _is_trained(folder: Path) -> bool:
    record = folder / "run.json"
    return record.exists() and "failed" not in read_json(record)


def joined(series: Series) -> dict[str, dict[str, Any]]:
    """What is told of each joined model, by its name; of kept ones, those whose lanes have the settings of now."""
    kept, lanes = kept_results("lanes_apart", series.scale.name), [one["facts"] for one in series.kept_records()]
    told = read_json(kept)["joined"] if lanes else {}
    found = {name: one for name, one in told.items() if all(lane in lanes for lane in one["lanes"])}
    return found | {path.stem: read_json(path) for path in sorted((series.workdir / "joined").glob("*.json"))}


def folder_of(series: Series, facts: Facts) -> Path:
    """The workdir of a run."""
    return series.workdir / "runs" / facts["part"] / facts["mode"] / facts["lane"] / f"seed{facts['seed']}"


def training_megaflops(part: str, lane: str) -> float:
    """MFLOP per image of a training step of one lane and its decoder, the mean over the image sizes of its run."""
    config = configure_run({"fashion_mnist": "", "cifar10": ""}, part, "single", lane, 0)
    spec, batch = config.model_spec(*config.data.shape()), config.train.batch_size
    (group,) = spec.lane_groups
    height, width, channels = spec.image_shape
    flops, begun = float(decoder_step_flops(spec)), 0.0
    for until, size in config.train.sizes():
        cost = lane_cost(group.spec, spec.lane_settings, (size or height, size or width, channels))
        flops += (until - begun) * cost.step_flops(batch) / batch
        begun = until
    return flops / 1e6


def summarise(series: Series) -> dict[str, Any]:
    """For each part: pairs with the interval of their difference, curves, and single lanes; accuracies in %.

    A curve's point is the model of so many `lanes`; a single lane costs as much as so many.
    """
    records, told = [one for one in series.records() if "failed" not in one], joined(series)
    return {part: _of_part(part, select(records, part=part), told) for part in PARTS}


def _of_part(part: str, records: Records, told_of: Mapping[str, Any]) -> dict[str, Any]:
    of_mode = {
        mode: {one["facts"]["seed"] - _TOGETHER: one["test_accuracy"] for one in select(records, mode=mode)}
        for mode in PARTS[part].together
    }
    apart = {pair: told for pair in range(len(records)) if (told := told_of.get(f"{part}_pair{pair}"))}
    pairs = [
        {
            **{mode: accuracy.get(pair) for mode, accuracy in of_mode.items()},
            **{name: 100 * told[name]["test_accuracy"] for name in ("weighted", "equal")},
            "decoder_seconds": told["weighted"].get("decoder_seconds"),
        }
        for pair, told in apart.items()
    ]
    single = [
        {"lane": lane, "lanes": count, "megaflops": training_megaflops(part, lane), "accuracy": one["test_accuracy"]}
        for count, lane in PARTS[part].single.items()
        for one in select(records, mode="single", lane=lane.replace(":", "_"))
    ]
    curves = {kind: told["weighted"]["lanes"] for kind in KINDS if (told := told_of.get(f"{part}_{kind}"))}
    return {
        "pairs": pairs,
        "differences": [difference(pairs, mode, PARTS[part].num_pairs) for mode in of_mode],
        "curves": {kind: curve(part, lanes) for kind, lanes in curves.items()},
        "single": single,
    }


def curve(part: str, lanes: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Cost and accuracy of the models of the first 1, 2, ... lanes."""
    points, megaflops = [], 0.0
    for count, lane in enumerate(lanes, start=1):
        megaflops += training_megaflops(part, lane["lane"])
        points.append({"lanes": count, "megaflops": megaflops, "accuracy": 100 * lane["test_accuracy"]})
    return points


def difference(pairs: Sequence[Mapping[str, Any]], mode: str, num_pairs: int) -> dict[str, Any]:
    """A way of training together, and the `interval`, with the means, of the pairs that have it; "pairs" may be 0."""
    both = [pair for pair in pairs if pair[mode] is not None]
    means = [[pair[name] for pair in both] for name in ("weighted", mode)]
    found = interval(*means, num_pairs) or {"pairs": 0}
    return {"mode": mode, "means": [statistics.fmean(m) for m in means if m], **found}


def interval(joined: Sequence[float], together: Sequence[float], num_pairs: int) -> dict[str, Any] | None:
    """Difference of the means of two samples, its 95 % interval, and whether it is inside +-0.3 points.

    Welch's interval; None for fewer than two of each. Fewer than `num_pairs` are never inside.

    Source: Welch 1947 (Biometrika 34).
    """
    from scipy.stats import ttest_ind

    count = min(len(joined), len(together))
    if count < 2:
        return None
    low, high = map(float, ttest_ind(joined, together, equal_var=False).confidence_interval(0.95))
    inside = count >= num_pairs and max(abs(low), abs(high)) <= _INSIDE
    mean = statistics.fmean(joined) - statistics.fmean(together)
    return {"mean": mean, "low": low, "high": high, "inside": inside, "pairs": count}


def text(series: Series) -> str:
    """Tables of the pairs and of the curves as Markdown."""
    header = ("", "joined", "together", "joined - together, 95 %", f"+-{_INSIDE:g} points")
    rows = []
    points = []
    for part, one in summarise(series).items():
        for between in one["differences"]:
            if between["pairs"]:
                told = f"{between['mean']:+.2f} ({between['low']:+.2f} to {between['high']:+.2f})"
                verdict = "inside" if between["inside"] else "not inside"
                means = [f"{mean:.2f}" for mean in between["means"]]
                rows.append([f"{part}, {between['pairs']} pairs, {between['mode']}", *means, told, verdict])
        for kind, every in one["curves"].items():
            some = [point for point in every if point["lanes"] in (1, 2, 4, 8, 16)]
            points += [(f"{part}, {kind}", str(point["lanes"]), point) for point in some]
        points += [
            (f"{part}, one {point['lane']} at the cost of {point['lanes']}", "1", point) for point in one["single"]
        ]
    costs = [[name, lanes, number(one["megaflops"]), f"{one['accuracy']:.2f}"] for name, lanes, one in points]
    return "\n\n".join([markdown(header, rows), markdown(("", "lanes", "MFLOP", "accuracy"), costs)])


def draw(series: Series) -> "Figure":
    """Accuracy against the number of joined lanes, and against cost: equal and mixed ones, and single larger lanes.

    A column for each part; a single lane stands where as many joined ones cost as much.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8.5), layout="constrained")
    for axes, (part, one) in zip(figure.subplots(2, len(PARTS)).T, summarise(series).items(), strict=True):
        drawn = {f"joined, {kind}": (points, "o-") for kind, points in one["curves"].items()}
        if one["single"]:
            drawn["one lane of their cost"] = (one["single"], "s")
        for ax, x in zip(axes, ("lanes", "megaflops"), strict=True):
            for label, (points, style) in drawn.items():
                ax.plot([p[x] for p in points], [p["accuracy"] for p in points], style, ms=4, label=label)
            ax.set(ylabel="test accuracy, %")
            if drawn:
                ax.legend()
        axes[0].set(title=f"{part}, {PARTS[part].title}", xlabel="joined lanes", xticks=(1, 2, 4, 8, 12, 16))
        costs = [p["megaflops"] for p in one["curves"].get("equal", []) if p["lanes"] in (1, 2, 4, 8, 16)]
        axes[1].set(xlabel="MFLOP per image and training step, with decoders", xscale="log")
        axes[1].set_xticks(costs, [number(cost) for cost in costs])
        axes[1].minorticks_off()
    return figure


def report(joins: Mapping[str, Sequence[Facts]], series: Series) -> None:
    """Joins what can be joined, and writes tables and figure of all that has ended."""
    join_due(series, joins)
    records: Records = series.records()
    lines = [
        "Weights of joined lanes are fitted on validation images; test accuracy in %. Intervals are Welch's, of two "
        "samples. MFLOP: products and convolutions of a training step for each image, of lanes and of the decoder that "
        "each run trains, without the optimizer's.",
        *caption(series, records),
    ]
    figure = draw(series)
    draw_caption(figure, lines)
    summary = {"joined": joined(series), **summarise(series)}
    write(series, "lanes_apart", summary, text(series), lines, figure)


if __name__ == "__main__":
    launch_script(define, main)
