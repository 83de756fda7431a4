"""Counts habits of the English in pages, docstrings, config keys and messages that make a reader read twice.

python tools/prose.py                      # a table of all, no verdict
python tools/prose.py --check [PATH...]    # fails above the limits, and names each place; default: pages and package

A reader decides, this script reminds: CONTRIBUTING.md has the rules and what to write instead.
"""

import argparse
import ast
import collections
import itertools
import pathlib
import re
import sys
from collections.abc import Iterable, Iterator

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGE = "hlat_jax/**/*.py"
GENERATED = {"config.md", "commands.md"}  # their sentences are counted where they are written
EXEMPT = {"CHANGELOG.md"}
MAX_WORDS, MAX_MEAN = 25, 17  # of a sentence
SENTENCE_ENDS = r"(?<=[.!?:])\)?\s+(?=[A-Z\d\"(])"
Parts = list[tuple[int, str]]  # line and paragraph

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


def module(path: pathlib.Path) -> dict[str, Parts]:
    """Returns the prose of a module by kind: docstrings of public names, messages, meanings of config keys."""
    found = collections.defaultdict(list)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
            found["docstrings"] += docstring(node) if not getattr(node, "name", "").startswith("_") else []
        call = node.exc if isinstance(node, ast.Raise) else node
        name = getattr(call.func, "id", "") if isinstance(call, ast.Call) else ""
        if name in ("print", "_key", "say") or (isinstance(node, ast.Raise) and isinstance(call, ast.Call)):
            texts = (message(part) for part in [*call.args, *(word.value for word in call.keywords)])
            kind = "config keys" if name == "_key" else "messages"
            found[kind] += [(node.lineno, text) for text in texts if len(text.split()) >= 4]
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
    parts = node.values if isinstance(node, ast.JoinedStr) else [node] if isinstance(node, ast.Constant) else []
    text = "".join("X" if isinstance(part, ast.FormattedValue) else str(part.value) for part in parts)
    return " ".join(re.sub(r":(?= X|\s*\n)", "", text).split())


def plain(paragraph: str) -> str:
    """Returns a paragraph without markup: code and figures are one word, links are their text."""
    text = re.sub(r"`[^`]*`|\$[^$]*\$|\"[^\"]*\"", "X", paragraph)
    text = re.sub(r"^(\*\*[^*]+\*\*|(?:\w+ )?X(?:, X)*):", r"\1", text)  # the label of an item
    return re.sub(r"[*_]{2}|<[^>]*>", "", re.sub(r"\]\([^)]*\)", "", text).replace("[", ""))


def count(files: dict[str, Parts]) -> tuple[dict[str, float], list[str]]:
    """Returns the rate of each habit in 1,000 words and the words of sentences, and the places, "file:line habit"."""
    texts = [(f"{name}:{line}", plain(text)) for name, parts in files.items() for line, text in parts]
    found = {name: [f"{at} {name}" for at, text in texts for _ in re.findall(HABITS[name][0], text)] for name in HABITS}
    sentences = [(where, sentence) for where, text in texts for sentence in re.split(SENTENCE_ENDS, text)]
    sized = [(len(text.split()), where, text) for where, text in sentences if len(text.split()) > 2]
    long = [f"{where} {size} words: {text[:70]}..." for size, where, text in sized if size > MAX_WORDS]
    words, mean = sum(len(text.split()) for _, text in texts), sum(size for size, *_ in sized) / max(len(sized), 1)
    rates = {habit: 1000 * len(places) / max(words, 1) for habit, places in found.items()}
    return rates | {"words": words, "mean": mean, "long": len(long)}, [*itertools.chain(*found.values()), *long]


def read(paths: Iterable[pathlib.Path]) -> dict[str, dict[str, Parts]]:
    """Returns kind of prose -> file -> its paragraphs."""
    kinds: dict[str, dict] = collections.defaultdict(dict)
    for path in paths:
        for kind, parts in ({"pages": list(page(path))} if path.suffix == ".md" else module(path)).items():
            kinds[kind][str(path.relative_to(ROOT))] = parts
    return kinds


def judge(name: str, files: dict[str, Parts]) -> list[str]:
    """Returns what is above the limits in `files` together, and its places; nothing if all is within the limits."""
    rates, places = count(files)
    # one occurrence in a short page is no habit
    over = [h for h, (_, limit) in HABITS.items() if rates[h] > limit and rates[h] * rates["words"] > 1500]
    is_within = not over and not rates["long"] and rates["mean"] <= MAX_MEAN
    named = [place for place in places if place.endswith((*over, "..."))]
    return [] if is_within else [f"{name}: {', '.join(over)}; mean {rates['mean']:.1f} words", *named]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", nargs="*", type=pathlib.Path, metavar="PATH", help="limits; default: pages, package")
    options = parser.parse_args()
    pages = [*ROOT.glob("*.md"), *(p for p in (ROOT / "docs").glob("*.md") if p.name not in GENERATED)]
    if options.check is None:
        rows = {kind: count(files)[0] for kind, files in read([*pages, *ROOT.glob(PACKAGE)]).items()}
        limits = {habit: limit for habit, (_, limit) in HABITS.items()} | {"words": "", "mean": MAX_MEAN, "long": 0}
        print(f"{'':28}" + "".join(f"{kind:>13}" for kind in rows) + f"{'limit':>8}")
        for name, limit in limits.items():
            print(f"{name:28}" + "".join(f"{row[name]:13,.2f}" for row in rows.values()) + f"{limit:>8}")
        return 0
    # a page or a file that was named has a verdict of its own; the package has one for each kind
    single = [p.resolve() for p in options.check] or [p for p in pages if p.name not in EXEMPT]
    judged = [(name, {name: parts}) for files in read(single).values() for name, parts in files.items()]
    package = [] if options.check else ROOT.glob(PACKAGE)
    judged += [(f"{kind} of the package", files) for kind, files in read(package).items()]
    failed = [line for name, files in judged for line in judge(name, files)]
    print("\n".join(failed) or f"{len(judged)} texts within the limits")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
