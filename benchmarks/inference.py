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
from mlcn_jax.launch import launch_app

_PEERS = flags.DEFINE_list("peers", ["keras", "torch"], "frameworks to compare with: keras, torch; empty for none")
_NETWORKS = flags.DEFINE_list("networks", [n.name for n in networks.TARGETS], "; ".join(networks.NETWORKS))
_BATCHES = flags.DEFINE_list("batches", ["1", "100"], "images per call")
_ROUNDS = flags.DEFINE_integer("rounds", 10, "interleaved rounds", lower_bound=1)
_DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "type of convolutions and products")
_PYTHON = flags.DEFINE_string("peers_python", ".venv-peers/bin/python", "interpreter with benchmarks/requirements.txt")
_OUT = flags.DEFINE_string("out", str(peers.RESULTS / "inference.json"), "file to write")


def main(argv):
    del argv
    if _PEERS.value:
        peers.check_peers_python(_PYTHON.value)
    results = {"rounds": _ROUNDS.value, "dtype": _DTYPE.value, **host.environment(), "networks": {}}
    for name in _NETWORKS.value:
        network = networks.find(name)
        for batch in map(int, _BATCHES.value):
            results["networks"][f"{name}_batch_{batch}"] = peers.compare(
                network, batch, _PEERS.value, "infer", _ROUNDS.value, _DTYPE.value, _PYTHON.value
            )
            write_json(Path(_OUT.value), results)
    print(peers.table(list(results["networks"].values())))


if __name__ == "__main__":
    launch_app(main)
