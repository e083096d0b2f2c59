"""Configuration of the docs site, which `make docs` builds into build/site with Sphinx.

The source directory is the repository, so that links between Markdown files work here and in the repository. The site
needs no network, and its search works in files that are opened without a server.
"""

from __future__ import annotations

project = "mergesearch"
root_doc = "docs/index"
include_patterns = [
    "docs/**.md",
    "workers/merging/methods/README.md",
    "deploy/README.md",
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
]
exclude_patterns = [".*", "build", "runs", "tests", "**/__pycache__"]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]

# Depth of the headings that links may lead to, with the anchors that code hosting sites give them.
myst_heading_anchors = 4

autodoc_default_options = {"members": True}
default_role = "code"
autodoc_member_order = "bysource"
python_maximum_signature_line_length = 100

html_theme = "furo"
# The first page of the site leads to the first page of the docs.
html_extra_path = ["index.html"]
html_title = "mergesearch"
html_copy_source = False
html_show_copyright = False
html_show_sphinx = False
