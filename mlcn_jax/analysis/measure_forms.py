"""Times a training step of lanes in each form: the precision of their products, and the algorithm of convolutions."""

import dataclasses
from collections.abc import Sequence

from mlcn_jax.analysis.measure_device import Lab, Program, typical_seconds
from mlcn_jax.errors import InputError
from mlcn_jax.nn import conv
from mlcn_jax.nn.lanes import LaneGroup, LaneSpec
from mlcn_jax.nn.spec import COMPUTE_DTYPES, ModelSpec

BATCH = 50


def training_seconds(spec: ModelSpec, lanes: Sequence[LaneSpec], rounds: int) -> dict[str, dict[str, float]]:
    """Seconds for each image of a training step of each lane, by form, for `DeviceProfile.form_seconds`."""
    found: dict[str, dict[str, float]] = {}
    for (form, name), seconds in typical_seconds(lane_programs(spec, lanes, BATCH), rounds).items():
        found.setdefault(form, {})[name] = seconds / BATCH
    return found


def lane_programs(spec: ModelSpec, lanes: Sequence[LaneSpec], batch: int) -> dict[tuple, Program]:
    """A training step of each lane in each form that it has, by form and lane."""
    programs: dict[tuple, Program] = {}
    for dtype in COMPUTE_DTYPES:
        for algorithm in conv.ALGORITHMS:
            lab = Lab(dataclasses.replace(spec, compute_dtype=dtype, conv=algorithm, norm_group=batch))
            for lane in lanes:
                try:
                    programs[f"train {dtype} {algorithm}", str(lane)] = lab.lane_step(LaneGroup(lane, 1), batch)
                except InputError:  # the algorithm cannot do a shape of this lane
                    continue
    return programs
