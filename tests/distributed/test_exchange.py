"""What stacks in several processes send each other."""

import jax
import ml_dtypes
import numpy as np

from mlcn_jax.distributed.exchange import AmongProcesses


def test_arrays_are_added_up_in_one_message_for_each_dtype(monkeypatch, rng):
    """Over the devices of one process, of which the first has its part and the others none."""
    exchange, sent = AmongProcesses(jax.devices()[:3], jax.devices()[0]), []
    over_mesh = exchange._over_mesh
    monkeypatch.setattr(exchange, "_over_mesh", lambda parts: sent.append(parts[0].dtype) or over_mesh(parts))
    tree = {
        "kernel": rng.normal(size=(3, 4)).astype(np.float32),
        "count": np.int32(7),
        "steps": np.array([2, 3], np.int32),
        "bias": rng.normal(size=5).astype(np.float32),
        "half": rng.normal(size=(2, 1)).astype(ml_dtypes.bfloat16),
        "nothing": {},
    }
    found = exchange.add_up(tree)
    jax.tree.map(np.testing.assert_array_equal, found, tree)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), found) == jax.tree.map(lambda x: (x.shape, x.dtype), tree)
    assert sorted(map(str, sent)) == ["bfloat16", "float32", "int32"]
    assert exchange.add_up({}) == {}
