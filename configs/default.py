"""Every field of a run at its default; `mlcn_jax train --help` explains each.

The defaults are those of the dataclasses in `mlcn_jax/settings.py` and `mlcn_jax/nn/spec.py`.
"""

from mlcn_jax.config import default_config


def get_config():
    return default_config()
