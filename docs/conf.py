"""Sphinx's settings: pages in MyST Markdown, and an API reference made from the docstrings."""

import sys
from pathlib import Path

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS), str(DOCS.parent)]

import reference_pages  # noqa: E402

project = "mlcn_jax"
copyright = "the mlcn_jax contributors"
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "mlcn_jax"
html_static_path: list[str] = []

myst_enable_extensions = ["dollarmath", "deflist", "colon_fence"]
myst_heading_anchors = 3

# Docstrings write code as `code`, in Google style.
default_role = "code"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
autodoc_default_options = {"members": True, "member-order": "bysource", "show-inheritance": False}
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
# What `import mlcn_jax` gives is listed twice: there, and in the module that defines it.
suppress_warnings = ["ref.python"]

# `>>>` and `$` are not copied.
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

reference_pages.write(DOCS / "reference")
