"""Inference against ONNX Runtime, Keras on TensorFlow and PyTorch, one image at a time and in batches.

    make bench-infer
    make bench-infer BENCH="--networks=mlcn1_4x4_28x28x1 --batches=1"

From uint8 images in host memory to lengths of class capsules there; no decoder. Two contestants are ours, both the
exported model as `mlcn_jax.Artifact` runs it, which computes 100 images as 64, 32 and 4: `mlcn_jax`, with XLA alone,
and `chosen`, with the runtime that is measured to be the fastest when a batch size is first used.
`ours_over_fastest_peer` compares the first with PyTorch and Keras, `chosen_over_fastest` the second with everything:
XLA alone and ONNX Runtime, too. Interleaved rounds, each of a quarter of a second for each of the contestants.
Lengths are checked to be equal first. Writes `benchmarks/results/inference.json` after each batch size of a network;
what is there of this machine is kept, and not measured again.
"""

import functools
import tempfile
from pathlib import Path

from absl import flags

from benchmarks import networks, peers
from benchmarks.frameworks import in_mlcn_jax
from mlcn_jax.launch import EXIT_FAILED, launch_script


def define(values: flags.FlagValues) -> None:
    peers.define_flags(values, "inference", [peers.ONNX, "keras", "torch"])
    peers.define_batches(values, [1, 8, 100])
    peers.define_onnx_python(values)


def main(values: flags.FlagValues) -> int:
    batches = peers.batches(values)
    results = peers.comparison_so_far(values, "infer")
    with_onnx = peers.ONNX in values.peers
    if with_onnx:
        peers.check_onnx_python(values.onnx_python)
    for network in networks.chosen(values.networks):
        with tempfile.TemporaryDirectory() as folder:
            python = values.onnx_python if with_onnx else ""
            prepared = functools.cache(
                functools.partial(in_mlcn_jax.prepare, network, Path(folder), "infer", values.dtype, python)
            )
            for batch in batches:
                name = f"{network.name}_batch_{batch}"
                with peers.kept(values, results, "networks", name) as missing:
                    if missing:
                        prepared()
                        results["networks"][name] = peers.compare(
                            *(network, batch, values.peers, "infer", values.rounds, values.dtype, values.peers_python),
                            Path(folder),
                        )
                        print(peers.table([results["networks"][name]]), flush=True)
    if results["networks"]:
        print(peers.table(list(results["networks"].values())))
    return EXIT_FAILED if results["failed"] else 0


if __name__ == "__main__":
    launch_script(define, main)
