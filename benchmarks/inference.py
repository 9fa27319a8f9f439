"""Inference throughput against Keras on TensorFlow and PyTorch, one image at a time and in batches.

    make bench
    python -m benchmarks.inference --peers=keras,torch

From uint8 images in host memory to class probabilities there; no decoder. Probabilities are checked to be equal
first. Writes `benchmarks/results/inference.json` after each network.
"""

from pathlib import Path

from absl import flags

from benchmarks import networks, peers
from mlcn_jax import host
from mlcn_jax.files import write_json
from mlcn_jax.launch import launch_script


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_list(
        "peers", ["keras", "torch"], "frameworks to compare with: keras, torch; empty for none", flag_values=values
    )
    flags.DEFINE_list("networks", [n.name for n in networks.TARGETS], "; ".join(networks.NETWORKS), flag_values=values)
    flags.DEFINE_list("batches", ["1", "100"], "images per call", flag_values=values)
    flags.DEFINE_integer("rounds", 10, "interleaved rounds", lower_bound=1, flag_values=values)
    flags.DEFINE_enum(
        "dtype", "float32", ["float32", "bfloat16"], "type of convolutions and products", flag_values=values
    )
    flags.DEFINE_string(
        "peers_python", ".venv-peers/bin/python", "interpreter with benchmarks/requirements.txt", flag_values=values
    )
    flags.DEFINE_string("out", str(peers.RESULTS / "inference.json"), "file to write", flag_values=values)


def main(values: flags.FlagValues) -> None:
    if values.peers:
        peers.check_peers_python(values.peers_python)
    results = {"rounds": values.rounds, "dtype": values.dtype, **host.environment(), "networks": {}}
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
