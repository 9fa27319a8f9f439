"""What leaves a trusted device can be turned back into the image: measured, for each cut, precision and noise.

    python -m experiments.tiers_leak --workdir=runs/mlcn2 --scale=smoke
    python -m experiments.tiers_leak --workdir=runs/mlcn2

What is sent is the cut of all lanes of the tier that receives it. The attacker has their weights, reads what is sent,
and knows in how many bits and with how much noise.
Attacks: `least squares` inverts the first convolution (cuts `conv1` and `stem`), where values are positive, so that its
relu or gelu can be undone; `optimisation` looks for the image whose values at the cut come nearest, with a
total-variation prior; `inverter` is a network trained on training images. `found` is the share of 200 images that their
values at the cut point out among 10,000.
Two references need nothing that was sent, but the class: its mean training image, and that of its training images which
is nearest to the image itself, the best that a guess among them can do.
Reports PSNR and SSIM of restored test images, and the accuracy that bits and noise leave to the tier's lanes. Writes
`tiers_leak.json`, `.md` and `.png` to `experiments/results/` after each measurement; run again on the same machine, it
goes on with what is missing.

Source: the kinds of attack of L1ziang/GLASS; Wang et al. 2004 for SSIM.
"""

import datetime
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import flags
from jaxtyping import Array, Float
from matplotlib.figure import Figure
from scipy.ndimage import gaussian_filter
from scipy.sparse import coo_array, vstack
from scipy.sparse.linalg import lsmr

from experiments import RESULTS
from mlcn_jax import host
from mlcn_jax.analysis.workdir import load_with_data, stored_config
from mlcn_jax.data.batches import Split
from mlcn_jax.files import make_folder, read_json, replacing, write_atomic, write_json
from mlcn_jax.launch import launch_script
from mlcn_jax.nn.calibration import fold_statistics
from mlcn_jax.nn.resnet import FROZEN
from mlcn_jax.nn.spec import rows_of, spec_of
from mlcn_jax.serving.export import flat_weights
from mlcn_jax.tiers import wire
from mlcn_jax.tiers.cuts import Part, cuts_of

# Images restored, candidates to find one among, steps of optimisation, training images and epochs of the inverter.
SCALES = {"smoke": (2, 200, 20, 200, 1), "full": (32, 10_000, 1500, 20_000, 20)}
# Bits of each value, and noise in standard deviations of the values.
SETTINGS = {"32 bits": (32, 0.0), "8 bits": (8, 0.0), "4 bits": (4, 0.0), "2 bits": (2, 0.0), "noise 0.5": (32, 0.5)}
_TV = 1e-3
_BATCH = 100
_TRAINING_VALUES = 2**28  # at most, of the inverter's images: 1 GiB
_FOUND = 200  # images, each of which is looked for among the candidates
_SHOWN = 4  # images in the picture
_ANSWERED = 2_000  # images at most, for accuracy
REFERENCES = ("mean image of the class", "nearest training image of the class")
_CONVOLUTIONS = ("conv1", "stem")  # cuts after the first convolution and its relu or gelu
_CLEAR = 2.0  # standard deviations of the noise from which on a value is one that relu let pass


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_string("workdir", "", "Folder of a trained model whose lanes classify alone.", flag_values=values)
    flags.DEFINE_string("data_dir", "", "Overrides the run's config.data.dir, if not empty.", flag_values=values)
    meaning = "Indices of the lanes of the tier that gets the values; empty is all but the first two, as in the cloud."
    flags.DEFINE_list("lanes", [], meaning, flag_values=values)
    flags.DEFINE_enum("scale", "full", list(SCALES), "Extent of the measurements.", flag_values=values)
    flags.DEFINE_string("results", str(RESULTS), "Folder to write to.", flag_values=values)
    flags.DEFINE_string("name", "tiers_leak", "Name of the output files, without suffix.", flag_values=values)


def main(values: flags.FlagValues) -> None:
    folder = Path(values.results).expanduser()
    make_folder(folder, "results")
    scale = SCALES[values.scale]
    path = folder / f"{values.name}{'' if values.scale == 'full' else f'_{values.scale}'}.json"
    workdir = Path(values.workdir).expanduser()
    trained, dataset = load_with_data(workdir, stored_config(workdir, values.data_dir))
    count = len(trained.spec.lane_specs)
    lanes = sorted(map(int, values.lanes)) or list(range(min(2, count - 1), count))
    spec = spec_of(trained.spec, lanes)
    encoder = fold_statistics(trained.spec, trained.params)["encoder"]
    own = rows_of(trained.spec, lanes)
    weights = flat_weights({name: jax.tree.map(lambda a, r=rows: a[r], encoder[name]) for name, rows in own.items()})
    machine = host.environment()
    about = {
        **{name: machine[name] for name in ("device", "cpu_count")},
        "lanes": spec.lanes,
        "numbers": lanes,
        "step": trained.step,
        "model": trained.sha256,
        "data": dataset.name,
        "scale": values.scale,
        "images": scale[0],
        "candidates": scale[1],
    }
    results = read_json(path) if path.is_file() else {"about": about, "starts": {}, "rows": {}, "accuracy": {}}
    if results["about"] != about:
        raise SystemExit(f"error: {path} is of {results['about']}, not {about}: move it away")
    time = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")  # which names this start
    kept = path.with_suffix(".npz")  # pictures, until all are there
    pictures: dict[str, np.ndarray] = {}
    if results["rows"] and kept.is_file():
        with np.load(kept) as arrays:
            pictures = dict(arrays)
    candidates = dataset.test[: scale[1]]
    images = candidates.images[: scale[0]]

    def write() -> None:
        if results["rows"]:
            report(results, path)
        if pictures:
            draw(pictures, images[:_SHOWN], path.with_suffix(".png"))

    def keep(key: str, row: dict[str, Any], restored: np.ndarray | None = None) -> None:
        results["rows"][key] = row | {"start": time}
        results["starts"][time] = {"versions": machine["versions"]}
        if restored is not None:
            pictures[key] = np.rint(255 * restored[: len(images[:_SHOWN])].clip(0, 1)).astype(np.uint8)
            with replacing(kept) as partial, open(partial, "wb") as file:
                np.savez(file, **pictures)  # type: ignore[arg-type]
        write_json(path, results)
        write()
        print(f"{key}: {row}", flush=True)

    try:
        if any(f"none, nothing, {name}" not in results["rows"] for name in REFERENCES):
            for name, known in references(dataset.train, candidates[:_FOUND]).items():
                parts = (candidates.images[i : i + _BATCH] / 255 for i in range(0, len(candidates.images), _BATCH))
                told = {"found": share_found(known, parts), "images": len(known)}
                keep(f"none, nothing, {name}", scores(known[: scale[0]], images) | told, known)
        for cut in cuts_of(spec)[1:]:
            missing = [key for key in keys_of(cut) if ", ".join((cut, *key)) not in results["rows"]]
            if not missing:
                continue
            part = Part(spec, tuple(spec.weights.tolist()), cut)
            home, tier = part.split_weights(weights)
            attacker = Attacker(part, home, dataset.train.images[: scale[3]], scale[2], scale[4])
            seen, more = attacker.values(images), attacker.values(candidates.images[:_FOUND])
            for setting, attack in missing:
                bits, noise = SETTINGS[setting]
                key = f"{cut}, {setting}, {attack}"
                if f"{cut}, {setting}" not in results["accuracy"]:
                    right = accuracy(attacker, tier, candidates[:_ANSWERED], bits, noise)
                    results["accuracy"][f"{cut}, {setting}"] = right
                sent = as_sent(more if attack == "found" else seen, bits, noise)
                if attack == "found":
                    found = share_found(sent, attacker.parts(candidates.images))
                    keep(key, {"found": found, "images": len(sent)})
                    continue
                restored = attacker.restore(attack, sent, noise, lambda v, b=bits, n=noise: as_sent(v, b, n, 1))
                trained_on = {"training_images": len(attacker.train)} if attack == "inverter" else {}
                keep(key, scores(restored, images) | trained_on, restored)
    finally:
        write()
    kept.unlink(missing_ok=True)


def references(train: Split, split: Split) -> dict[str, Float[np.ndarray, "n h w c"]]:
    """For each image of a split, its class's mean training image, and its class's nearest one to it, in [0, 1]."""
    mean, nearest = np.empty(split.images.shape), np.empty(split.images.shape)
    for label in np.unique(split.labels):
        own, of_class = train.images[train.labels == label].astype(np.float32) / 255, split.labels == label
        mean[of_class] = own.mean(axis=0)
        for i in np.flatnonzero(of_class):
            far = np.square(own - split.images[i].astype(np.float32) / 255)
            nearest[i] = own[far.sum(axis=(1, 2, 3)).argmin()]
    return dict(zip(REFERENCES, (mean, nearest), strict=True))


def accuracy(attacker: "Attacker", tier: dict[str, np.ndarray], split: Split, bits: int, noise: float) -> float:
    """Share of images that the tier's lanes, with these weights, classify right by what they get of them."""
    after = jax.jit(lambda weights, rows: attacker.part.after(weights, rows))
    sums = [after(tier, as_sent(some, bits, noise, i)) for i, some in enumerate(attacker.parts(split.images))]
    return float(np.mean(np.argmax(np.concatenate(sums), axis=1) == split.labels))


def keys_of(cut: str) -> list[tuple[str, str]]:
    """Each setting and attack that is measured at a cut."""
    return [
        (setting, attack)
        for setting in SETTINGS
        for attack in ("least squares", "optimisation", "inverter", "found")
        if attack != "least squares" or cut in _CONVOLUTIONS
    ]


def as_sent(values: Float[np.ndarray, "n size"], bits: int, noise: float, seed: int = 0) -> Float[np.ndarray, "n size"]:
    """The values as a tier gets them, in so many bits, with noise of so many of their standard deviations."""
    if noise:
        values = values + noise * values.std() * np.random.default_rng(seed).standard_normal(values.shape, np.float32)
    parts = [values[i : i + _BATCH] for i in range(0, len(values), _BATCH)]
    size = values.shape[1:]
    bodies = [wire.pack_request("", part, bits) for part in parts]
    return np.concatenate([wire.unpack_request(body, "", size, np.dtype("f4"), _BATCH)[1] for body in bodies])


class Attacker:
    """Restores images from the values at a cut, with the weights of what comes before it."""

    def __init__(self, part: Part, weights: dict[str, np.ndarray], train: np.ndarray, steps: int, epochs: int):
        self.part, self.steps, self.epochs = part, steps, epochs
        self.train = train[: max(_BATCH, _TRAINING_VALUES // int(np.prod(part.row.shape)))]
        self.weights = {name: jnp.asarray(array) for name, array in weights.items()}
        self.shape = part.spec.image_shape
        self._before = jax.jit(lambda pixels: part.before(self.weights, 255.0 * pixels))

    def values(self, images: np.ndarray) -> np.ndarray:
        """The values at the cut of uint8 images."""
        return np.concatenate(list(self.parts(images)))

    def parts(self, images: np.ndarray) -> Iterator[np.ndarray]:
        """The same, of some images at a time: those of all candidates do not fit the memory."""
        for i in range(0, len(images), _BATCH):
            yield np.asarray(self._before(images[i : i + _BATCH].astype(np.float32) / 255))

    def restore(
        self, attack: str, sent: np.ndarray, noise: float, again: Callable[[np.ndarray], np.ndarray]
    ) -> Float[np.ndarray, "n h w c"]:
        """Images in [0, 1] from what was sent; `again` sends values of the attacker's own images likewise."""
        if attack == "least squares":
            spread = noise / np.sqrt(1 + noise**2) * float(sent.std())  # of the noise
            return np.stack([self._least_squares(row, spread) for row in sent])
        if attack == "optimisation":
            return np.asarray(self._optimise(jnp.asarray(sent)))
        return self._invert(sent, again)

    def _least_squares(self, sent: np.ndarray, spread: float) -> np.ndarray:
        """Solves for the pixels from the values that are positive, of which the convolution's can be told.

        Under noise these are first the values that are clearly above it, then all where the image so found has any.
        """
        linear, constant = self._linear
        convolved = gelu_undone(sent) if self.part.cut == "stem" else sent

        def solved(passed: np.ndarray) -> np.ndarray:
            known = convolved[passed] - constant[passed]
            return lsmr(linear[passed], known, atol=1e-12, btol=1e-12, maxiter=2000)[0].clip(0, 1)

        found = solved(np.flatnonzero(sent > max(1e-6 * max(float(sent.max()), 1e-30), _CLEAR * spread)))
        if spread:
            found = solved(np.flatnonzero(linear @ found + constant > 0))
        return found.reshape(self.shape)

    @functools.cached_property
    def _linear(self) -> tuple[Any, np.ndarray]:
        """The first convolutions of all lanes as a sparse matrix of the pixels, and their constants."""
        matrices, constants = zip(*(self._matrix(kernel, bias) for kernel, bias in self._convolutions()), strict=True)
        return vstack(matrices).tocsr(), np.concatenate(constants)

    def _matrix(self, kernel: np.ndarray, bias: np.ndarray) -> tuple[Any, np.ndarray]:
        size = int(np.prod(self.shape))
        height, width, channels = self.shape
        taps, filters = kernel.shape[0], kernel.shape[-1]
        oh, ow = height - taps + 1, width - taps + 1
        y, x, f, i, j, c = np.ogrid[:oh, :ow, :filters, :taps, :taps, :channels]
        rows = np.broadcast_to((y * ow + x) * filters + f, (oh, ow, filters, taps, taps, channels)).ravel()
        columns = np.broadcast_to(
            ((y + i) * width + x + j) * channels + c, (oh, ow, filters, taps, taps, channels)
        ).ravel()
        entries = np.broadcast_to(kernel.transpose(3, 0, 1, 2), (oh, ow, filters, taps, taps, channels)).ravel()
        constant = np.tile(bias, oh * ow).astype(np.float64)
        if self.part.spec.signed_pixels:
            constant -= np.tile(kernel.sum(axis=(0, 1, 2)), oh * ow)
            entries = 2 * entries
        return coo_array((entries.astype(np.float64), (rows, columns)), (oh * ow * filters, size)), constant

    def _convolutions(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Kernel and bias of each lane's first convolution; those of a separable one are joined."""
        for group in self.part.spec.lane_groups:
            names = {name.split("/", 1)[1]: name for name in self.weights if name.split("/", 1)[0] == group.name}
            for i in range(group.count):
                own = {short: np.asarray(self.weights[name][i], np.float64) for short, name in names.items()}
                first = "conv1" if self.part.cut == "conv1" else f"trunk/{FROZEN}"
                kernel, bias = own[f"{first}/kernel"], own[f"{first}/bias"]
                if "conv1/depthwise" in own:
                    pointwise = own["conv1/depthwise"][:, None] * own["conv1/pointwise"]
                    bias = bias + np.einsum("m,hwmo->o", own["conv1/pointwise_bias"], kernel)
                    kernel = np.einsum("cm,hwmo->hwco", pointwise, kernel)
                yield kernel, bias

    def _optimise(self, sent: Array) -> Array:
        """Adam on logits of pixels, on the squared distance at the cut plus total variation."""
        scale = jnp.mean(jnp.square(sent)) + 1e-12

        def loss(logits: Array) -> Array:
            pixels = jax.nn.sigmoid(logits)
            far = jnp.mean(jnp.square(self.part.before(self.weights, 255.0 * pixels) - sent)) / scale
            variation = jnp.mean(jnp.abs(jnp.diff(pixels, axis=1))) + jnp.mean(jnp.abs(jnp.diff(pixels, axis=2)))
            return far + _TV * variation

        optimizer = optax.adam(0.1)

        @jax.jit
        def step(logits: Array, state: optax.OptState) -> tuple[Array, optax.OptState]:
            updates, state = optimizer.update(jax.grad(loss)(logits), state)
            return optax.apply_updates(logits, updates), state  # type: ignore[return-value]

        logits = jnp.zeros((len(sent), *self.shape))
        state = optimizer.init(logits)
        for _ in range(self.steps):
            logits, state = step(logits, state)
        return jax.nn.sigmoid(logits)

    @functools.cached_property
    def _training_values(self) -> np.ndarray:
        return self.values(self.train)

    def _invert(self, sent: np.ndarray, again: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """A network of one hidden layer, from values to pixels, trained on the attacker's own images."""
        values = again(self._training_values)
        targets = self.train.reshape(len(self.train), -1).astype(np.float32) / 255
        mean, spread = values.mean(axis=0), values.std(axis=0) + 1e-3
        keys = jax.random.split(jax.random.key(0))
        init = jax.nn.initializers.glorot_uniform()
        sizes = (values.shape[1], 512, targets.shape[1])
        pairs = zip(keys, itertools.pairwise(sizes), strict=True)
        params = [(init(key, pair), jnp.zeros(pair[1])) for key, pair in pairs]

        def apply(params: Any, x: Array) -> Array:
            (w1, b1), (w2, b2) = params
            hidden = jax.nn.relu((x - mean[None]) / spread[None] @ w1 + b1[None])
            return jax.nn.sigmoid(hidden @ w2 + b2[None])

        optimizer = optax.adam(1e-3)

        @jax.jit
        def step(params: Any, state: optax.OptState, x: Array, y: Array) -> tuple[Any, optax.OptState]:
            grads = jax.grad(lambda p: jnp.mean(jnp.square(apply(p, x) - y)))(params)
            updates, state = optimizer.update(grads, state)
            return optax.apply_updates(params, updates), state

        state = optimizer.init(params)
        for epoch in range(self.epochs):
            order = np.random.default_rng((0, epoch)).permutation(len(values))
            for start in range(0, len(order) - _BATCH + 1, _BATCH):
                batch = order[start : start + _BATCH]
                params, state = step(params, state, values[batch], targets[batch])
        return np.asarray(apply(params, jnp.asarray(sent))).reshape(-1, *self.shape)


def gelu_undone(values: np.ndarray) -> np.ndarray:
    """What gelu made these values from, where they are positive."""
    before = np.linspace(-0.5, max(float(values.max()), 0.0) + 1, 200_000)  # from where on it grows
    return np.interp(values, np.asarray(jax.nn.gelu(before)), before)


def share_found(sent: np.ndarray, candidates: Iterable[np.ndarray]) -> float:
    """Share of rows (or images) whose nearest candidate has the same index; candidates come some at a time."""
    nearest, least, start = np.zeros(len(sent), int), np.full(len(sent), np.inf), 0
    for part in candidates:
        for i, row in enumerate(sent):
            far = np.square(part - row).reshape(len(part), -1).sum(axis=1)
            if far.min() < least[i]:
                nearest[i], least[i] = start + int(far.argmin()), far.min()
        start += len(part)
    return float(np.mean(nearest == np.arange(len(sent))))


def scores(restored: np.ndarray, images: np.ndarray) -> dict[str, float]:
    """Medians over the images: PSNR in dB, and SSIM."""
    truth = images.astype(np.float64) / 255
    return {
        "psnr_db": float(np.median([psnr(a, b) for a, b in zip(restored, truth, strict=True)])),
        "ssim": float(np.median([ssim(a, b) for a, b in zip(restored, truth, strict=True)])),
    }


def psnr(a: np.ndarray, b: np.ndarray) -> float:
    """Peak signal-to-noise ratio of images in [0, 1], in dB."""
    return float(-10 * np.log10(max(float(np.mean(np.square(a - b))), 1e-20)))


def ssim(a: np.ndarray, b: np.ndarray) -> float:
    """Structural similarity of images [h, w, c] in [0, 1], with a Gaussian window of 1.5 pixels, mean over pixels.

    Source: Wang et al. 2004.
    """
    a, b = a.astype(np.float64), b.astype(np.float64)
    blur = functools.partial(gaussian_filter, sigma=(1.5, 1.5, 0), truncate=3.5)
    ma, mb = blur(a), blur(b)
    va, vb, both = blur(a * a) - ma**2, blur(b * b) - mb**2, blur(a * b) - ma * mb
    c1, c2 = 0.01**2, 0.03**2
    return float(np.mean((2 * ma * mb + c1) * (2 * both + c2) / ((ma**2 + mb**2 + c1) * (va + vb + c2))))


def report(results: dict[str, Any], path: Path) -> None:
    """Writes the table beside the JSON."""
    about = results["about"]
    lines = [
        "# What leaves the device gives the image away",
        "",
        f"The lanes of one tier, `{about['lanes']}`, {about['data']}; medians of {about['images']} test images, "
        f"`found` among {about['candidates']:,}. The attacker has the weights, and the inverter has been trained on so "
        "many training images as the table says: as many values of a cut as fit the memory. These are lower bounds on "
        "the leak: another attack may restore or find more. Rows where nothing was sent are references, what the class "
        "alone tells: its mean training image, and the one of its training images that is nearest to the test image.",
        "",
        f"Accuracy is that of the tier's lanes alone, by what was sent of {min(_ANSWERED, about['candidates']):,} test "
        f"images. Measured on {', '.join(sorted({time[:10] for time in results['starts']}))}, {about['device']}.",
        "",
        "| cut | sent as | attack | trained on | PSNR, dB | SSIM | found | accuracy |",
        "|" + " --- |" * 8,
    ]
    forms = {"training_images": ",", "psnr_db": ".1f", "ssim": ".3f", "found": ".1%", "accuracy": ".2%"}
    for key, row in results["rows"].items():
        setting = key.rpartition(", ")[0]
        told = row | ({"accuracy": results["accuracy"][setting]} if setting in results["accuracy"] else {})
        own = (format(told[name], form) if name in told else "" for name, form in forms.items())
        lines.append("| " + " | ".join((*key.split(", "), *own)) + " |")
    write_atomic(path.with_suffix(".md"), "\n".join(lines) + "\n")


def draw(pictures: dict[str, np.ndarray], images: np.ndarray, path: Path) -> None:
    """The images, and what was restored of them, uint8, a row for each cut, precision and attack."""
    rows = {"images": images, **{key.removeprefix("none, nothing, "): own for key, own in pictures.items()}}
    height, count = images.shape[1], len(images)
    shown = np.concatenate([np.concatenate(list(row), axis=1) for row in rows.values()])
    figure = Figure(figsize=(4.4 + count, len(rows)), layout="constrained")
    axis = figure.subplots()
    axis.imshow(shown.squeeze(), cmap="gray", vmin=0, vmax=255, interpolation="nearest")
    axis.set(xticks=[], yticks=[(i + 0.5) * height - 0.5 for i in range(len(rows))], yticklabels=list(rows))
    with replacing(path) as partial:
        figure.savefig(partial, format="png", dpi=80)


if __name__ == "__main__":
    launch_script(define, main)
