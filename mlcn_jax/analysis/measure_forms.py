"""Times a training step of lanes in each form: the precision of their products, and the algorithm of convolutions."""

import dataclasses
from collections.abc import Container, Sequence

from mlcn_jax.analysis.measure_device import Lab, Program, typical_seconds
from mlcn_jax.errors import InputError
from mlcn_jax.nn import conv
from mlcn_jax.nn.lanes import LaneGroup, LaneSpec
from mlcn_jax.nn.spec import COMPUTE_DTYPES, ModelSpec
from mlcn_jax.placement.profile import FORM_BATCH

Measured = dict[str, dict[str, float]]  # by form and lane


def measure_training(spec: ModelSpec, lanes: Sequence[LaneSpec], rounds: int) -> tuple[Measured, Measured]:
    """What a training step of each lane takes: `DeviceProfile.form_seconds` and `form_bytes`."""
    programs = lane_programs(spec, lanes, FORM_BATCH)
    seconds: Measured = {}
    num_bytes: Measured = {}
    for (form, name), value in typical_seconds(programs, rounds).items():
        seconds.setdefault(form, {})[name] = value / FORM_BATCH
        num_bytes.setdefault(form, {})[name] = programs[form, name].bytes
    return seconds, num_bytes


def lane_programs(
    spec: ModelSpec, lanes: Sequence[LaneSpec], batch: int, forms: Container[str] | None = None
) -> dict[tuple, Program]:
    """A training step of each lane in each form that it has, or those of `forms`, by form and lane."""
    programs: dict[tuple, Program] = {}
    for dtype in COMPUTE_DTYPES:
        for algorithm in conv.ALGORITHMS:
            if forms is not None and f"train {dtype} {algorithm}" not in forms:
                continue
            lab = Lab(dataclasses.replace(spec, compute_dtype=dtype, conv=algorithm, norm_group=batch))
            for lane in lanes:
                try:
                    programs[f"train {dtype} {algorithm}", str(lane)] = lab.lane_step(LaneGroup(lane, 1), batch)
                except InputError:  # the algorithm cannot do a shape of this lane
                    continue
    return programs
