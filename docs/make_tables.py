"""Fills the tables, figures and messages of README.md and docs/ from the committed JSON and from the code.

    python docs/make_tables.py            # rewrites what lies between the marks
    python docs/make_tables.py --check    # exit code 1, and the places, where a page differs

A page marks a place with two comments, and what lies between them is made here:

    <!-- made: NAME -->
    <!-- end -->

NAME is a function of docs/tables, or of docs/error_messages.py, which makes error messages by provoking them.
A test runs the check, so that no figure can differ from what was measured, and no message from what the code says.
"""

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import tables

sys.path.append(str(Path(__file__).parents[1]))  # mlcn_jax, also where it is not installed
ROOT = Path(__file__).parents[1]
_PLACE = re.compile(r"<!-- made: (\w+) -->\n(.*?)<!-- end -->", re.DOTALL)


def pages() -> list[Path]:
    """README and every page of the docs that is not itself made by a build."""
    found = (ROOT / "docs").rglob("*.md")
    skipped = {"_build", "reference"}
    return [ROOT / "README.md", *sorted(page for page in found if not skipped & set(page.relative_to(ROOT).parts))]


def places(text: str) -> Iterator[tuple[str, str]]:
    """The name of each place in a page, and what it holds now."""
    return ((match[1], match[2]) for match in _PLACE.finditer(text))


def made(name: str) -> str:
    """What belongs between the marks of `name`."""
    os.environ.update(JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES="1")
    with mock.patch("shutil.which", return_value="mlcn_jax"):  # as where the package is installed
        if name in tables.MADE:
            return f"\n{tables.MADE[name]().strip()}\n\n"
        import error_messages  # loads JAX, which most tables do without

        return f"\n{error_messages.MADE[name]().strip()}\n\n"


def filled(text: str) -> str:
    """A page with every place made anew."""
    return _PLACE.sub(lambda match: f"<!-- made: {match[1]} -->\n{made(match[1])}<!-- end -->", text)


def main(arguments: list[str]) -> int:
    wrong = []
    for page in pages():
        text = page.read_text(encoding="utf-8")
        new = filled(text)
        if new == text:
            continue
        if "--check" in arguments:
            wrong += [f"{page.relative_to(ROOT)}: {name}" for name, now in places(text) if now != made(name)]
        else:
            page.write_text(new, encoding="utf-8")
            print(f"wrote {page.relative_to(ROOT)}")
    if wrong:
        print("these places differ from the measurements; run python docs/make_tables.py:", *wrong, sep="\n  ")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
