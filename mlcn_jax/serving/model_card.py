"""The model card of an export, its `README.md`: what the model is, its data, its accuracy and how to use it.

The manifest does not cover the card, so its owner may edit it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlcn_jax.serving.artifact import Artifact
from mlcn_jax.serving.predict import printable

FILE = "README.md"
_LISTED = 20  # classes whose accuracies are listed


def text(exported: Artifact, summary: Mapping[str, Any], data_dir: str = "") -> str:
    """The card in Markdown.

    Args:
      exported: the model.
      summary: what training wrote to `summary.json`; may be empty. Of lanes in several precisions, only what holds for
        them.
      data_dir: folder of the images; the card names only its last part.
    """
    description, versions = exported.description, exported.manifest["versions"]
    height, width, channels = exported.image_shape
    names = exported.class_names
    color = "gray" if channels == 1 else "RGB"
    packages = "jax, flatbuffers, numpy and Pillow"
    if exported.manifest.get("onnx"):
        packages = "jax, flatbuffers, numpy, onnxruntime and Pillow"
    return f"""# Image classifier, {len(names)} classes

- A capsule network, exported by mlcn_jax on {exported.manifest["date"]} with jax {versions["jax"]}.
- Lanes: {_code(description["lanes"])}, with {description["parameters"]:,} parameters, after
  {exported.manifest["step"]:,} training steps.
- Input: {color} images of {height}x{width} pixels; other pictures are converted and resized.
- Output: {description["output"]}.
- Classes: {", ".join(map(_code, names))}.

## Data

{_data(summary.get("data", {}), data_dir)}
The configuration of the run is in `config.json`.

## Accuracy

{_accuracy(summary, len(names), "onnx" in exported.manifest)}
This says nothing about other kinds of pictures, and every picture is assigned one of the classes above.

## Use

```bash
mlcn_jax predict FOLDER image.png          # this folder: class and probability
mlcn_jax predict FOLDER photos/ --json     # one JSON object per line
mlcn_jax serve FOLDER                      # HTTP, and a page at http://127.0.0.1:8000/
```

```python
import pathlib
import numpy as np
import mlcn_jax
from mlcn_jax.data.images import read_pixels

model = mlcn_jax.Artifact("FOLDER")
image = read_pixels(pathlib.Path("image.png"), model.image_shape)
print(dict(zip(model.class_names, model.probabilities(image[np.newaxis])[0])))
```

Predicting needs {packages}. The folder holds programs: use it only if you trust its source.
"""


def _data(data: Mapping[str, Any], data_dir: str) -> str:
    if not data:
        return "The run did not record its data."
    count = f", {data['train_images']:,} training images" if "train_images" in data else ""
    note = str(data.get("note", ""))
    if data_dir:
        folder = Path(data_dir).expanduser()
        note = note.replace(str(folder), folder.name)
    return f"{_code(data.get('name', 'unknown'))}{count}. {printable(note)}".rstrip()


def _accuracy(summary: Mapping[str, Any], num_classes: int, mixed: bool) -> str:
    if "test_accuracy" not in summary and mixed:
        return "Not measured on test images."
    if "test_accuracy" not in summary:
        return "Not measured when the model was exported; `mlcn_jax evaluate --workdir=WORKDIR` measures it."
    whole = f"{summary['test_accuracy']:.2%} of the test images are classified correctly.\n"
    per_class = summary.get("test_accuracy_per_class", {})
    if num_classes > _LISTED or not per_class:
        return whole
    rows = [f"| {_code(name)} | {'-' if a is None else f'{a:.1%}'} |" for name, a in per_class.items()]
    return "\n".join([whole, "| class | accuracy |", "| --- | --- |", *rows, ""])


def _code(name: Any) -> str:
    """A name as inline code on one line; class names are names of folders, which may contain any character."""
    shown = printable(str(name)).replace("`", "'").replace("|", "/")
    return f"`{shown}`"
