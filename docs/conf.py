# SPDX-License-Identifier: Apache-2.0
"""Sphinx: the pages of docs/ and the API reference from the docstrings; see scripts/build_docs.sh.

The source folder is the root of the repository, so that links from docs/ to the README, to results
and to sources are checked and work.
"""

import re
import sys
from pathlib import Path

import ringattn
from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
import write_api

project = "ringattn"
author = "the ringattn developers"
version = release = ringattn.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/README"
include_patterns = [
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "tests/README.md",
    "docs/**",
    "benchmarks/results/*.md",
]
html_theme = "furo"

myst_heading_anchors = 3  # links to headings, as GitHub makes them

autodoc_mock_imports = ["diffusers", "fms"]  # docstrings need no integration to run
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False

# Every reference in a docstring must exist, but for names of other packages and private ones.
nitpicky = True
nitpick_ignore_regex = [
    ("py:.*", r"(torch|collections|pathlib|ringattn\._\w+)\..*"),
    ("py:class", r".*\b_Model"),  # type variables
    ("py:class", r"ringattn\.model_inputs\.Inputs"),  # between adapters and calls alone
    # A signature with a default_factory is no Python: Sphinx cuts tuple[int, ...] at its comma.
    ("py:class", r"tuple\[int"),
]


def add_toctree(app: Sphinx, docname: str, source: list[str]) -> None:
    """Gives the index of docs/ the toctree that Sphinx needs: the pages it links to, in order, and
    the tables of results. In the file itself, GitHub would show a toctree as text."""
    if docname == root_doc:
        pages = re.findall(r"\]\((\S+)\.md\)", source[0])
        entries = "\n".join(["../README", *pages, "../benchmarks/results/*_*"])
        source[0] += f"\n```{{toctree}}\n:hidden:\n:glob:\n\n{entries}\n```\n"


def make_api_reference(app: Sphinx, docname: str, source: list[str]) -> None:
    """Sphinx makes the entries of docs/api.md itself: it checks their references."""
    if docname == "docs/api":
        source[0] = write_api.directives(source[0])


def setup(app: Sphinx) -> None:
    app.connect("source-read", add_toctree)
    app.connect("source-read", make_api_reference)
