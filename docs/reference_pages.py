"""Writes the pages of the reference: one for each folder of the package, and one for the commands.

They are made anew by each build, so a new module, command or flag cannot be missing from them.
"""

import ast
import contextlib
import io
import os
import pkgutil
import sys
from pathlib import Path
from unittest import mock

import mlcn_jax
from mlcn_jax.commands import front

# From the ground up, as in docs/design.md: what comes later may import what comes before. The rest follows by name.
ORDER = (
    *("nn", "data", "placement", "distributed", "training", "rounds", "search", "analysis"),
    *("serving", "serving.precision", "tiers"),
)
_ROOT = Path(mlcn_jax.__file__).parent


def modules() -> dict[str, list[str]]:
    """The modules of each folder, by full name; those beside the folders come under the empty name."""
    found: dict[str, list[str]] = {}
    for module in pkgutil.walk_packages([str(_ROOT)], "mlcn_jax."):
        parts = module.name.split(".")
        # Commands define flags when they are imported, each its own; the page "Commands" has what they take.
        hidden = parts[1] == "commands" or any(part.startswith("_") for part in parts)
        if not module.ispkg and not hidden:
            found.setdefault(".".join(parts[1:-1]), []).append(module.name)
    return found


def write(folder: Path) -> None:
    """Writes the pages into `folder`; leaves alone those that would stay the same, so that builds are quick."""
    found = modules()
    names = sorted(filter(None, found), key=lambda name: (ORDER.index(name) if name in ORDER else len(ORDER), name))
    pages = {"index": _index(names), "top": _page("mlcn_jax", "The package itself", ["mlcn_jax", *found[""]])}
    for name in names:
        pages[name] = _page(f"mlcn_jax.{name}", "", [f"mlcn_jax.{name}", *found[name]])
    pages["commands"] = _commands_page()
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.md"):
        if old.stem not in pages:
            old.unlink()
    for name, text in pages.items():
        path = folder / f"{name}.md"
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


def _index(names: list[str]) -> str:
    rows = "\n".join(("top", *names))
    return (
        "# API reference\n\nMade from the docstrings. `import mlcn_jax` gives the names that most programs need; they\n"
        "are listed first. The folders follow in the order in which they build on each other.\n\n"
        f"```{{toctree}}\n:maxdepth: 1\n\n{rows}\n```\n"
    )


def _page(title: str, subtitle: str, names: list[str]) -> str:
    lines = [f"# {title}", ""]
    if subtitle:
        lines += [subtitle + ".", ""]
    for name in names:
        if not _has_docstring(name):
            continue
        if name != title:
            lines += [f"## {name}", ""]
        lines += ["```{eval-rst}", f".. automodule:: {name}", "```", ""]
    return "\n".join(lines)


def _has_docstring(name: str) -> bool:
    path = _ROOT.parent.joinpath(*name.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return bool(ast.get_docstring(ast.parse(file.read_text())))


def help_of() -> dict[str, str]:
    """What `mlcn_jax COMMAND --help` prints, for each command."""
    texts = {}
    for name in front.COMMANDS:
        printed = io.StringIO()
        with (
            mock.patch.object(sys, "argv", ["mlcn_jax", name, "--help"]),
            mock.patch.dict(os.environ, {"COLUMNS": "100"}),
            mock.patch("shutil.which", return_value="mlcn_jax"),  # as where the package is installed
            contextlib.redirect_stdout(printed),
            contextlib.suppress(SystemExit),
        ):
            front.run([name, "--help"])
        texts[name] = printed.getvalue()
    return texts


def _commands_page() -> str:
    lines = ["# Commands", "", "What `mlcn_jax COMMAND --help` prints.", ""]
    for name, text in help_of().items():
        lines += [f"## {name}", "", "```text", text.strip(), "```", ""]
    return "\n".join(lines)
