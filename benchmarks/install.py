"""What does `pip install .` cost, package by package, beyond its downloads?

    python benchmarks/install.py [--least_mb=10]

Downloads the wheels of this package's dependencies, as constraints.txt has them, then installs each alone, with and
without compiling its modules to bytecode, and all together. Prints CPU seconds, of which the start of pip is taken
away, and MB on the disk. Packages below `--least_mb` are one row.
"""

from __future__ import annotations

import argparse
import pathlib
import resource
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent


def pip(*words: str) -> float:
    """Runs pip; returns its CPU seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", *words], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def install(folder: pathlib.Path, name: str, wheels: list[pathlib.Path], *options: str) -> tuple[float, float]:
    """Returns (CPU seconds, MB) of installing wheels without their dependencies into a folder of their own."""
    target = folder / name
    seconds = pip("install", "--no-deps", "--no-index", "--target", str(target), *options, *map(str, wheels))
    return seconds, sum(path.stat().st_size for path in target.rglob("*") if path.is_file()) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--least_mb", type=float, default=10.0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        pip("wheel", "-w", str(folder / "wheels"), "-c", str(ROOT / "constraints.txt"), str(ROOT))
        wheels = sorted((folder / "wheels").glob("*.whl"), key=lambda wheel: wheel.name.lower())
        start_s = pip("list")
        rows, small = [], [0.0, 0.0, 0.0]
        for wheel in wheels:
            compiled_s, megabytes = install(folder, f"{wheel.stem}-compiled", [wheel])
            copied_s, _ = install(folder, f"{wheel.stem}-copied", [wheel], "--no-compile")
            row = (compiled_s - start_s, copied_s - start_s, megabytes)
            if megabytes < args.least_mb:
                small = [sum(pair) for pair in zip(small, row, strict=True)]
            else:
                rows.append((wheel.name.split("-")[0], row))
        rows = sorted(rows, key=lambda row: -row[1][2])
        whole = install(folder, "all-compiled", wheels), install(folder, "all-copied", wheels, "--no-compile")
        rows += [(f"{len(wheels) - len(rows)} others", tuple(small))]
        rows += [(f"all {len(wheels)} at once", (whole[0][0] - start_s, whole[1][0] - start_s, whole[0][1]))]
    print(f"{'':24}  CPU s  --no-compile      MB")
    for label, (compiled_s, copied_s, megabytes) in rows:
        print(f"{label:24}{compiled_s:7.1f}{copied_s:14.1f}{megabytes:8.0f}")


if __name__ == "__main__":
    main()
