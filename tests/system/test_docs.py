"""The pages say what the code says."""

import pathlib
import re

import pytest

from tools.config_reference import PAGE, reference

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_config_reference_is_what_the_dataclasses_say():
    assert PAGE.read_text() == reference(), "run python tools/config_reference.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_page_links_resolve(page):
    text = page.read_text()
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", text):
        file = page.parent / target if target else page
        assert file.exists(), f"{page.name} links to {target}"
        if anchor:
            titles = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
            assert anchor in anchors, f"{page.name} links to {target}#{anchor}"
