"""Sphinx's configuration of the site; scripts/docs builds it."""

from __future__ import annotations

import importlib.metadata

from sphinx.application import Sphinx
from typer import Context
from typer.cli import get_docs_for_click
from typer.main import get_command

project = "TensorVine"
author = "The TensorVine authors"
project_copyright = "The TensorVine authors"
release = version = importlib.metadata.version("tensorvine")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build"]
nitpicky = False
suppress_warnings = ["misc.highlighting_failure"]

# Docstrings put names and code in single backticks.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_default_options = {"members": True, "inherited-members": "Exception"}
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
napoleon_numpy_docstring = False
napoleon_custom_sections = ["Rules"]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

html_theme = "furo"
pygments_dark_style = "github-dark"
html_title = "TensorVine"
html_show_sphinx = False
html_copy_source = False


def insert_commands(app: Sphinx, name: str, source: list[str]) -> None:
    """Replace the mark on the page of the command line by what typer knows of each command."""
    if name == "reference/cli":
        from tensorvine.clusters.cli.main import application  # only here: other pages need no command line

        command = get_command(application())
        text = get_docs_for_click(obj=command, ctx=Context(command), name="tensorvine")
        source[0] = source[0].replace("%commands%", text.partition("\n")[2])


def insert_metrics(app: Sphinx, name: str, source: list[str]) -> None:
    """Replace the mark on the page of the metrics by a table of all metrics."""
    if name == "reference/metrics":
        from tensorvine.store.metrics import METRICS

        rows = ["| metric | type | labels | meaning |", "|---|---|---|---|"]
        for metric in METRICS:
            labels = ", ".join(f"`{label}`" for label in (*metric.all_labels,))
            rows.append(f"| `{metric.name}` | {metric.kind} | {labels} | {metric.about} |")
        source[0] = source[0].replace("%metrics%", "\n".join(rows))


def setup(app: Sphinx) -> None:
    """Connect what Sphinx calls while it builds."""
    app.connect("source-read", insert_commands)
    app.connect("source-read", insert_metrics)
