"""`python -m mlcn_jax.predict FOLDER IMAGE ...`: the same as `mlcn_jax predict`."""

from mlcn_jax.launch import launch
from mlcn_jax.serving.predict import main

if __name__ == "__main__":
    launch(main)
