"""Writes the pages of the API reference: one for each folder of the package, one section for each module.

They are made anew by each build, so a new module cannot be missing from them.
"""

import ast
import pkgutil
from pathlib import Path

import mlcn_jax

# From the ground up, as in docs/design.md: what comes later may import what comes before. The rest follows by name.
ORDER = ("nn", "data", "placement", "distributed", "training", "search", "analysis", "serving")
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
