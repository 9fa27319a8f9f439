"""The folder of one tier: its lanes, the policy, and what "home", the gateway, computes for other tiers.

The folder is an artifact (`serving.artifact`): its manifest has the SHA-256 of each file. If a key was given, the
manifest is signed. Needs what reading an export needs; signatures need cryptography.
"""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mlcn_jax.errors import InputError
from mlcn_jax.launch import program
from mlcn_jax.serving.artifact import (
    MANIFEST,
    MODEL,
    WEIGHTS,
    Function,
    apply_in_batches,
    check_unchanged,
    load_functions,
    read_weights,
    reading,
    verified_manifest,
)
from mlcn_jax.serving.parts import PER_LANE, XLA, Functions, added_up, open_lanes
from mlcn_jax.tiers import signatures
from mlcn_jax.tiers.policy import FILE, Policy

SIGNATURE = "manifest.sig"
PART = "part"  # prefix of the weights, and stem of the functions, of a tier's own lanes
HOME = "home-"  # prefix of what is computed at home for a tier, before the name of that tier
_AGAIN = "split the model again"


class TierArtifact:
    """A verified artifact of one tier.

    Args:
      folder: one that `mlcn_jax tiers split` wrote for a tier.
      trusted: public keys (PEM files), one of which must have signed it; if empty, no signature is needed.

    Attributes:
      policy: the policy of the split.
      name: name of the tier.
      lanes: indices of its lanes.
      class_names, image_shape, step, exported, runtime: of the model, as for `artifact.Classifier`.
      row_shape, row_dtype: shape and dtype of what its lanes receive for one image.

    Raises:
      InputError: the folder is not such an artifact, was altered, is not signed by a trusted key, has lanes other
        than those in its policy, or cannot run here.
      OSError: the machine fails, as with too many open files.
    """

    def __init__(self, folder: str | Path, trusted: Sequence[Path] = ()):
        folder = Path(folder)
        with reading(folder, _AGAIN):
            _check_is_one_tier(folder)
            manifest = verified_manifest(folder, "a tier of a split model", "tiers split WORKDIR")
            _check_signature(folder, manifest, trusted)
        try:
            self._load(folder, manifest)
        finally:  # whatever was wrong with files of another split
            check_unchanged(folder, manifest)

    def _load(self, folder: Path, manifest: dict[str, Any]) -> None:
        if not (folder / FILE).is_file() or FILE not in manifest["files"]:
            raise InputError(
                f"{folder} is not a tier of a split model: it has no {FILE}; {program()} tiers split WORKDIR writes it"
            )
        self.policy = Policy.read(folder / FILE)
        with reading(folder, _AGAIN):
            about = json.loads((folder / MODEL).read_text())
            self.name, self.lanes = str(about["tier"]), tuple(about["lanes"])
            self.class_names, self.image_shape = tuple(about["class_names"]), tuple(about["image_shape"])
            self.row_shape, self.row_dtype = tuple(about["row_shape"]), np.dtype(about["row_dtype"])
            homes = [str(tier) for tier in about["home"]]
            self.step, self.exported = manifest["step"], manifest["date"]
            functions = [Function(**function) for function in manifest["functions"]]
            weights = read_weights(folder / WEIGHTS)
        if self.name not in self.policy.names or self.policy.tier(self.name).lanes != self.lanes:
            raise InputError(
                f"{folder} has the lanes {', '.join(map(str, self.lanes))} of tier {self.name}, but its policy gives "
                f"other lanes to that tier: {_AGAIN}"
            )

        sends = self.policy.names[1:] if self.name == self.policy.names[0] and self.policy.cut != "pixels" else ()
        if set(homes) != set(sends):
            raise InputError(
                f"{folder} has what is computed for {', '.join(homes) or 'no tier'} before anything is sent, but its "
                f"policy needs it for {', '.join(sends) or 'none'}: {_AGAIN}"
            )
        if not manifest.get("onnx") and not any(function.file.rsplit("-", 2)[0] == PART for function in functions):
            raise InputError(f"{folder} has no program of its lanes: {_AGAIN}")

        def load(stem: str, row: jax.ShapeDtypeStruct) -> Functions:
            own = {name.partition(":")[2]: a for name, a in weights.items() if name.partition(":")[0] == stem}
            chosen = [function for function in functions if function.file.rsplit("-", 2)[0] == stem]
            return load_functions(folder, chosen, jax.device_put(own), row, manifest) if chosen else []

        self._part = load(PART, jax.ShapeDtypeStruct(self.row_shape, self.row_dtype))
        self.runtime = XLA
        if files := manifest.get("onnx"):
            self._part = added_up(self._part, open_lanes(folder, files))
            self.runtime = PER_LANE
        image = jax.ShapeDtypeStruct(self.image_shape, jnp.uint8)
        self._home = {tier: load(HOME + tier, image) for tier in homes}

    def part(self, rows: np.ndarray) -> np.ndarray:
        """What this tier's lanes add to the squared length of each class capsule, float32 [n, classes].

        Args:
          rows: [n, then `row_shape`] of `row_dtype`, n at least 1.
        """
        return apply_in_batches(self._part, rows)

    def home(self, tier: str, images: np.ndarray) -> np.ndarray:
        """What another tier receives for images, uint8 [n, height, width, channels], n > 0: the values at the cut."""
        return images if self.policy.cut == "pixels" else apply_in_batches(self._home[tier], images)

    def warm_up(self, most: int) -> dict[str, dict[int, float]]:
        """Compiles what is computed at home for the other tiers, for up to `most` images.

        Returns:
          Seconds that it then takes, by tier, for 1, 2, 4 ... images; the last is `most` or more.
        """
        sizes = [1 << i for i in range((most - 1).bit_length() + 1)]
        return {tier: {size: self._home_seconds(tier, size) for size in sizes} for tier in self._home}

    def _home_seconds(self, tier: str, size: int) -> float:
        images = np.zeros((size, *self.image_shape), np.uint8)
        self.home(tier, images)
        started = time.perf_counter()
        self.home(tier, images)
        return time.perf_counter() - started


def _check_is_one_tier(folder: Path) -> None:
    """Raises InputError, which names them, for a folder that holds those of all tiers, and for the run that does."""
    inside = [path for pattern in ("*", "*/*") for path in folder.glob(f"{pattern}/{FILE}")]
    tiers = [] if (folder / FILE).is_file() else sorted(path.parent for path in inside)
    if tiers:
        raise InputError(
            f"{folder} holds the folders of several tiers: give that of one, {' or '.join(map(str, tiers))}"
        )


def _check_signature(folder: Path, manifest: dict[str, Any], trusted: Sequence[Path]) -> None:
    if not trusted:
        return
    path = folder / SIGNATURE
    keys = signatures.public_keys(trusted)
    named = ", ".join(map(str, trusted))
    again = f"give the public key of whoever signed it, or split the model with --key: {program()} tiers split --help"
    if not path.is_file():
        raise InputError(f"{folder} is not signed, but only what {named} signed is trusted: {again}")
    content = (folder / MANIFEST).read_bytes()
    if not signatures.is_signed(content, path.read_bytes(), keys) or json.loads(content) != manifest:
        raise InputError(f"{folder} is not signed by {named}: {again}")
