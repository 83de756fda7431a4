"""Counts habits of the English in pages, docstrings, config keys and messages that make a reader read twice.

python tools/prose.py                      # a table of all, no verdict
python tools/prose.py --check [PATH...]    # fails above the limits, and names each place; default: pages and package

A reader decides, this script reminds: CONTRIBUTING.md has the rules and what to write instead.
"""

from __future__ import annotations

import argparse
import ast
import collections
import pathlib
import re
import sys
from collections.abc import Iterable, Iterator

ROOT = pathlib.Path(__file__).resolve().parent.parent
GENERATED = {"config.md", "commands.md"}  # their sentences are counted where they are written
EXEMPT = {"CHANGELOG.md"}
MAX_WORDS, MAX_MEAN = 25, 17  # of a sentence

# habit -> (pattern, occurrences in 1,000 words that are allowed: twice the rate of torchtitan's pages, at least 0.3)
HABITS = {
    "those of, that of": (r"\b(?:those|that) of\b", 0.3),
    "what it is": (r"(?<![?] )\b[Ww]hat (?:it|is|an?|the|they|was|has|one|no|each|we|you|others?)\b(?![^.]*[?])", 0.3),
    "where, for if": (r"(?:^|[.,;(] ?)[Ww]here\b", 1.4),
    "whose": (r"\bwhose\b", 0.3),
    "beside": (r"\bbeside\b", 0.3),
    "alone, for only": (r"\balone\b", 0.3),
    "of its own": (r"\bof (?:its|their|one's) own\b", 0.3),
    "Of X, Y is": (r"(?:^|[.;] )Of (?!course)", 0.3),
    "anew, so long as, is to be": (r"\banew\b|\bso long as\b|\b(?:is|are) to be\b|\bstays? away\b", 0.3),
    "semicolon, colon": (r"[;:](?=\s)", 11.8),
}


def page(path: pathlib.Path) -> Iterator[tuple[int, str]]:
    """Yields (line, paragraph) of a page's prose: no code, table, heading, comment or link target."""
    text = re.sub(r"```.*?```|<!--.*?-->", lambda m: "\n" * m[0].count("\n"), path.read_text(), flags=re.DOTALL)
    begun, held = 1, []
    for number, line in enumerate([*text.splitlines(), ""], 1):
        ends = not line.strip() or line.lstrip().startswith(("|", "#", "![", ":::", "<"))
        if (ends or re.match(r"\s*(?:[-*]|\d+\.) ", line)) and held:
            yield begun, " ".join(held)
            held = []
        if not ends:
            begun = begun if held else number
            held.append(re.sub(r"^\s*(?:[-*]|\d+\.) ", "", line).strip())


def module(path: pathlib.Path) -> dict[str, list[tuple[int, str]]]:
    """Returns the prose of a module by kind: docstrings of public names, messages, meanings of config keys."""
    tree, found = ast.parse(path.read_text()), collections.defaultdict(list)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
            found["docstrings"] += docstring(node) if not getattr(node, "name", "").startswith("_") else []
        call = node.exc if isinstance(node, ast.Raise) else node
        if isinstance(call, ast.Call) and (
            call is not node or getattr(call.func, "id", "") in ("print", "_key", "say")
        ):
            kind = "config keys" if getattr(call.func, "id", "") == "_key" else "messages"
            parts = [*call.args, *(word.value for word in call.keywords)]
            found[kind] += [(node.lineno, text) for part in parts if len((text := message(part)).split()) >= 4]
    return found


def docstring(node: ast.Module | ast.ClassDef | ast.FunctionDef) -> Iterator[tuple[int, str]]:
    """Yields the paragraphs of a docstring; an entry of Args, Attributes or Raises is one, without its name."""
    block, number = [], 0
    for line_number, line in enumerate([*ast.get_docstring(node).splitlines(), ""], node.body[0].lineno):
        entry = re.match(r"\s*(?:\*{0,2}[\w., ]+: |[A-Z]\w+:$|    .*>>>)", line)
        if (not line.strip() or entry) and block:
            yield number, " ".join(block)
            block = []
        number = number if block else line_number
        # an indented line is code, unless it is an entry or continues one
        if line.strip() and not line.rstrip().endswith(":") and (entry or block or not line.startswith("    ")):
            block.append(re.sub(r"^\s*\*{0,2}[\w., ]+: ", "", line).strip())


def message(node: ast.expr) -> str:
    """Returns the words of a string in the code, an X for each value in it, without colons before a value or a line."""
    if isinstance(node, ast.BinOp):
        return f"{message(node.left)} {message(node.right)}".strip()
    if isinstance(node, ast.JoinedStr):
        text = "".join("X" if isinstance(part, ast.FormattedValue) else part.value for part in node.values)
    else:
        text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
    return " ".join(re.sub(r":(?= X|\s*\n)", "", text).split())


def plain(paragraph: str) -> str:
    """Returns a paragraph without markup: code and figures are one word, links are their text."""
    text = re.sub(r"`[^`]*`|\$[^$]*\$|\"[^\"]*\"", "X", paragraph)
    text = re.sub(r"^(\*\*[^*]+\*\*|(?:\w+ )?X(?:, X)*):", r"\1", text)  # the label of an item
    return re.sub(r"[*_]{2}|<[^>]*>", "", re.sub(r"\]\([^)]*\)", "", text).replace("[", ""))


def sentences(text: str) -> list[str]:
    return [part for part in re.split(r"(?<=[.!?:])\)?\s+(?=[A-Z\d\"(])", text) if len(part.split()) > 2]


def count(files: dict[str, list[tuple[int, str]]], places: list[str]) -> dict[str, float]:
    """Returns the rate of each habit in 1,000 words and the words of sentences; adds "file:line habit" to `places`."""
    found, words, lengths = collections.Counter(), 0, []
    for where, text in ((f"{name}:{line}", plain(text)) for name, parts in files.items() for line, text in parts):
        words += len(text.split())
        for habit, (pattern, _) in HABITS.items():
            hits = len(re.findall(pattern, text))
            found[habit] += hits
            places += [f"{where} {habit}"] * hits
        for sentence in sentences(text):
            lengths.append(len(sentence.split()))
            if lengths[-1] > MAX_WORDS:
                places.append(f"{where} {lengths[-1]} words: {sentence[:70]}...")
    rates = {habit: 1000 * found[habit] / max(words, 1) for habit in HABITS}
    long = sum(length > MAX_WORDS for length in lengths)
    return rates | {"words": words, "mean": sum(lengths) / max(len(lengths), 1), "long": long}


def read(paths: Iterable[pathlib.Path]) -> dict[str, dict[str, list[tuple[int, str]]]]:
    """Returns kind of prose -> file -> its paragraphs."""
    kinds: dict[str, dict] = collections.defaultdict(dict)
    for path in paths:
        for kind, parts in ({"pages": list(page(path))} if path.suffix == ".md" else module(path)).items():
            kinds[kind][str(path.relative_to(ROOT))] = parts
    return kinds


def verdict(name: str, files: dict[str, list[tuple[int, str]]]) -> list[str]:
    """Returns what is above the limits in `files` together, then the places; nothing if they are within the limits."""
    places: list[str] = []
    rates = count(files, places)
    # one occurrence in a short page is no habit
    over = [h for h, (_, limit) in HABITS.items() if rates[h] > limit and rates[h] * rates["words"] > 1500]
    if not over and not rates["long"] and rates["mean"] <= MAX_MEAN:
        return []
    named = [place for place in places if not place.endswith("semicolon, colon") or "semicolon, colon" in over]
    return [f"{name}: {', '.join(over)}; mean {rates['mean']:.1f} words", *named]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", nargs="*", type=pathlib.Path, metavar="PATH", help="limits; default: pages, package")
    options = parser.parse_args()
    pages = [*ROOT.glob("*.md"), *(p for p in (ROOT / "docs").glob("*.md") if p.name not in GENERATED)]
    package = [*(ROOT / "hlat_jax").rglob("*.py")]
    if options.check is None:
        rows = {kind: count(files, []) for kind, files in read([*pages, *package]).items()}
        print(f"{'':28}" + "".join(f"{kind:>13}" for kind in rows) + f"{'limit':>8}")
        for habit in (*HABITS, "words", "mean", "long"):
            limit = HABITS[habit][1] if habit in HABITS else {"mean": MAX_MEAN, "long": 0}.get(habit, "")
            print(f"{habit:28}" + "".join(f"{row[habit]:13,.2f}" for row in rows.values()) + f"{limit:>8}")
        return 0
    # a page or a file that was named has a verdict of its own; the package has one for each kind
    single = [p.resolve() for p in options.check] or [p for p in pages if p.name not in EXEMPT]
    judged = [(name, {name: parts}) for files in read(single).values() for name, parts in files.items()]
    judged += [] if options.check else [(f"{kind} of the package", files) for kind, files in read(package).items()]
    failed = [line for name, files in judged for line in verdict(name, files)]
    print("\n".join(failed) or f"{len(judged)} texts within the limits")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
