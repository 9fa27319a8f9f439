"""What `import mlcn_jax` gives, and the examples in docstrings and in the README."""

import doctest
import importlib
import os
import re
import subprocess
import sys

import pytest
from conftest import REPOSITORY

import mlcn_jax


@pytest.mark.parametrize("name", ["mlcn_jax", "mlcn_jax.nn.capsules", "mlcn_jax.nn.lane_list", "mlcn_jax.nn.model"])
def test_examples_in_docstrings_are_true(name):
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted > 0
    assert result.failed == 0


def test_every_public_name_is_there_and_documented():
    for name in mlcn_jax.__all__:
        assert getattr(mlcn_jax, name).__doc__
        assert name in dir(mlcn_jax)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = mlcn_jax.nothing


def test_importing_loads_neither_jax_nor_training_code():
    code = "import sys, mlcn_jax; print(sorted({'jax', 'flax', 'mlcn_jax.nn'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_example_in_the_readme_runs():
    (code,) = re.findall(r"```python\n(import .*?)```", (REPOSITORY / "README.md").read_text(), re.DOTALL)
    short = code.replace("range(30)", "range(3)")
    assert short != code
    cache = {"JAX_COMPILATION_CACHE_DIR": str(REPOSITORY / ".pytest_cache" / "docs")}  # its second run is quick
    cache |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    command = [sys.executable, "-c", short]
    done = subprocess.run(
        command, cwd=REPOSITORY, env={**os.environ, **cache}, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
