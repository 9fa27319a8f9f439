"""Parameters made up by NumPy: start values as JAX draws them take seconds to compile, and few tests are about them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mlcn_jax.nn import model
from mlcn_jax.nn.spec import ModelSpec


def like(shapes: Any, seed: int = 0) -> Any:
    """Random arrays of these shapes, as large as Glorot-uniform kernels and small biases."""
    rng = np.random.default_rng(seed)

    def draw(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        fan = max(2, int(np.prod(leaf.shape[-4:-1]))) if len(leaf.shape) > 1 else 400
        return jnp.asarray(rng.uniform(-1, 1, leaf.shape) * np.sqrt(3 / fan), jnp.float32)

    return jax.tree.map(draw, shapes)


def made_params(spec: ModelSpec, seed: int = 0) -> dict:
    """Parameters of a model."""
    return like(model.param_shapes(spec), seed)
