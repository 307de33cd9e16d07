"""Settings of Sphinx, for `nox -s docs`."""

import sys
from pathlib import Path

from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).parent))

import hooks

import aioverbs

project = "aioverbs"
copyright = "the authors of aioverbs"  # noqa: A001
version = release = aioverbs.__version__
extensions = ["sphinx.ext.autodoc", "myst_parser", "sphinx_click", "sphinxcontrib.svgbob"]
source_suffix = {".rst": "restructuredtext", ".md": "markdown"}
exclude_patterns = ["_templates", "_static"]
nitpicky = True
show_warning_types = True

autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
maximum_signature_line_length = 100
add_module_names = False
toc_object_entries_show_parents = "hide"
myst_enable_extensions = ["tasklist"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = f"aioverbs {release}"
html_static_path = ["_static"]
html_favicon = "_static/icon.svg"
html_css_files = ["wide.css"]
templates_path = ["_templates"]
html_sidebars = {
    "**": [
        "sidebar/brand.html",
        "versions.html",
        "sidebar/search.html",
        "sidebar/scroll-start.html",
        "sidebar/navigation.html",
        "sidebar/scroll-end.html",
    ]
}
html_context = {"docs_version": release}
html_copy_source = False
html_show_sphinx = False


def setup(app: Sphinx) -> None:
    """Connect the handlers that convert this project's docstrings and signatures."""
    hooks.connect(app)
