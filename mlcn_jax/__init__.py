"""Multi-lane capsule networks (MLCN) in JAX and Flax."""
