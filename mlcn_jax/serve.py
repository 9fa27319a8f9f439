"""`python -m mlcn_jax.serve FOLDER`: the same as `mlcn_jax serve`."""

from mlcn_jax.launch import launch
from mlcn_jax.serving.server import main

if __name__ == "__main__":
    launch(main)
