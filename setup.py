"""The packages of the wheel, which setup.cfg cannot name: `configs/` becomes `mlcn_jax.configs`. All else is there."""

from setuptools import find_packages, setup

setup(packages=[*find_packages(include=["mlcn_jax*"]), "mlcn_jax.configs"], package_dir={"mlcn_jax.configs": "configs"})
