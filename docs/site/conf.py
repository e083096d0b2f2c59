"""Configuration of the docs site, which `make docs` builds into build/site with Sphinx.

The source directory is the repository, so that links between Markdown files work here and in the repository. The site
needs no network, and its search works in files that are opened without a server.
"""

from __future__ import annotations

import re
from typing import Any

project = "mergesearch"
root_doc = "docs/index"
include_patterns = ["docs/**.md", "workers/merging/methods/README.md", "README.md", "CONTRIBUTING.md", "CHANGELOG.md"]
exclude_patterns = [".*", "build", "runs", "tests", "**/__pycache__"]
extensions = ["myst_parser", "sphinx.ext.autodoc"]

# Depth of the headings that links may lead to, with the anchors that code hosting sites give them.
myst_heading_anchors = 4

autodoc_default_options = {"members": True}
default_role = "code"
autodoc_member_order = "bysource"
python_maximum_signature_line_length = 100

html_theme = "furo"
html_title = "mergesearch"
html_copy_source = False
html_show_copyright = False
html_show_sphinx = False


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", mark_examples)


def mark_examples(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Examples become code blocks: paragraphs of a docstring that are indented, or begin with a call of a client."""
    marked: list[str] = []
    is_code = False
    for above, line in zip(["", *lines], lines, strict=False):
        if line and not above:
            is_code = re.match(r"\s|(\w+ )*client\.|\[|\w+\(.*client\.|async with ", line) is not None
            marked += ["::", ""] if is_code else []
        marked.append(f"    {line}" if is_code and line else line)
    lines[:] = marked
