"""Scripts of `benchmarks` and `experiments`, imported side by side."""

import importlib
from types import ModuleType

from absl import flags


def load_script(name: str) -> ModuleType:
    """A script's module, its flags taken away again: scripts use the same names, and one process imports them all."""
    before = set(flags.FLAGS)
    module = importlib.import_module(name)
    for flag in set(flags.FLAGS) - before:
        delattr(flags.FLAGS, flag)
    return module
