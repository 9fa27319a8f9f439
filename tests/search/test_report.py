"""The config of a search's best model, as Python source."""

import ast
import runpy
import types

import pytest

from mlcn_jax.config import RunConfig
from mlcn_jax.search import report

HOSTILE = [
    '"""\nraise SystemExit("run")\n"""',
    "\nraise SystemExit('run')",
    "x'; raise SystemExit('run')#",
    "na\\Users",
    "\\",
    "\r\u2028\x1b[2J",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_what_data_gave_stays_data(tmp_path, text):
    device = {"device": text, "fill": 0.5, "lanes": text, "more": text}
    found = types.SimpleNamespace(
        settings=types.SimpleNamespace(method="random", num_epochs=1),
        config=RunConfig().replace({"data.dir": text}),
        space=types.SimpleNamespace(report=lambda mix: [device], buckets=[None]),
        trainer=types.SimpleNamespace(train=types.SimpleNamespace(labels=[1, 2, 3])),
    )
    winner = types.SimpleNamespace(index=0, lanes="mlcn1:w1d1*2", accuracies=[0.25], mix={})
    (tmp_path / text).mkdir()
    path = tmp_path / text / "best_config.py"
    report.write_config(found, winner, path)
    made = runpy.run_path(str(path))
    assert made["FOUND"]["devices"] == [{"device": text, "fill": 0.5, "lanes": text}]
    config = RunConfig.from_dict(made["get_config"]().to_dict())
    assert (config.data.dir, config.model["lanes"]) == (text, "mlcn1:w1d1*2")
    assert not [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Raise)]
