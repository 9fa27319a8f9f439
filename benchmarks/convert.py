"""Converts a network's export to ONNX, for `benchmarks.inference`; runs in the environment of `make onnx`.

    .venv-onnx/bin/python -m benchmarks.convert FOLDER

Reads `FOLDER/export`; writes `FOLDER/onnx/model.onnx` and, beside it, what `mlcn_jax.serving.runtime` checks.
"""

import sys
from pathlib import Path

from mlcn_jax import host
from mlcn_jax.files import write_json
from mlcn_jax.serving import onnx


def main(folder: Path) -> None:
    onnx.versions()  # says which package is missing
    model = onnx.read_export(folder)
    path = folder / "onnx" / "model.onnx"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(onnx.convert(model).SerializeToString())
    known = {"export": model.artifact.manifest["sha256"], "sha256": host.sha256_of(path)}
    write_json(path.with_suffix(".json"), known)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
