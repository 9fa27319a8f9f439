"""Inference throughput against Keras on TensorFlow and PyTorch, one image at a time and in batches.

    make bench
    python -m benchmarks.inference --peers=keras,torch

From uint8 images in host memory to class probabilities there; no decoder. Probabilities are checked to be equal
first. Writes `benchmarks/results/inference.json` after each network.
"""

from pathlib import Path

from absl import flags

from benchmarks import networks, peers
from mlcn_jax.files import write_json
from mlcn_jax.launch import launch_script


def define(values: flags.FlagValues) -> None:
    peers.define_flags(values, "inference")
    flags.DEFINE_list("batches", ["1", "8", "100"], "images per call", flag_values=values)


def main(values: flags.FlagValues) -> None:
    results = peers.no_results(values)
    for name in values.networks:
        network = networks.find(name)
        for batch in map(int, values.batches):
            results["networks"][f"{name}_batch_{batch}"] = peers.compare(
                network, batch, values.peers, "infer", values.rounds, values.dtype, values.peers_python
            )
            write_json(Path(values.out), results)
    print(peers.table(list(results["networks"].values())))


if __name__ == "__main__":
    launch_script(define, main)
