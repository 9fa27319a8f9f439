"""The optimizers of a run, built from optax."""

import optax


def make_optimizer(
    name: str,
    *,
    learning_rate: float,
    num_steps: int,
    steps_per_epoch: int,
    lr_decay: float = 0.9,
    warmup_steps: int = 0,
    weight_decay: float = 1e-4,
    clip_norm: float = 0.0,
) -> optax.GradientTransformation:
    """Adam as published, its rate multiplied by `lr_decay` after each epoch, or AdamW with warm-up and cosine decay.

    Adam's epsilon is 1e-7, the default of Keras, with which the published results were made.

    Args:
      name: `adam` or `adamw`.
      learning_rate: initial rate of Adam, peak rate of AdamW.
      num_steps: steps of the entire run, at the end of which AdamW's rate is zero.
      steps_per_epoch: steps after which Adam's rate decays.
      lr_decay: decay factor of Adam's rate.
      warmup_steps: steps of AdamW's warm-up, fewer than `num_steps`.
      weight_decay: weight decay of AdamW.
      clip_norm: largest global norm of the gradient; 0 turns clipping off.
    """
    if name == "adam":
        rate = optax.exponential_decay(learning_rate, steps_per_epoch, lr_decay, staircase=True)
        optimizer = optax.adam(rate, eps=1e-7)
    else:
        rate = optax.warmup_cosine_decay_schedule(0.0, learning_rate, min(warmup_steps, num_steps - 1), num_steps)
        optimizer = optax.adamw(rate, weight_decay=weight_decay)
    return optax.chain(optax.clip_by_global_norm(clip_norm), optimizer) if clip_norm else optimizer
