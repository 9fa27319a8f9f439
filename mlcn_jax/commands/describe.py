"""Prints as JSON what a configuration builds and how far it can scale. Trains nothing.

    mlcn_jax describe --config=capsnet_mnist
    mlcn_jax describe --workdir=runs/mlcn2
    mlcn_jax describe --config=mlcn1_fashion --memory_gib=2
    mlcn_jax describe --config=mlcn1_fashion --profile=profile.json --latency_seconds=5e-5 --bytes_per_second=1e9
    mlcn_jax describe --config=resnet_cifar --profiles=a.json,b.json

Lanes, parameters, FLOPs and the cost of each lane; work, depth and bytes of a training step by part, and Brent's bound.
With a device profile, a lower bound on the seconds of any split. With the speed of a link, the cost of communication
for each split, and with both, the number of devices from which it dominates. `--tables` prints these as tables instead.
With `--memory_gib`, also the predicted memory of a training step, and of settings with the same result that need less,
until one fits.
With `--profiles` of several devices that hold forms of the lanes (`profile --forms`), also the precision, convolution
algorithm and device of each lane in training, chosen together. A run can be trained in one precision only
(`model.compute_dtype`), so the time in each is printed beside it.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from mlcn_jax.commands import arguments
from mlcn_jax.commands.run_config import config_of
from mlcn_jax.errors import InputError


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_string("workdir", "", f"Instead of --config: {arguments.WORKDIR}", flag_values=values)
    flags.DEFINE_string("profile", "", "Profile of the devices, as the command profile writes it.", flag_values=values)
    text = "Profiles of devices with forms of the lanes, separated by commas: chooses form and device of each lane."
    flags.DEFINE_string("profiles", "", text, flag_values=values)
    text = "Latency of the link between devices; by default that of the profile."
    flags.DEFINE_float("latency_seconds", None, text, lower_bound=0.0, flag_values=values)
    flags.DEFINE_float("bytes_per_second", None, "Bandwidth of that link.", lower_bound=0.0, flag_values=values)
    flags.DEFINE_integer("devices", 64, "Largest number of devices in the tables.", lower_bound=1, flag_values=values)
    text = (
        "Memory of a device in GiB: also says whether a training step fits, and what makes it fit; 0 is this machine's."
    )
    flags.DEFINE_float("memory_gib", None, text, lower_bound=0.0, flag_values=values)
    flags.DEFINE_bool("tables", False, "Prints the scaling results as tables instead of JSON.", flag_values=values)


def main(argv: Sequence[str]) -> None:
    values = arguments.parse("describe", __doc__, define, argv, config="run")
    if (values.latency_seconds is None) != (values.bytes_per_second is None):
        raise InputError("--latency_seconds and --bytes_per_second describe one link: give both or neither")
    if values.workdir and values["config"].present:
        raise InputError(f"--config and --workdir={values.workdir} are given: give the one that is to be described")
    config = config_of(values, arguments.given_workdir(values) if values.workdir else None)

    from mlcn_jax.analysis.describe import describe
    from mlcn_jax.analysis.describe_work import tables
    from mlcn_jax.placement.profile import DeviceProfile
    from mlcn_jax.placement.simulate import Link

    profile = DeviceProfile.load(Path(values.profile).expanduser()) if values.profile else None
    link = None
    if values.latency_seconds is not None:
        link = Link(values.latency_seconds, values.bytes_per_second)
    elif profile is not None and profile.link:
        link = Link(**profile.link)
    found = describe(config, link, profile, values.devices)
    if values.memory_gib is not None:
        from mlcn_jax import host
        from mlcn_jax.analysis.fit_memory import fit_memory

        if not math.isfinite(values.memory_gib):
            raise InputError(
                f"--memory_gib={values.memory_gib} is not the memory of a device: give a number, or 0 for this machine"
            )
        available = round(values.memory_gib * 2**30) or host.usable_memory_bytes()
        found["memory"] = fit_memory(config, config.model_spec(*config.data.shape()), available)
    if values.profiles:
        from mlcn_jax.analysis.place_forms import place_training

        files = [Path(name.strip()).expanduser() for name in values.profiles.split(",") if name.strip()]
        found["forms"] = place_training(config.model_spec(*config.data.shape()), config.train.batch_size, files)
    if values.tables:
        print(tables(found["scaling"]))
        found = {name: found[name] for name in ("memory", "forms") if name in found}
    if found:
        print(json.dumps(found, indent=2))
