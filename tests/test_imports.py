"""What may be loaded: pure code loads nothing that is not pure, and loading anything has no effect."""

import subprocess
import sys

import pytest
from conftest import REPOSITORY

MODULES = [
    ".".join(path.relative_to(REPOSITORY).with_suffix("").parts)
    for folder in ("mlcn_jax", "experiments", "benchmarks")
    for path in sorted((REPOSITORY / folder).rglob("*.py"))
    if path.stem not in ("__init__", "__main__", "in_keras", "in_torch")  # the peers' packages are installed elsewhere
]
EXTRAS = (
    *("cryptography", "gradio", "grpc", "httptools", "httpx", "jax2onnx", "onnx", "onnxruntime", "optuna", "ortools"),
    *("prometheus_client", "python_multipart", "sqlalchemy", "starlette", "uvicorn", "uvloop"),
)
PURE = ("allocator", "data", "data.batches", "distributed", "distributed.mesh", "host")
PURE += ("training", "training.accumulate", "training.step")


def loaded_by(code: str) -> list[str]:
    """Modules of this package, and other packages, that a fresh interpreter loads for the code, besides JAX's."""
    code = f"""
import sys
import jax, flax.linen, flax.struct, jaxtyping, optax
known = {{name.partition(".")[0] for name in sys.modules}} | {{*sys.stdlib_module_names, "mlcn_jax"}}
{code}
loaded = {{name if name.startswith("mlcn_jax.") else name.partition(".")[0] for name in sys.modules}}
print(*sorted(loaded - known))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return result.stdout.split()


@pytest.mark.parametrize(
    ("code", "may"),
    [
        ("from mlcn_jax.nn import capsules, conv, lanes, losses, model, spec", ()),
        (
            "import mlcn_jax; mlcn_jax.make_train_step, mlcn_jax.TrainState, mlcn_jax.init_params",
            PURE,
        ),
    ],
)
def test_pure_code_loads_nothing_that_is_not_pure(code, may):
    allowed = {"mlcn_jax.errors", *(f"mlcn_jax.{name}" for name in may)}
    assert [name for name in loaded_by(code) if name not in allowed and not name.startswith("mlcn_jax.nn")] == []


def test_loading_anything_has_no_effect():
    """Libraries, which ours import too, are loaded before and may do what they like."""
    code = f"""
import importlib, logging, os, sys, warnings
import jax, flax, optax, orbax.checkpoint, ml_collections.config_flags, matplotlib.figure, PIL.Image, optuna, sqlalchemy
import grpc, tensorboardX, ortools.sat.python.cp_model, sklearn
from absl import flags

def state():
    loggers = [logging.root, *(logging.getLogger(name) for name in list(logging.root.manager.loggerDict))]
    levels = {{one.name: (one.level, one.handlers) for one in loggers if one.level or one.handlers}}
    return set(flags.FLAGS), list(warnings.filters), dict(os.environ), levels, sys.unraisablehook

before = state()
for name in {MODULES!r}:
    importlib.import_module(name)
    assert state() == before, name
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY, timeout=200)
    assert result.returncode == 0, result.stderr
    assert result.stdout == ""


def test_what_needs_a_package_that_is_not_installed_says_no_more_than_python_while_it_loads():
    """Commands say what to install; an error of ours at import would reach whoever only looks for a module."""
    code = f"""
import importlib, sys
for name in {EXTRAS!r}:
    sys.modules[name] = None
for name in {[name for name in MODULES if name.startswith("mlcn_jax")]!r}:
    try:
        importlib.import_module(name)
    except ImportError:
        pass
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=REPOSITORY, timeout=200)
