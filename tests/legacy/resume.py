"""The configuration that `workdir/config.json` holds."""

import json
from pathlib import Path

from ml_collections import ConfigDict


def get_config():
    return ConfigDict(json.loads((Path(__file__).parent / "workdir" / "config.json").read_text()))
