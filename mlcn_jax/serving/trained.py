"""A classifier from a training workdir that was not exported; needs the training code."""

import functools
from pathlib import Path

import jax

from mlcn_jax import host
from mlcn_jax.data.batches import to_pixels
from mlcn_jax.nn.calibration import fold_statistics
from mlcn_jax.nn.model import class_lengths, encode
from mlcn_jax.serving.artifact import Classifier, apply_in_batches
from mlcn_jax.training.trained import load_trained


class TrainedModel(Classifier):
    """The best checkpoint of a workdir, which classifies just as its export would.

    Raises:
      InputError: the workdir does not hold a trained model.
    """

    def __init__(self, workdir: Path):
        host.set_up_jax()
        trained = load_trained(workdir)
        spec = trained.spec
        self.class_names, self.image_shape, self.step = trained.class_names, spec.image_shape, trained.step
        self._certain_length, self._probability_power = spec.certain_length, spec.probability_power
        encoder = fold_statistics(spec, trained.params)["encoder"]
        lengths = jax.jit(
            lambda images: class_lengths(spec, encode(spec, encoder, to_pixels(images))),
            compiler_options=spec.compiler_options(jax.default_backend()),
        )
        self._compute = functools.partial(apply_in_batches, [(1, lengths)])
