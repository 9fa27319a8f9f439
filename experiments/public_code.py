"""Why lanes on CIFAR-10 fall short of the thesis: the layers of the authors' public code, and its best epoch.

    python -m experiments.public_code --workdir=runs/public_code --cifar_dir=DIR

The public code computes other lanes than the thesis's text: primary capsules of 16 dimensions instead of 8, by 6x6
convolutions instead of 9x9, and in mlcn2 three more convolutions. And it keeps the weights of the epoch with the
highest accuracy on the test images. The layers are trained here; what the text says is trained by `table_4_1.py`, and
taken from its results. The best epoch is told beside the last one: it is chosen on test images, as in the public code,
so it is no result, but what explains one. Batches, Adam and its decay are those of that
commit; 4 lanes of width 4 and 20 epochs, the thesis's.

20 epochs take 0.85 PFLOP with the layers of mlcn1 and 2.9 with those of mlcn2. Resumption and what is written
(`public_code_SCALE`) are as in `table_4_1.py`.

Source: https://github.com/lmcad-unicamp/lanes-capsnet, capsnet.py and capslayer.py, at commit 38faf6d of March 2019.
Later ones load CIFAR-100, and have no mlcn2."""

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import flax.linen as nn
import jax.numpy as jnp
from absl import flags
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from experiments.published_rows import ROWS, configure
from experiments.repeated_report import (
    Records,
    caption,
    carry_out,
    draw_caption,
    kept_results,
    select,
    spread,
    told,
    write,
)
from experiments.repeated_runs import Request, Series, asked, chosen, define_flags, scales
from mlcn_jax.config import RunConfig
from mlcn_jax.files import markdown, read_json
from mlcn_jax.launch import launch_script
from mlcn_jax.nn import conv
from mlcn_jax.nn.lanes import LANE_KINDS, ConvParams, LaneKind, LaneSettings, LaneSpec

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VERSION = 2  # raised with every change after which results cannot stand beside older ones
SCALES = scales(smoke_steps=2)
PARTS = {"mlcn1": "cifar_mlcn1_4x4", "mlcn2": "cifar_mlcn2_4x4"}  # rows of table 4.1
CAPSULE_DIM = 16
TITLES = {"text": "as in the thesis's text", "layers": "layers of the public code"}
HEADER = ("", "parameters", "last epoch", "best epoch by test images", "last - thesis", "best - thesis")


def _mlcn1(
    images: Float[Array, "batch h w channels"], spec: LaneSpec, settings: LaneSettings
) -> Float[Array, "batch h w filters"]:
    """Lane type 1 of width w: 9x9 to 16w filters, relu, 6x6 with stride 2 to 2w capsules of 16 dimensions."""
    first = ConvParams((9, 9, images.shape[-1], 16 * spec.width), settings.dtype, name="conv1")()
    return conv.lane_convs(images, *first, *_primary(spec, settings), algorithm=settings.conv_algorithm)


def _mlcn2(
    images: Float[Array, "batch h w channels"], spec: LaneSpec, settings: LaneSettings
) -> Float[Array, "batch h w filters"]:
    """Lane type 2 of width w: 1x1, separable 6x6, relu, three times 3x3 and relu, all to 16w filters; 6x6 as type 1."""
    features, algorithm = 16 * spec.width, settings.conv_algorithm
    kernel, bias = _SeparableParams(images.shape[-1], features, settings.dtype, name="conv1")()
    x = nn.relu(conv.conv2d(images, kernel, algorithm=algorithm) + bias[None, None, None])
    for i in range(2, 5):
        kernel, bias = ConvParams((3, 3, features, features), settings.dtype, name=f"conv{i}")()
        x = nn.relu(conv.conv2d(x, kernel, padding="SAME", algorithm=algorithm) + bias[None, None, None])
    kernel, bias = _primary(spec, settings)
    return conv.conv2d(x, kernel, stride=2, algorithm=algorithm) + bias[None, None, None]


def _primary(spec: LaneSpec, settings: LaneSettings) -> tuple[Array, Array]:
    shape = (6, 6, 16 * spec.width, 2 * spec.width * CAPSULE_DIM)
    return ConvParams(shape, settings.dtype, name="primary")()


class _SeparableParams(nn.Module):
    """Kernel and bias of a 1x1 convolution and a separable 6x6 one after it, joined into one 6x6 convolution.

    There is no activation between them, so this is the same function of the same parameters.
    """

    channels: int
    features: int
    dtype: DTypeLike

    @nn.compact
    def __call__(self) -> tuple[Float[Array, "6 6 cin cout"], Float[Array, " cout"]]:
        glorot, zeros, m = nn.initializers.glorot_uniform(), nn.initializers.zeros, self.features
        first = self.param("first", glorot, (self.channels, m))
        first_bias = self.param("first_bias", zeros, (m,))
        depthwise = self.param("depthwise", glorot, (6, 6, m, 1))[..., 0]
        pointwise = self.param("pointwise", glorot, (m, m))
        bias = self.param("bias", zeros, (m,))
        spatial = jnp.einsum("hwm,mo->hwmo", depthwise, pointwise)
        kernel = jnp.einsum("cm,hwmo->hwco", first, spatial)
        bias = bias + jnp.einsum("m,hwmo->o", first_bias, spatial)
        return kernel.astype(self.dtype), bias.astype(self.dtype)


def add_kinds() -> None:
    """Adds the layers of the public code as the lane kinds `mlcn1_code` and `mlcn2_code`."""
    for name, compute in {"mlcn1": _mlcn1, "mlcn2": _mlcn2}.items():
        LANE_KINDS.setdefault(f"{name}_code", LaneKind(compute, min_size=17, capsule_dim=CAPSULE_DIM))


def define(values: flags.FlagValues) -> None:
    define_flags(values, SCALES)
    values.set_default("scale", "full")
    flags.DEFINE_list("parts", list(PARTS), f"Which of {', '.join(PARTS)}.", flag_values=values)


def main(values: flags.FlagValues) -> int:
    return run(asked(values, "public_code", SCALES, ("parts",)), parts=values.parts)


def run(request: Request, *, parts: Sequence[str]) -> int:
    """Trains what has not been trained yet, reports after each run, and returns the exit code."""
    parts = chosen("parts", parts, PARTS)
    runs = [{"part": part, "seed": seed} for seed in range(request.repeats) for part in parts]
    series = Series(
        request,
        "public_code",
        VERSION,
        functools.partial(configure_run, request.directories),
        keep_models=False,
        kept=kept_results("public_code", request.scale.name),
    )
    return carry_out(series, runs, functools.partial(text, scale=request.scale.name), report)


def configure_run(directories: Mapping[str, str], part: str, seed: int) -> RunConfig:
    """The run of a part and a seed; the test set is also scored after each epoch."""
    add_kinds()
    config = configure(ROWS[PARTS[part]].config, f"{part}_code:w4*4", directories)
    return config.replace({"train.seed": seed, "train.test_every_epoch": True})


def records_of(records: Records, part: str, variant: str, scale: str) -> list[dict[str, Any]]:
    """Those of a part: `layers` of these records, `text` of the results of `table_4_1.py`, as published."""
    if variant == "layers":
        return with_best(select(records, part=part))
    path = kept_results("table_4_1", scale)
    kept = read_json(path)["runs"] if path.exists() else []
    mine = select(kept, row=PARTS[part], column="published")
    return with_best([record for record in mine if not record["data"]["copy"] and "failed" not in record])


def summarise(records: Records, scale: str) -> list[dict[str, Any]]:
    """Each part and variant: accuracy after the last and the best epoch, and their differences from the thesis's."""
    rows = []
    for part, variant in itertools.product(PARTS, TITLES):
        mine, thesis = records_of(records, part, variant, scale), ROWS[PARTS[part]].accuracy
        last, best = spread(mine, "test_accuracy"), spread(mine, "best_accuracy")
        rows.append(
            {
                "part": part,
                "variant": variant,
                "title": f"{part} 4x4, {TITLES[variant]}",
                "parameters": next((record["parameters"] for record in mine if "parameters" in record), None),
                "last": last,
                "best": best,
                "last_difference": last and last["mean"] - thesis,
                "best_difference": best and best["mean"] - thesis,
            }
        )
    return rows


def explained(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """For each part whose runs have ended, a sentence: how much of the distance to the thesis is due to what."""
    sentences = []
    for part in PARTS:
        text, layers = (next(row for row in rows if (row["part"], row["variant"]) == (part, v)) for v in TITLES)
        if text["last"] and layers["last"] and layers["best"]:
            runs = f"{text['last']['runs']} and {layers['last']['runs']} runs"
            sentences.append(
                f"{part} 4x4 is {text['last_difference']:+.2f} points from the thesis as its text says; the layers of "
                f"the public code change {layers['last']['mean'] - text['last']['mean']:+.2f} ({runs}), the epoch that "
                f"is best on test images {layers['best']['mean'] - layers['last']['mean']:+.2f}, and "
                f"{layers['best_difference']:+.2f} remain."
            )
    return sentences


def with_best(records: Records) -> list[dict[str, Any]]:
    """Records with the highest accuracy of an epoch on the test images."""
    curves = [record.get("test_accuracy_per_epoch") for record in records]
    return [
        record | ({"best_accuracy": max(curve)} if curve else {}) for record, curve in zip(records, curves, strict=True)
    ]


def text(records: Records, scale: str) -> str:
    """The table as Markdown."""
    lines = []
    for row in summarise(records, scale):
        mine = records_of(records, row["part"], row["variant"], scale)
        points = ["-" if row[name] is None else f"{row[name]:+.2f}" for name in ("last_difference", "best_difference")]
        count = "-" if row["parameters"] is None else f"{row['parameters']:,}"
        lines.append([row["title"], count, told(mine, "test_accuracy"), told(mine, "best_accuracy"), *points])
    return markdown(HEADER, lines)


def draw(records: Records, scale: str) -> "Figure":
    """Test accuracy after each epoch: a panel for each part, a line for each run, and the thesis's as a level."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5), layout="constrained")
    for ax, (part, row) in zip(figure.subplots(1, len(PARTS), sharey=True), PARTS.items(), strict=True):
        for i, (variant, title) in enumerate(TITLES.items()):
            for number, record in enumerate(records_of(records, part, variant, scale)):
                curve = record.get("test_accuracy_per_epoch", [])
                label = None if number else title
                ax.plot(range(1, len(curve) + 1), curve, "o-", ms=3, color=f"C{i}", label=label)
        thesis = ROWS[row]
        ax.axhline(thesis.accuracy, color="black", ls="--", label=f"thesis, {thesis.accuracy:.2f} %")
        ax.set(xlabel="epoch", ylabel="test accuracy, %", title=thesis.title)
        ax.legend()
    return figure


def report(series: Series) -> None:
    """Writes table and figure of every run that has ended."""
    records, scale = series.records(), series.scale.name
    rows = summarise(records, scale)
    lines = [
        *explained(rows),
        "Test accuracy in %: mean, standard deviation, least and most; differences in points from the thesis's. "
        "The best epoch is chosen on the test images, as in the public code, so it is no result. What the thesis's "
        f"text says is from `table_4_1_{scale}.json`.",
        *caption(series, records),
    ]
    figure = draw(records, scale)
    draw_caption(figure, lines)
    write(series, "public_code", {"rows": rows}, text(records, scale), lines, figure)


if __name__ == "__main__":
    launch_script(define, main)
