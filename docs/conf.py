"""The documentation site: `python -m sphinx -W -n -c docs . site`. CONTRIBUTING.md says how to open it.

The source is the root of the repository, so that links from a page to code, notebooks and other pages are the same on
the site and on a Git host.
"""

import html
import pathlib
import re

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

import hlat_jax

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGES = ("docs", "notebooks", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")

project = "hlat_jax"
version = release = hlat_jax.__version__
copyright = "the authors of hlat_jax, Apache-2.0"

root_doc = "README"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = [path.name for path in ROOT.iterdir() if path.name not in PAGES] + ["**/.*", "docs/index.md"]
highlight_language = "none"
smartquotes = False  # flags begin with two hyphens

myst_heading_anchors = 4
myst_fence_as_directive = ["mermaid"]
nb_execution_mode = "off"  # as stored: `python tools/run_notebooks.py` makes the outputs
nb_merge_streams = True

default_role = "code"  # docstrings have Markdown's backticks
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Attributes", "params_style")]  # of dataclasses
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
maximum_signature_line_length = 100
# Types in signatures: other libraries have theirs on pages elsewhere, and of ours only the public ones have a page.
nitpick_ignore_regex = [("py:class", ".*")]

html_theme = "furo"
html_title = "hlat_jax"
html_static_path = ["_static"]
html_extra_path = ["_root"]  # index.html, which leads to README.html
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False


class Mermaid(SphinxDirective):
    """Hands a diagram to the browser, where the script in _static draws it."""

    has_content = True

    def run(self):
        diagram = html.escape("\n".join(self.content))
        return [nodes.raw("", f'<pre class="mermaid">{diagram}</pre>', format="html")]


def add_navigation(app, page, source):
    """Adds the lists of pages, which a Git host would show as text, to the first page."""
    if page == root_doc:
        _, *lists = (ROOT / "docs" / "index.md").read_text().partition("```{toctree}")
        source[0] += "\n" + "".join(lists)


def separate_plurals(app, what, name, obj, options, lines):
    """Ends code before the s of a plural, `Array`s, as reStructuredText requires."""
    lines[:] = [re.sub(r"(`[^`]+`)(?=s\b)", r"\1\\ ", line) for line in lines]


def shorten_factories(app, what, name, obj, options, signature, returned):
    """Writes a field's default that a function makes as `...`, which can be parsed."""
    return signature and signature.replace("<factory>", "..."), returned


def finish_page(app, page, template, context, doctree):
    """Lets names in tables break after dots, underscores and slashes; loads the script on pages with a diagram."""
    if "body" not in context:
        return
    if 'class="mermaid"' in context["body"]:
        app.add_js_file("mermaid.tiny.js")
        app.add_js_file("diagrams.js")

    def with_breaks(cell):
        return re.sub(r'(?<=<span class="pre">)[^<]+', lambda name: re.sub("([._/]+)", r"\1<wbr>", name[0]), cell[0])

    context["body"] = re.sub("<td>.*?</td>", with_breaks, context["body"], flags=re.DOTALL)


def setup(app):
    app.add_directive("mermaid", Mermaid)
    app.connect("source-read", add_navigation)
    app.connect("autodoc-process-docstring", separate_plurals)
    app.connect("autodoc-process-signature", shorten_factories)
    app.connect("html-page-context", finish_page)
