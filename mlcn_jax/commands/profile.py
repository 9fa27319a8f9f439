"""Measures how fast this device trains lanes and writes a profile (`DeviceProfile`); takes minutes.

    mlcn_jax profile --output=profile.json

Training steps of some lanes are compiled and timed; the profile holds a fit that predicts time and memory of all
others, the errors of that fit, the device's peak rates, and how much devices of one machine slow each other down. A
process that is bound to a number of cores needs a profile measured on the same number, for example `--cores=1`.

`--forms=mlcn2:w4,resnet:w1d2` also times these lanes in each precision and convolution algorithm, in training, with the
memory of a step, and in inference; int8 needs jax2onnx, onnx and onnxruntime. `describe --profiles` and `precision
--profiles` choose forms and devices from such profiles.
"""

import dataclasses
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl import flags

from mlcn_jax.commands import arguments
from mlcn_jax.errors import InputError

if TYPE_CHECKING:
    from mlcn_jax.nn.spec import ModelSpec


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_string("output", "profile.json", "Where to write the profile.", flag_values=values)
    define_measuring(values)
    hidden = ""  # for the processes that the command itself starts; JSON
    flags.DEFINE_string("link_worker", "", hidden, flag_values=values)
    flags.DEFINE_string("sharing_worker", "", hidden, flag_values=values)


def define_measuring(values: flags.FlagValues) -> None:
    """Defines the flags that determine what is measured."""
    text = "Number of cores to bind to; 0 uses all cores of this process."
    flags.DEFINE_integer("cores", 0, text, lower_bound=0, flag_values=values)
    text = "Dataset whose image shape and number of classes are used, or HEIGHTxWIDTHxCHANNELS:CLASSES."
    flags.DEFINE_string("data", "fashion_mnist", text, flag_values=values)
    flags.DEFINE_string("lane_routing", "published", "As config.model.lane_routing.", flag_values=values)
    flags.DEFINE_string("compute_dtype", "float32", "As config.model.compute_dtype.", flag_values=values)
    text = "Rounds of timing; in each, all programs take turns."
    flags.DEFINE_integer("rounds", 10, text, lower_bound=1, flag_values=values)
    text = "Lanes to time in each precision and algorithm too, as config.model.lanes; empty for none."
    flags.DEFINE_string("forms", "", text, flag_values=values)


def forms_of(spec: "ModelSpec", text: str, rounds: int) -> Iterator[dict[str, Any]]:
    """What a profile says of lanes, written as for model.lanes, in each form of training, then also of inference."""
    from mlcn_jax.analysis.measure_forms import measure_training
    from mlcn_jax.nn.lane_list import parse_lanes
    from mlcn_jax.serving.precision.speeds import inference_seconds

    lanes = [group.spec for group in parse_lanes(text)]
    seconds, num_bytes = measure_training(spec, lanes, rounds)
    yield {"form_seconds": seconds, "form_bytes": num_bytes}
    yield {"form_seconds": seconds | inference_seconds(spec, lanes, rounds)}


def main(argv: Sequence[str]) -> None:
    values = arguments.parse("profile", __doc__, define, argv)

    from mlcn_jax import host
    from mlcn_jax.analysis import measure_device, measure_machine
    from mlcn_jax.files import make_folder
    from mlcn_jax.nn.lane_list import parse_lanes

    host.compute_in_turn()  # before anything is computed, as `train` does
    if values.link_worker:
        measure_device.link_worker(**json.loads(values.link_worker))
        return
    if values.sharing_worker:
        measure_machine.sharing_worker(**json.loads(values.sharing_worker))
        return
    started = time.monotonic()
    spec = measure_device.lab_spec(values.data, values.lane_routing, values.compute_dtype)
    output = Path(values.output).expanduser()
    if output.is_dir():
        raise InputError(f"--output={output} is a folder: give the name of a file")
    if values.forms:
        parse_lanes(values.forms)  # so that a mistake is told before measuring
    make_folder(output.parent, "output")
    with measure_machine.measuring(values) as finish:
        lab = measure_device.Lab(spec)
        programs = measure_device.make_programs(lab)
        seconds = measure_device.typical_seconds(programs, values.rounds)
        machine = finish()
    profile = measure_device.make_profile(lab, programs, seconds, **machine)
    profile.save(output)  # at once, since forms may fail
    for found in forms_of(spec, values.forms, values.rounds) if values.forms else ():
        profile = dataclasses.replace(profile, **found)
        profile.save(output)
    print(measure_device.table(profile))
    print(f"{output} ({time.monotonic() - started:.0f} s)")
