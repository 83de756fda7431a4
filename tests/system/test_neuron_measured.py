"""docs/neuron-measured.md, the ledger of what others measured, against the list of entries and the code that it names.

`neuron_measured_entries.txt` has the key of every entry. A new observation is a line there and a row on the page.
"""

import pathlib
import re

import pytest

from hlat_jax.cli import config_files
from hlat_jax.neuron import doctor
from hlat_jax.neuron.rules import RULES
from hlat_jax.resolve import resolve

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "neuron-measured.md"
ENTRIES = pathlib.Path(__file__).with_name("neuron_measured_entries.txt").read_text().split()
ACTION = re.compile(r"\*(lint rule|doctor check|default|term of the plan|docs|does not concern us)\*")


def rows_below(header):
    """Returns the rows, as lists of cells, of every table of the page whose header line begins so."""
    tables = re.findall(rf"^\| {re.escape(header)} \|.*\n\|[-|]+\n((?:\|.*\n)+)", PAGE.read_text(), re.MULTILINE)
    return [[cell.strip() for cell in line.split("|")[1:-1]] for table in tables for line in table.splitlines()]


LEDGER = {cells[0]: cells[1:] for cells in rows_below("entry")}


def actions(entry):
    """Returns (kind, text) of what the row of an entry says we do."""
    _, *parts = ACTION.split(LEDGER[entry][-1])
    return list(zip(parts[::2], parts[1::2], strict=True))


def named(kind):
    """Returns the words in backticks of all actions of a kind, with their entries."""
    return [(entry, word) for entry in LEDGER for one, text in actions(entry) if one == kind for word in words(text)]


def words(text):
    return re.findall(r"`([^`]+)`", text)


def test_ledger_has_every_entry_once():
    assert [cells[0] for cells in rows_below("entry")] == ENTRIES
    assert len(ENTRIES) > 100


@pytest.mark.parametrize("entry", ENTRIES)
def test_entry_has_its_source_and_what_we_do(entry):
    seen, source, _ = LEDGER[entry]
    sources = {key for cells in rows_below("key") for key in cells[0].split(", ")}
    given = re.findall(r"\b[A-Z]{1,2}\d?\b(?=[,;:]|$)", source)
    assert given
    assert set(given) <= sources | {"JAX"}, "a source of the first table"
    assert re.search(r"\b2026\b|undated", source), "the date"
    assert seen.endswith(".")
    assert actions(entry)
    for kind, text in actions(entry):
        if kind == "does not concern us":
            assert text.startswith(", because ")
        elif kind == "docs":
            assert re.search(r"\]\([^)]+\)", text), "a link, which test_docs_commands.py resolves"
        elif kind != "not done":
            assert words(text), f"the name of a {kind}"


def test_rules_of_the_ledger_exist():
    assert [(entry, word) for entry, word in named("lint rule") if word not in RULES] == []


def test_checks_of_the_ledger_exist():
    config = resolve(config_files.load("tiny"))
    checks = dict(doctor.checks(config, instance="", num_devices=0, cache=pathlib.Path()))
    assert [(entry, word) for entry, word in named("doctor check") if word not in checks] == []


@pytest.mark.parametrize(
    ("kind", "folders"), [("default", ("hlat_jax", "configs", "launch")), ("term of the plan", ("hlat_jax",))]
)
def test_names_of_the_ledger_are_in_the_code(kind, folders):
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".sh")]
    code = "\n".join(f"{path.relative_to(ROOT)}\n{path.read_text()}" for path in files)
    assert named(kind)
    assert [(entry, word) for entry, word in named(kind) if word not in code] == []
