"""Multi-lane capsule networks (MLCN) in JAX and Flax.

Names are loaded on first use, so that classifying with an `Artifact` loads no training code.

    >>> import jax, jax.numpy as jnp, mlcn_jax, optax
    >>> spec = mlcn_jax.ModelSpec("mlcn", image_shape=(28, 28, 1), num_classes=10, lanes="mlcn1:w1*2,mlcn2:w1d2")
    >>> mlcn_jax.count_parameters(spec)["per_lane"]
    [27896, 27896, 19409]
    >>> params = mlcn_jax.init_params(spec, jax.random.key(0))
    >>> v, reconstructions = mlcn_jax.apply_model(spec, params, jnp.zeros((5, 28, 28, 1)))
    >>> v.shape, reconstructions.shape
    ((5, 10, 3), (5, 28, 28, 1))
    >>> mlcn_jax.class_lengths(spec, v).shape
    (5, 10)
    >>> optimizer = optax.adam(1e-3)
    >>> train_step = jax.jit(mlcn_jax.make_train_step(spec, optimizer, reconstruction_weight=0.392, seed=0))
    >>> state = mlcn_jax.TrainState.create(params, optimizer)
    >>> images, labels = jnp.zeros((5, 28, 28, 1), jnp.uint8), jnp.array([3, 1, 4, 1, 5])
    >>> state, metrics = train_step(state, images, labels)
    >>> int(state.step), sorted(metrics)
    (1, ['accuracy', 'grad_norm', 'loss', 'margin', 'reconstruction'])

`load_trained(workdir)` reads the best checkpoint of a training run, as a `Trained` with `spec`, `params` and
`class_names`; `Artifact(folder)` reads a model written by `mlcn_jax export`, and its `probabilities(images)`
classifies.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlcn_jax.errors import InputError as InputError
    from mlcn_jax.nn.calibration import calibrate as calibrate
    from mlcn_jax.nn.calibration import whiten as whiten
    from mlcn_jax.nn.capsules import lengths as lengths
    from mlcn_jax.nn.model import apply_model as apply_model
    from mlcn_jax.nn.model import class_lengths as class_lengths
    from mlcn_jax.nn.model import class_probabilities as class_probabilities
    from mlcn_jax.nn.model import count_parameters as count_parameters
    from mlcn_jax.nn.model import init_params as init_params
    from mlcn_jax.nn.spec import ModelSpec as ModelSpec
    from mlcn_jax.serving.artifact import Artifact as Artifact
    from mlcn_jax.training.step import TrainState as TrainState
    from mlcn_jax.training.step import make_train_step as make_train_step
    from mlcn_jax.training.trained import Trained as Trained
    from mlcn_jax.training.trained import load_trained as load_trained

_PLACES = {
    "Artifact": "serving.artifact",
    "InputError": "errors",
    "ModelSpec": "nn.spec",
    "TrainState": "training.step",
    "Trained": "training.trained",
    "apply_model": "nn.model",
    "calibrate": "nn.calibration",
    "class_lengths": "nn.model",
    "class_probabilities": "nn.model",
    "count_parameters": "nn.model",
    "init_params": "nn.model",
    "lengths": "nn.capsules",
    "load_trained": "training.trained",
    "make_train_step": "training.step",
    "whiten": "nn.calibration",
}
__all__ = list(_PLACES)


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PLACES})
