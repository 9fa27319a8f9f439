"""`python -m mlcn_jax.serve FOLDER`: the command `serve` of the front door."""

from mlcn_jax.launch import launch
from mlcn_jax.serving.server import main

if __name__ == "__main__":
    launch(main)
