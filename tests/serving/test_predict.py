"""What `mlcn_jax.predict` prints."""

import sys
import types

import pytest

from mlcn_jax.serving import artifact, predict


def test_names_are_shown_and_not_obeyed(tmp_path, monkeypatch, capsys):
    good, bad = tmp_path / "a\x1b[2J\nb.png", tmp_path / "c\r\x1b]0;title\x07.png"
    found = [
        {"file": str(good), "class": "cat\x1b[1m", "probability": 0.5},
        {"file": str(bad), "error": "it is\nno image"},
    ]
    monkeypatch.setattr(artifact, "Artifact", lambda folder: None)
    monkeypatch.setattr(predict, "predict", lambda *args: found)
    monkeypatch.setattr(sys, "argv", ["predict", "export", str(good), str(bad)])
    monkeypatch.setattr(
        sys,
        "stdout",
        types.SimpleNamespace(reconfigure=lambda **how: None, write=sys.stdout.write, flush=sys.stdout.flush),
    )
    with pytest.raises(SystemExit):
        predict.main()
    out, err = capsys.readouterr()
    assert out == f"{tmp_path}/a\\x1b[2J\\nb.png: cat\\x1b[1m, 50.0%\n"
    assert err == f"{tmp_path}/c\\r\\x1b]0;title\\x07.png: it is\\nno image\n"


def test_usual_names_are_shown_as_they_are():
    assert predict.printable("größe 日本 (1).png: cat, 50.0%") == "größe 日本 (1).png: cat, 50.0%"
    assert predict.printable("\udcff") == "\\udcff"
