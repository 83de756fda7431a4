"""What the suite is worth: random small changes of the package, and how many of them a test notices.

    python tools/mutants.py --count=300 --seed=0 --out=/tmp/mutants.jsonl

A mutant is one changed operator, comparison, constant or condition of a file of `FILES`, in a copy of the checkout. Its
tests are those of the mirrored file, then those of `NEXT`; the first failure ends it. A mutant that all of them pass is
printed with its line and is for a person to judge: many change no behaviour, such as a bound of memory. Messages and
type hints are not changed. An interrupted command goes on where `--out` ends.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib
import json
import os
import pathlib
import random
import shutil
import signal
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
FILES = ("*.py", "parallel/*.py", "step/*.py", "data/packing.py", "store/*.py", "passes/**/*.py")
NEXT = {
    "parallel": ("tests/parallel", "tests/spine"),
    "passes": ("tests/passes",),
    "store": ("tests/store", "tests/run", "tests/spine/test_loop.py"),
    "data": ("tests/data",),
    "step": ("tests/step", "tests/spine", "tests/parallel"),
    "": ("tests/spine", "tests/step", "tests/parallel"),
}
COMPARED = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}
COMPARED |= {ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is}
COMPUTED = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult}
COMPUTED |= {ast.Mod: ast.FloorDiv, ast.BitOr: ast.BitAnd, ast.Pow: ast.Mult}


def mutants_of(tree: ast.Module) -> list[tuple[int, str, ast.AST, ast.AST]]:
    """Returns (line, what changes, node, node in its place) of each possible change of a module."""
    changes = []
    typed = set()
    for node in ast.walk(tree):  # hints, texts and messages are left alone
        left_alone = [getattr(node, name, None) for name in ("annotation", "returns")]
        left_alone += [node] if isinstance(node, (ast.Raise, ast.JoinedStr, ast.Assert)) else []
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("print", "ValueError"):
            left_alone.append(node)
        typed |= {id(part) for root in left_alone if root is not None for part in ast.walk(root)}
    for node in ast.walk(tree):
        if id(node) in typed:
            continue
        other = copy.copy(node)
        if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARED:
            other.ops = [COMPARED[type(node.ops[0])](), *node.ops[1:]]
        elif isinstance(node, ast.BinOp) and type(node.op) in COMPUTED:
            other.op = COMPUTED[type(node.op)]()
        elif isinstance(node, ast.BoolOp):
            other.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            other.value = not node.value
        elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
            other.value = node.value + 1
        elif isinstance(node, (ast.If, ast.IfExp)):
            other.test = ast.UnaryOp(ast.Not(), node.test)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            other = node.operand
        else:
            continue
        shown = (part.test if isinstance(part, (ast.If, ast.IfExp)) else part for part in (node, other))
        changes.append((node.lineno, "  ->  ".join(map(ast.unparse, shown)), node, other))
    return changes


class _Replace(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST):
        self._old, self._new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        return ast.copy_location(self._new, node) if node is self._old else super().generic_visit(node)


def tests_of(checkout: pathlib.Path, path: pathlib.Path) -> list[str]:
    """Returns the tests that are to notice a change of a file of the package, the nearest first."""
    room = path.parts[0] if len(path.parts) > 1 else ""
    folder = checkout / "tests" / (path.parent if room else "spine")
    mirrored = sorted(str(test) for test in folder.glob(f"test_{path.stem}*.py"))
    return [*mirrored, *(str(checkout / name) for name in NEXT[room])]


def verdict(checkout: pathlib.Path, tests: list[str], limit_s: float) -> str:
    """Returns "killed", "survived" or "limit" of the tests in a checkout; a child that has JAX already runs them."""
    child = os.fork()
    if not child:
        os.setsid()
        with (checkout.parent / "output").open("w") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        os.chdir(checkout)
        os.environ["PYTEST_XDIST_WORKER"] = "gw0"  # compiled programs lie beside the folder of tests, which is emptied
        import pytest

        code = 1
        try:
            words = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", f"--basetemp={checkout.parent / 'tests' / 'tmp'}"]
            for test in tests:
                code = int(pytest.main([*words, test]))
                code = 0 if code == pytest.ExitCode.NO_TESTS_COLLECTED else code
                if code:
                    break
        finally:
            os._exit(code)
    ends_s = time.monotonic() + limit_s
    while time.monotonic() < ends_s:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return "survived" if status == 0 else "killed"
        time.sleep(0.1)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "limit"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit_s", type=float, default=600.0)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    values = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    for module in ("flax", "jax", "optax", "orbax.checkpoint", "pytest", "hypothesis", "grain", "sentencepiece"):
        importlib.import_module(module)  # each child has them from here

    with tempfile.TemporaryDirectory() as folder:
        checkout = pathlib.Path(folder, "checkout")
        left_out = shutil.ignore_patterns(".*", "__pycache__", "runs", "build")
        shutil.copytree(ROOT, checkout, ignore=left_out, symlinks=True)
        (checkout.parent / "tests").mkdir()
        os.environ["PYTHONPATH"], os.environ["PYTHONDONTWRITEBYTECODE"] = str(checkout), "1"
        package = checkout / "hlat_jax"
        paths = sorted({path for pattern in FILES for path in package.glob(pattern)})
        sites = [(path, number) for path in paths for number in range(len(mutants_of(ast.parse(path.read_text()))))]
        sample = random.Random(values.seed).sample(sites, values.count)
        done = values.out.read_text().splitlines() if values.out.exists() else []
        for path, number in sample[len(done) :]:
            text, name = path.read_text(), path.relative_to(package)
            tree = ast.parse(text)
            line, change, old, new = mutants_of(tree)[number]
            path.write_text(ast.unparse(ast.fix_missing_locations(_Replace(old, new).visit(tree))))
            began_s = time.monotonic()
            row = {"file": str(name), "line": line, "change": change}
            row["verdict"] = verdict(checkout, tests_of(checkout, name), values.limit_s)
            row["s"] = round(time.monotonic() - began_s)
            path.write_text(text)
            with values.out.open("a") as out:
                print(json.dumps(row), file=out)
            print(f"{row['verdict']:9}{name}:{line}  {change}", flush=True)
    rows = [json.loads(line) for line in values.out.read_text().splitlines()]
    killed = sum(row["verdict"] == "killed" for row in rows)
    print(f"{killed} of {len(rows)} mutants killed")


if __name__ == "__main__":
    main()
