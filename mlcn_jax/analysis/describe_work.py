"""Work, depth and bytes of a training step, how far it can scale, and what each split costs in communication."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from mlcn_jax.analysis.fit_memory import first_of_each, is_good
from mlcn_jax.config import RunConfig
from mlcn_jax.distributed import mesh, traffic
from mlcn_jax.errors import InputError
from mlcn_jax.files import markdown
from mlcn_jax.nn import lanes
from mlcn_jax.nn.model import param_shapes
from mlcn_jax.nn.spec import ModelSpec
from mlcn_jax.placement import bounds, cost, work
from mlcn_jax.placement.profile import DeviceProfile
from mlcn_jax.placement.simulate import Link
from mlcn_jax.training import splits
from mlcn_jax.training.optimizer import optimizer_of
from mlcn_jax.training.session import step_options
from mlcn_jax.training.step import TrainState, head_loss, make_train_step

_STEPS_PER_EPOCH = 1000  # learning rates depend on it, work does not


def work_by_part(config: RunConfig, spec: ModelSpec) -> dict[str, tuple[int, work.Work]]:
    """Work of a training step, by part and in all, with how often each part occurs.

    The parts are a step of each kind of lane, and the head: loss, decoder, their gradients and the decoder's update.
    They are traced with the convolution algorithms that a run on this platform uses. `all` is the sum of their work;
    its depth is that of the whole step, traced with one lane of each kind because equal lanes count as parallel, plus
    the extra depth that the head has with all lanes, over which it reduces. CapsNet has no parts.
    """
    batch_size = config.train.batch_size
    if not spec.lane_groups:
        return {"all": (1, _whole(config, spec))}
    optimizer = optimizer_of(config.train, _STEPS_PER_EPOCH)
    images = jax.ShapeDtypeStruct((batch_size, *spec.image_shape), jnp.float32)
    parts: dict[str, tuple[int, work.Work]] = {}
    for group in spec.lane_groups:
        one = lanes.LaneGroup(group.spec, 1)
        step = cost.make_lane_step(one, spec.lane_settings, optimizer)

        def init(key, x, one=one):
            return lanes.init_group(key, one, 0, spec.lane_settings, x)

        params = jax.eval_shape(init, jax.random.key(0), jax.ShapeDtypeStruct((1, *spec.image_shape), jnp.float32))
        state = (params, jax.eval_shape(optimizer.init, params))
        columns = jax.ShapeDtypeStruct((batch_size, spec.num_classes, 1), _column_dtype(group, spec))
        parts[str(group.spec)] = (group.count, work.work_of(step, state, images, columns))
    head, few = _head(config, spec), first_of_each(spec, [1] * len(spec.lane_groups))
    parts["head"] = (1, head)
    depth = _whole(config, few).depth + head.depth - _head(config, few).depth
    parts["all"] = (1, work.combined(list(parts.values()), depth, _held(config, spec)))
    return parts


def _held(config: RunConfig, spec: ModelSpec) -> int:
    """Bytes of parameters and optimizer state, read and written, and of a batch of images, read."""
    optimizer = optimizer_of(config.train, _STEPS_PER_EPOCH)
    params = param_shapes(spec)
    state = jax.eval_shape(lambda params: TrainState.create(params, optimizer), params)
    held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    return 2 * held + config.train.batch_size * math.prod(spec.image_shape)


def _column_dtype(group: lanes.LaneGroup, spec: ModelSpec) -> Any:
    return jnp.float32 if group.kind.classifies else spec.dtype


def _head(config: RunConfig, spec: ModelSpec) -> work.Work:
    optimizer, weight = optimizer_of(config.train, _STEPS_PER_EPOCH), config.train.reconstruction_weight
    batch_size = config.train.batch_size
    decoder = param_shapes(spec)["decoder"]
    given = {"decoder": decoder}
    moments = jax.eval_shape(optimizer.init, given)
    v = jax.ShapeDtypeStruct((batch_size, spec.num_classes, len(spec.lane_specs)), spec.dtype)
    images = jax.ShapeDtypeStruct((batch_size, *spec.image_shape), jnp.float32)
    labels = jax.ShapeDtypeStruct((batch_size,), jnp.int32)

    def step(given, moments, v, images, labels):
        def loss(given, v):
            return head_loss(spec, weight, given["decoder"], v, images, labels, jax.random.key(0))[0]

        grads, dv = jax.grad(loss, argnums=(0, 1))(given, v)
        return optimizer.update(grads, moments, given), dv

    return work.work_of(step, given, moments, v, images, labels)


def _whole(config: RunConfig, spec: ModelSpec) -> work.Work:
    optimizer = optimizer_of(config.train, _STEPS_PER_EPOCH)
    step = make_train_step(spec, optimizer, **step_options(config))
    params = param_shapes(spec)
    state = jax.eval_shape(lambda params: TrainState.create(params, optimizer), params)
    batch_size = config.train.batch_size
    images = jax.ShapeDtypeStruct((batch_size, *spec.image_shape), jnp.uint8)
    return work.work_of(step, state, images, jax.ShapeDtypeStruct((batch_size,), jnp.int32))


def scaling(
    config: RunConfig, spec: ModelSpec, link: Link | None, profile: DeviceProfile | None, most_devices: int
) -> dict[str, Any]:
    """Work by part and Brent's bound; with a profile, the least seconds of any split; with a link, communication.

    Args:
      config, spec: the run and its model.
      link: the link between any two devices; None leaves communication out.
      profile: the profile of the devices; None leaves seconds out.
      most_devices: numbers of devices are powers of two up to this, and the number of lanes.

    Raises:
      InputError: the profile was measured with other lanes, or by a version that did not measure peak rates.
    """
    parts = work_by_part(config, spec)
    whole = parts["all"][1]
    counts = sorted({*(2**k for k in range(most_devices.bit_length())), min(most_devices, len(spec.lane_specs) or 1)})
    found: dict[str, Any] = {
        "work": {name: {"count": count, **part.to_dict()} for name, (count, part) in parts.items()},
        "brent_unit_operations": {n: bounds.brent(whole.work, whole.depth, n) for n in counts},
    }
    if profile is not None:
        found["seconds"] = _seconds(spec, config.train.batch_size, whole, profile, counts)
    if link is not None:
        alone = None
        if "predicted_on_one_device" in found.get("seconds", {}):
            assert profile is not None
            head = profile.head_seconds(len(spec.lane_specs), config.train.batch_size)
            alone = (found["seconds"]["predicted_on_one_device"], head)
        found["communication"] = _communication(config, spec, link, alone, counts)
    return found


def _seconds(
    spec: ModelSpec, batch_size: int, whole: work.Work, profile: DeviceProfile, counts: list[int]
) -> dict[str, Any]:
    if profile.peak is None:
        raise InputError(
            "the device profile has no peak rates, because an earlier version measured it: measure it again"
        )
    rates = (profile.peak["flops_per_second"], profile.peak["bytes_per_second"])
    costs = [cost.cost_of(spec, lane) for lane in spec.lane_specs]
    least = {n: bounds.least_seconds(whole.product_flops, whole.least_bytes, *rates, devices=n) for n in counts}
    if not costs:
        return {"least_by_devices": least}
    seconds = profile.model_seconds(costs, batch_size) + profile.head_seconds(len(spec.lane_specs), batch_size)
    sure = splits.interval(seconds, spec, [profile])
    within = [sure.low_seconds, sure.high_seconds] if sure else None
    return {"least_by_devices": least, "predicted_on_one_device": seconds, "90 % within": within}


def _communication(
    config: RunConfig, spec: ModelSpec, link: Link, alone: tuple[float, float] | None, counts: list[int]
) -> dict[str, Any]:
    """Seconds of communication by split and number of devices, and how far each split can scale.

    `alone` has the seconds of a step on one device and those of its head, which one device computes under stacks.
    """
    batch_size, dtype = config.train.batch_size, config.parallel.exchange_dtype
    column_bytes = splits.column_value_bytes(spec, dtype) * batch_size * spec.num_classes * len(spec.lane_specs)

    def bytes_of(split: str, devices: int) -> float:
        if devices == 1:
            return 0.0
        if split == "stacks":
            return column_bytes
        sizes = (devices, 1) if split == "data" else (1, devices)
        moved = traffic.exchanged_bytes(spec, batch_size, *sizes, dtype)
        return moved["all-reduce"] + moved["all-gather"]  # the scatter is the other half of the gather

    found = {}
    for split in ("data", "lane", "stacks"):
        most = batch_size if split == "data" else len(spec.lane_specs)
        moved = {n: bytes_of(split, n) for n in range(2, most + 1) if _divides(spec, batch_size, split, n)}
        rows = {n: {"bytes": moved[n]} | bounds.communication(n, moved[n], link) for n in counts if n in moved}
        found[split] = {"by_devices": rows}
        if alone is not None and moved:
            seconds, head = alone
            found[split] |= dataclasses.asdict(bounds.limit(seconds, moved, link, head if split == "stacks" else 0.0))
    hybrids = {n: _hybrid(config, spec, link, n) for n in counts}
    return found | {"hybrid": {"by_devices": {n: row for n, row in hybrids.items() if row}}}


def _hybrid(config: RunConfig, spec: ModelSpec, link: Link, devices: int) -> dict[str, Any] | None:
    """The mesh over both batch and lanes with the least communication; None if there is no such mesh.

    Gradients are summed over the `data` devices that hold the same lanes, columns and the decoder's layers gathered
    over the `lane` devices that hold the same images.
    """
    batch_size, dtype = config.train.batch_size, config.parallel.exchange_dtype
    rows = []
    for data in (n for n in range(2, devices // 2 + 1) if devices % n == 0):
        lane = devices // data
        if is_good(mesh.check_split, spec, batch_size, data, lane):
            moved = traffic.exchanged_bytes(spec, batch_size, data, lane, dtype)
            sums, gathers = moved["all-reduce"], moved["all-gather"]
            both = bounds.communication(data, sums, link), bounds.communication(lane, gathers, link)
            seconds = {name: both[0][name] + both[1][name] for name in both[0]}
            rows.append({"data": data, "lane": lane, "bytes": sums + gathers, **seconds})
    return min(rows, key=lambda row: min(row[name] for name in bounds.ALGORITHMS), default=None)


def _divides(spec: ModelSpec, batch_size: int, split: str, devices: int) -> bool:
    if split == "stacks":
        return devices <= len(spec.lane_specs)
    return is_good(mesh.check_split, spec, batch_size, *((devices, 1) if split == "data" else (1, devices)))


def tables(found: dict[str, Any]) -> str:
    """The findings as Markdown tables."""
    keys = ("work", "depth", "parallelism", "moved_bytes", "intensity")
    rows = [[name, part["count"], *(f"{part[key]:.3g}" for key in keys)] for name, part in found["work"].items()]
    lines = [markdown(["part", "count", "W", "D", "W/D", "bytes moved", "W / bytes"], rows)]
    least = found.get("seconds", {}).get("least_by_devices", {})
    ends = found["brent_unit_operations"].items()
    rows = [[n, f"{low:.3g}", f"{high:.3g}", _number(least.get(n))] for n, (low, high) in ends]
    head = ["devices", "sequential operations: lower bound", "upper bound", "seconds: lower bound"]
    lines += ["", markdown(head, rows)]
    for split, row in found.get("communication", {}).items():
        names = ["bytes", *bounds.ALGORITHMS, "least_latency", "least_bytes"]
        rows = []
        for n, values in row["by_devices"].items():
            devices = f"{values['data']} x {values['lane']}" if split == "hybrid" else n
            rows.append([devices, *(_number(values[name]) for name in names)])
        lines += ["", markdown([f"{split}: devices", *names], rows)]
        if "best_speedup" in row:
            at, best = row["outweighed_at"], row["at_devices"]
            lines.append(
                f"\n{split}: communication dominates "
                + (f"from {at} devices on" if at else "at no possible number of devices")
                + f"; maximum speed-up {row['best_speedup']:.1f}, on {best} device{'s' * (best != 1)}"
            )
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "" if value is None or math.isnan(value) else f"{value:.3g}"
