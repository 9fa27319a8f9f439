"""Training throughput against Keras on TensorFlow and PyTorch, and of CapsNet against MLCN.

    make bench-train
    make bench-train BENCH=--networks=resnet

The same network, start weights, batch and optimizer in every framework, checked first: losses of four steps must be
equal. Then interleaved rounds of about a second each. The networks of the thesis's table 4.1 then take turns in
mlcn_jax alone, where all of them were chosen. Writes `benchmarks/results/train_step.json` after each network; what is
there of this machine is kept, and not measured again.
"""

import statistics
import tempfile
from pathlib import Path

from absl import flags

from benchmarks import networks, peers
from benchmarks.frameworks import in_mlcn_jax
from mlcn_jax.launch import EXIT_FAILED, launch_script


def family(image_shape: tuple[int, int, int], rounds: int, dtype: str) -> dict[str, dict]:
    """CapsNet's step time over each MLCN's on one image shape, in mlcn_jax."""
    chosen = [n for n in networks.NETWORKS.values() if n.image_shape == image_shape and n.kind != "resnet"]
    chosen.sort(key=lambda network: network.kind != "capsnet")
    processes = [start(network, dtype) for network in chosen]
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


def start(network: networks.Network, dtype: str) -> peers.Process:
    """Our process, once it has read its weights."""
    with tempfile.TemporaryDirectory() as folder:
        in_mlcn_jax.prepare(network, Path(folder), "train", dtype)
        process = peers.Process(peers.OURS, "vmap", network, "train", network.batch, dtype, "", Path(folder))
        process.ask("about")
        return process


def define(values: flags.FlagValues) -> None:
    peers.define_flags(values, "train_step")


def main(values: flags.FlagValues) -> int:
    results = peers.comparison_so_far(values, "train")
    wanted = networks.chosen(values.networks)
    for network in wanted:
        with peers.kept(values, results, "networks", network.name) as missing, tempfile.TemporaryDirectory() as folder:
            if not missing:
                continue
            in_mlcn_jax.prepare(network, Path(folder), "train", values.dtype)
            results["networks"][network.name] = peers.compare(
                *(network, network.batch, values.peers, "train", values.rounds, values.dtype, values.peers_python),
                Path(folder),
            )
            print(peers.table([results["networks"][network.name]]), flush=True)
    if results["networks"]:
        print(peers.table(list(results["networks"].values())))
    for shape in (networks.FASHION, networks.CIFAR) if set(wanted) >= set(networks.SETS["published"]) else ():
        with peers.kept(values, results, "families", "x".join(map(str, shape))) as missing:
            if missing:
                found = family(shape, values.rounds, values.dtype)
                results["families"]["x".join(map(str, shape))] = {"networks": found}
                for entry in found.values():
                    if "thesis" in entry:
                        print(f"{entry['title']}: CapsNet takes {entry['capsnet_over_this']:.2f} times as long")
    return EXIT_FAILED if results["failed"] else 0


if __name__ == "__main__":
    launch_script(define, main)
