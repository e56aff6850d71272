"""The site, which Sphinx builds from the pages of this checkout: see `make site`."""

import os
import tomllib
from pathlib import Path
from typing import Any

from pygments.lexers.special import TextLexer

ROOT = Path(__file__).resolve().parent.parent.parent

project = "fedring"
author = "the authors of fedring"
release = version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]

root_doc = "docs/site/index"
include_patterns = [
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"),
    *("docs/*.md", "docs/*.ipynb", "docs/site/*.md", "docs/examples/node/README.md", "protos/*.md"),
]
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
nb_execution_mode = "off"  # a test runs the notebook; the site shows what it printed
myst_heading_anchors = 4
default_role = "code"  # of docstrings
autodoc_member_order = "bysource"
autodoc_typehints = "description"
nitpicky = False  # annotations name types of torch and grpc, whose pages are not here

html_theme = "furo"
html_title = f"fedring {release}"
html_extra_path = ["start"]  # index.html at the top leads to the front page
html_copy_source = False
html_show_copyright = False
html_static_path: list[str] = []
templates_path = ["templates"]
# Other versions, whose sites lie beside this one: docs/site/versions.py names them.
html_context = {
    "site_version": os.environ.get("SITE_VERSION", release),
    "site_versions": os.environ.get("SITE_VERSIONS", "").split(),
}
html_sidebars = {
    "**": [
        *("sidebar/brand.html", "versions.html", "sidebar/search.html", "sidebar/scroll-start.html"),
        *("sidebar/navigation.html", "sidebar/scroll-end.html"),
    ]
}


def setup(app: Any) -> None:
    """Have text shown as it is for which there are no colours."""
    app.add_lexer("example", TextLexer)  # of protos/FORMATS.md
    app.add_lexer("haproxy", TextLexer)
