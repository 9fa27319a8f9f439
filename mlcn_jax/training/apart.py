"""Lanes trained apart: whether a lane's training depends on the other lanes of its run."""

from collections.abc import Sequence

from mlcn_jax.config import RunConfig, flat
from mlcn_jax.errors import InputError
from mlcn_jax.nn.spec import ModelSpec


def check_lanes_apart(config: RunConfig, spec: ModelSpec) -> None:
    """Raises InputError, naming every setting that couples the lanes and what to give instead.

    A lane then learns the same whether it is trained alone or beside others, if the other settings are the same.
    """
    if not spec.lane_groups:
        raise InputError(
            "train.lanes_apart is set for CapsNet, which has no lanes: leave it unset, or use model.name=mlcn"
        )
    couplings = (
        *couplings_of_losses(spec, config.train.clip_norm),
        (
            not spec.lane_seeds,
            "model.lane_seeds",
            f"start values depend on a lane's place: give {len(spec.lane_specs)} seeds",
        ),
        (
            config.train.rounds.steps > 0 and config.train.rounds.bits < 32,
            "train.rounds.bits",
            "changes of several lanes are sent with one scale: give 32",
        ),
        (
            config.data.validation_fraction > 0 and config.data.split_seed < 0,
            "data.split_seed",
            "train.seed moves the validation images: give a seed, the same for all lanes to be joined",
        ),
    )
    values = flat(config.to_dict())
    if rows := [f"  {field} is {values[field]!r}; {reason}" for coupled, field, reason in couplings if coupled]:
        raise InputError(
            "train.lanes_apart is set, but a lane's training would depend on the others:\n" + "\n".join(rows)
        )


def couplings_of_losses(spec: ModelSpec, clip_norm: float) -> Sequence[tuple[bool, str, str]]:
    """What can couple the gradients of lanes: whether it does, the setting, and what to give instead."""
    published = not spec.classifies_alone.all()
    whole = "a lane's loss depends on the others: give"
    return (
        (published and spec.margin_loss != "per_lane_sum", "model.margin_loss", f"{whole} per_lane_sum"),
        (spec.ensemble_weight > 0, "model.ensemble_weight", f"{whole} 0"),
        (spec.lane_dropout > 0, "model.lane_dropout", f"{whole} 0"),
        (
            spec.decoder_gradient == "all" or (published and spec.decoder_gradient == "auto"),
            "model.decoder_gradient",
            "the decoder sees all lanes, and its gradient trains them: give none",
        ),
        (clip_norm > 0, "train.clip_norm", "the norm is that of all lanes' gradients: give 0"),
    )
