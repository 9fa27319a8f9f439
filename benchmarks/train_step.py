"""Training throughput against Keras on TensorFlow and PyTorch, and of CapsNet against MLCN.

    make bench
    python -m benchmarks.train_step --peers=keras,torch

The same network, start weights, batch and optimizer in every framework, checked first: losses of four steps must be
equal. Then interleaved rounds of about a second each. The networks of the thesis's table 4.1 then take turns in
mlcn_jax alone. Writes `benchmarks/results/train_step.json` after each network.
"""

import statistics
from pathlib import Path

from absl import flags

from benchmarks import networks, peers
from mlcn_jax import host
from mlcn_jax.files import write_json
from mlcn_jax.launch import launch_app

_PEERS = flags.DEFINE_list("peers", ["keras", "torch"], "frameworks to compare with: keras, torch; empty for none")
_NETWORKS = flags.DEFINE_list("networks", [n.name for n in networks.TARGETS], "; ".join(networks.NETWORKS))
_ROUNDS = flags.DEFINE_integer("rounds", 10, "interleaved rounds", lower_bound=1)
_DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "type of convolutions and products")
_FAMILIES = flags.DEFINE_bool("families", True, "also CapsNet against each MLCN of the thesis")
_PYTHON = flags.DEFINE_string("peers_python", ".venv-peers/bin/python", "interpreter with benchmarks/requirements.txt")
_OUT = flags.DEFINE_string("out", str(peers.RESULTS / "train_step.json"), "file to write")


def family(image_shape: tuple[int, int, int], rounds: int) -> dict[str, dict]:
    """CapsNet's step time over each MLCN's on one image shape, in mlcn_jax."""
    chosen = [n for n in networks.NETWORKS.values() if n.image_shape == image_shape]
    chosen.sort(key=lambda network: network.kind != "capsnet")
    processes = [peers.Process(peers.OURS, "vmap", n, networks.BATCH, _DTYPE.value, "") for n in chosen]
    warm = [peers.warm_up(process, "train") for process in processes]
    times = peers.take_turns(processes, "train", [max(2, round(1000 / w["milliseconds"])) for w in warm], rounds)
    results = {}
    for network, process, first, milliseconds in zip(chosen, processes, warm, times, strict=True):
        results[network.name] = {
            "title": network.title,
            "milliseconds": statistics.median(milliseconds),
            "first_step_seconds": first["first_seconds"],
            **process.ask("memory"),
        }
        if network.lanes:
            ratios = [capsnet / mlcn for capsnet, mlcn in zip(times[0], milliseconds, strict=True)]
            results[network.name]["capsnet_over_this"] = statistics.median(ratios)
            results[network.name]["thesis"] = networks.THESIS_CAPSNET_OVER.get(network.name)
        process.close()
    return results


def main(argv):
    del argv
    if _PEERS.value:
        peers.check_peers_python(_PYTHON.value)
    results = {"rounds": _ROUNDS.value, "dtype": _DTYPE.value, **host.environment(), "networks": {}}
    for name in _NETWORKS.value:
        network = networks.find(name)
        results["networks"][name] = peers.compare(
            network, networks.BATCH, _PEERS.value, "train", _ROUNDS.value, _DTYPE.value, _PYTHON.value
        )
        write_json(Path(_OUT.value), results)
        print(peers.table([results["networks"][name]]), flush=True)
    print(peers.table(list(results["networks"].values())))
    if _FAMILIES.value:
        results["families"] = {}
        for shape in (networks.FASHION, networks.CIFAR):
            results["families"] |= family(shape, _ROUNDS.value)
            write_json(Path(_OUT.value), results)
        for entry in results["families"].values():
            if "thesis" in entry:
                print(f"{entry['title']}: CapsNet takes {entry['capsnet_over_this']:.2f} times as long")


if __name__ == "__main__":
    launch_app(main)
