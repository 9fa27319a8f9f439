"""Why mlcn1 on CIFAR-10 falls short of the thesis: the layers of the authors' public code, its batches, its best epoch.

    python -m experiments.public_code --workdir=runs/public_code --cifar_dir=DIR

The public code computes other lanes than the thesis's text: primary capsules of 16 dimensions instead of 8, by a 6x6
convolution instead of 9x9. It takes batches of 32 by default, where the thesis says 100. And it keeps the weights of
the epoch with the highest accuracy on the test images. Each is one step here, from the thesis's text: the layers; then
the batches; the best epoch is told beside the last one. Everything else is as published: 4 lanes of width 4.

A run takes 0.65 PFLOP at 20 epochs, with the layers of the public code 0.85; convolutions by spectra need fewer, so it
is about 50 minutes of a core. Resumption and what is written (`public_code_SCALE`) are as in `table_4_1.py`. The best
epoch is chosen on test images, as in the public code: it is no result, but what explains one.

Source: https://github.com/lmcad-unicamp/lanes-capsnet, capsnet.py and capslayer.py, at commit 916e680.
"""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl import flags
from jaxtyping import Array, Float

from experiments.published_rows import ROWS, configure
from experiments.repeated_report import (
    Records,
    caption,
    carry_out,
    draw_caption,
    kept_results,
    markdown,
    select,
    spread,
    told,
    write,
)
from experiments.repeated_runs import Series, asked, chosen, define_flags, scales
from mlcn_jax.config import RunConfig
from mlcn_jax.launch import launch_script
from mlcn_jax.nn import conv
from mlcn_jax.nn.lanes import LANE_KINDS, ConvParams, LaneKind, LaneSettings, LaneSpec

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VERSION = 1  # raised with every change after which results cannot stand beside older ones
SCALES = scales(smoke_steps=2)
THESIS = ROWS["cifar_mlcn1_4x4"]
KIND, CAPSULE_DIM = "mlcn1_code", 16
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "text": (THESIS.lanes, {}),
    "layers": (f"{KIND}:w4*4", {}),
    "batches": (f"{KIND}:w4*4", {"train.batch_size": 32}),
}
TITLES = {
    "text": "as in the thesis's text",
    "layers": "layers of the public code",
    "batches": "these layers, and batches of 32 images",
}
HEADER = ("", "parameters", "last epoch", "best epoch by test images", "last - thesis", "best - thesis")


def _layers(
    images: Float[Array, "batch h w channels"], spec: LaneSpec, settings: LaneSettings
) -> Float[Array, "batch h w filters"]:
    """A lane of the public code of width w: 9x9 to 16w filters, relu, 6x6 with stride 2 to 2w capsules of 16."""
    features = 16 * spec.width
    first = ConvParams((9, 9, images.shape[-1], features), settings.dtype, name="conv1")()
    primary = ConvParams((6, 6, features, 2 * spec.width * CAPSULE_DIM), settings.dtype, name="primary")()
    return conv.lane_convs(images, *first, *primary, algorithm=settings.conv_algorithm)


LANE_KINDS.setdefault(KIND, LaneKind(_layers, min_size=17, capsule_dim=CAPSULE_DIM))


def define(values: flags.FlagValues) -> None:
    define_flags(values, SCALES)
    values.set_default("scale", "full")
    flags.DEFINE_list("variants", list(VARIANTS), f"Which of {', '.join(VARIANTS)}.", flag_values=values)


def main(values: flags.FlagValues) -> int:
    return run(**asked(values, "public_code", ("variants",)), variants=values.variants)


def run(
    workdir: Path,
    *,
    scale: str,
    repeats: int,
    variants: Sequence[str],
    minutes: float,
    directories: Mapping[str, str],
    command: str,
) -> int:
    """Trains what has not been trained yet, reports after each run, and returns the exit code."""
    chosen("scale", [scale], SCALES)
    runs = [
        {"variant": variant, "seed": seed}
        for seed in range(repeats)
        for variant in chosen("variants", variants, VARIANTS)
    ]
    series = Series(
        workdir,
        "public_code",
        VERSION,
        SCALES[scale],
        functools.partial(configure_run, directories),
        command,
        keep_models=False,
        kept=kept_results("public_code", scale),
    )
    return carry_out(series, runs, minutes, text, report)


def configure_run(directories: Mapping[str, str], variant: str, seed: int) -> RunConfig:
    """The run of a variant and a seed; the test set is also scored after each epoch."""
    lanes, changes = VARIANTS[variant]
    config = configure(THESIS.config, lanes, directories)
    return config.replace({**changes, "train.seed": seed, "train.test_every_epoch": True})


def summarise(records: Records) -> list[dict[str, Any]]:
    """Each variant: the accuracy after the last epoch, that of the best one, and their differences from the thesis."""
    rows = []
    for variant in VARIANTS:
        mine = with_best(select(records, variant=variant))
        last, best = spread(mine, "test_accuracy"), spread(mine, "best_accuracy")
        rows.append(
            {
                "variant": variant,
                "title": TITLES[variant],
                "parameters": next((record["parameters"] for record in mine if "parameters" in record), None),
                "last": last,
                "best": best,
                "last_difference": last and last["mean"] - THESIS.accuracy,
                "best_difference": best and best["mean"] - THESIS.accuracy,
            }
        )
    return rows


def with_best(records: Records) -> list[dict[str, Any]]:
    """Records with the highest accuracy of an epoch on the test images."""
    curves = [record.get("test_accuracy_per_epoch") for record in records]
    return [
        record | ({"best_accuracy": max(curve)} if curve else {}) for record, curve in zip(records, curves, strict=True)
    ]


def text(records: Records) -> str:
    """The table as Markdown."""
    lines = []
    for row in summarise(records):
        mine = with_best(select(records, variant=row["variant"]))
        points = ["-" if row[name] is None else f"{row[name]:+.2f}" for name in ("last_difference", "best_difference")]
        count = "-" if row["parameters"] is None else f"{row['parameters']:,}"
        lines.append([row["title"], count, told(mine, "test_accuracy"), told(mine, "best_accuracy"), *points])
    return markdown(HEADER, lines)


def draw(records: Records) -> "Figure":
    """Test accuracy after each epoch: a line for each run, and the thesis's as a level."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    ax = figure.subplots()
    for i, (variant, title) in enumerate(TITLES.items()):
        for record in select(records, variant=variant):
            curve = record.get("test_accuracy_per_epoch", [])
            label = title if record["facts"]["seed"] == 0 else None
            ax.plot(range(1, len(curve) + 1), curve, "o-", ms=3, color=f"C{i}", label=label)
    ax.axhline(THESIS.accuracy, color="black", ls="--", label=f"thesis, {THESIS.accuracy:.2f} %")
    ax.set(xlabel="epoch", ylabel="test accuracy, %", title=THESIS.title)
    ax.legend()
    return figure


def report(series: Series) -> None:
    """Writes table and figure of every run that has ended."""
    records = series.records()
    lines = [
        "Test accuracy in %: mean, standard deviation, least and most; differences in points from the thesis's "
        f"{THESIS.accuracy:.2f} %. The best epoch is chosen on the test images, as in the public code, so it is no "
        "result.",
        *caption(series, records),
    ]
    figure = draw(records)
    draw_caption(figure, lines)
    write(series, "public_code", {"rows": summarise(records)}, text(records), lines, figure)


if __name__ == "__main__":
    launch_script(define, main)
