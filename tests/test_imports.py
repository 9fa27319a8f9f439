"""What may be loaded: pure code loads nothing that is not pure, and loading anything has no effect."""

import subprocess
import sys

import pytest

TRAINING_LOOP = ("orbax", "optuna", "sqlalchemy", "mlcn_jax.training.loop", "mlcn_jax.training.checkpoint", "absl.app")


def loaded_by(code: str, names: tuple[str, ...]) -> list[str]:
    """Which of the modules a fresh interpreter has loaded after the code."""
    show = f"{code}\nimport sys\nprint(*(n for n in {names!r} if n in sys.modules))"
    result = subprocess.run([sys.executable, "-c", show], capture_output=True, text=True, check=True, timeout=60)
    return result.stdout.split()


@pytest.mark.parametrize(
    "code",
    [
        "from mlcn_jax.nn import capsules, conv, lanes, losses, model",
        "import mlcn_jax; mlcn_jax.make_train_step, mlcn_jax.TrainState, mlcn_jax.init_params",
    ],
)
def test_pure_code_loads_nothing_that_is_not_pure(code):
    assert loaded_by(code, (*TRAINING_LOOP, "mlcn_jax.config", "tensorboardX", "matplotlib")) == []
