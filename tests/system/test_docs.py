"""The pages say what the code says."""

import dataclasses
import pathlib
import re

import pytest

from hlat_jax.config import SECTIONS
from tools import command_reference, config_reference

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")), ROOT / "notebooks" / "README.md"]


def test_config_reference_is_what_the_dataclasses_say():
    assert config_reference.PAGE.read_text() == config_reference.reference(), "run python tools/config_reference.py"


def test_command_reference_is_what_the_commands_print():
    assert command_reference.PAGE.read_text() == command_reference.reference(), "run python tools/command_reference.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_page_links_resolve(page):
    text = page.read_text()
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", text):
        file = page.parent / target if target else page
        assert file.exists(), f"{page.name} links to {target}"
        if anchor:
            titles = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
            assert anchor in anchors, f"{page.name} links to {target}#{anchor}"


def test_keys_that_other_trainers_settings_are_mapped_to_exist():
    lines = (ROOT / "docs" / "coming-from.md").read_text().splitlines()
    ours = "\n".join(line.split("|")[1] if line.startswith("|") else line for line in lines)
    named = set(re.findall(rf"`({'|'.join(SECTIONS)})\.(\w+)`", ours))
    known = {(name, field.name) for name, cls in SECTIONS.items() for field in dataclasses.fields(cls)}
    assert named <= known, sorted(named - known)
    assert len(named) > 50, "the first column of each table has our keys"
