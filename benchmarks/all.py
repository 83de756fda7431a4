"""The few figures that matter, in a quarter of an hour: a step, a first step, decoding, data, memory.

    python benchmarks/all.py [--save] [--release FILE]

Each figure is a ratio to something else that this machine does in turn: PyTorch eager, transformers, bare
SentencePiece, bare JAX; above 1 is better than it. `release.json` holds those of the last release, on a machine that it
names. A figure has moved if it differs from there by more than the noise of both: of each, half of the range between
the quartiles of its samples, and 2 % at least. `--save` writes the figures as those of a release. Run it alone on the
machine. With a GPU, the table of `gpu.py` follows.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

FOLDER = pathlib.Path(__file__).resolve().parent
RELEASE = FOLDER / "release.json"
QUIET = ["--config.train.eval_every_steps=0", "--config.train.sample_prompt=", "--config.metrics.plot=false"]
BARE_JAX = "import jax; jax.block_until_ready(jax.jit(lambda a: a @ a)(jax.numpy.ones((192, 192))))"
LEAST_NOISE = 0.02


def run(words: list, env: dict[str, str] | None = None) -> None:
    """Runs a Python command; raises RuntimeError with its last line if it fails."""
    done = subprocess.run([sys.executable, *map(str, words)], env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, words))}: {(done.stderr.strip().splitlines() or ['failed'])[-1]}")


def step(folder: pathlib.Path) -> dict[str, list[float]]:
    """Returns samples of the ratios of time and memory of a training step to PyTorch's."""
    samples = {}
    for size in ("tiny", "25m"):
        out = folder / f"{size}.json"
        run([FOLDER / "train_step.py", f"--size={size}", "--pairs=9", "--only=default", f"--json={out}"])
        torch, ours = json.loads(out.read_text())
        samples[f"step of {size}: speed, to PyTorch eager"] = ours["ratios"]
        samples[f"step of {size}: memory, to PyTorch eager"] = [torch["peak_rss_gib"] / ours["peak_rss_gib"]]
    return samples


def first_step(folder: pathlib.Path) -> dict[str, list[float]]:
    """Returns the seconds of a bare JAX program over those of a run of one step, without and with a cache."""
    samples: dict[str, list[float]] = {"without": [], "with": []}
    for repeat in range(3):
        env = os.environ | {"XDG_CACHE_HOME": str(folder / f"cache-{repeat}")}
        for kind in samples:
            began = time.monotonic()
            run(["-c", BARE_JAX])
            bare_s = time.monotonic() - began
            words = ["-m", "hlat_jax.train", "--config=tiny", f"--workdir={folder / kind}-{repeat}"]
            began = time.monotonic()
            run([*words, "--config.train.num_steps=1", "--config.data.validation=", *QUIET], env)
            samples[kind].append(bare_s / (time.monotonic() - began))
    return {f"run of one step of tiny, {kind} a cache: speed, to bare JAX": each for kind, each in samples.items()}


def decode(folder: pathlib.Path) -> dict[str, list[float]]:
    out = folder / "decode.json"
    run([FOLDER / "decode.py", "--pairs=7", f"--json={out}"])
    return {"decoding, 135M: speed, to transformers": json.loads(out.read_text())["ratios"]}


def data(_: pathlib.Path) -> dict[str, list[float]]:
    """Returns samples of tokens per second of batches from JSONL, to SentencePiece alone on as many threads."""
    sys.path.append(str(FOLDER.parent))
    from benchmarks import data as benchmark
    from hlat_jax.config import DataConfig
    from hlat_jax.data.formats.paths import asset_path
    from hlat_jax.data.tokenizer import Tokenizer

    text, tokenizer = asset_path("austen_train.jsonl"), Tokenizer("package:austen_2k.model")
    config = DataConfig(train=str(text), tokenizer="package:austen_2k.model", batch_size=16, seq_len=2048)
    samples = {}
    for packing in ("concat", "documents"):
        settings = dataclasses.replace(config, packing=packing, window_documents=32)
        samples[f"data, {packing}: speed, to bare SentencePiece"] = [
            benchmark.tokens_per_s(settings, tokenizer, 3.0)[0] / benchmark.bare_tokens_per_s(text, tokenizer, 3.0)
            for _ in range(5)
        ]
    return samples


def noise(samples: list[float]) -> float:
    """Returns half of the range between the quartiles, and 2 % of the median at least."""
    least = LEAST_NOISE * statistics.median(samples)
    if len(samples) < 3:
        return least
    low, _, high = statistics.quantiles(samples, n=4)
    return max((high - low) / 2, least)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", action="store_true", help="write the figures as those of a release")
    parser.add_argument("--release", type=pathlib.Path, default=RELEASE)
    parser.add_argument("--only", default="", help="parts, by commas: step, first_step, decode, data")
    values = parser.parse_args()
    last = json.loads(values.release.read_text()) if values.release.exists() else {}
    parts = [step, first_step, decode, data]
    names = values.only.split(",") if values.only else [part.__name__ for part in parts]
    if unknown := set(names) - {part.__name__ for part in parts}:
        parser.error(f"--only={','.join(unknown)}: the parts are {', '.join(part.__name__ for part in parts)}")
    began = time.monotonic()
    flops = float(subprocess.check_output([sys.executable, FOLDER / "train_step.py", "--gflops"]))
    machine = f"{os.cpu_count()} cores, {flops / 1e9:.0f} GFLOP/s of fp32 products"
    print(f"{machine}; the last release: {last.get('machine', 'none')}")
    print(f"{'':64}{'ratio':>7}{'noise':>7}{'last':>7}")
    figures = {}
    with tempfile.TemporaryDirectory() as name:
        for part in parts:
            if part.__name__ not in names:
                continue
            for what, samples in part(pathlib.Path(name)).items():
                median, own = statistics.median(samples), noise(samples)
                figures[what] = {"ratio": round(median, 3), "noise": round(own, 3)}
                before = last.get("figures", {}).get(what)
                line = f"{what:64}{median:7.2f}{own:7.2f}"
                if before:
                    change, allowed = median - before["ratio"], own + before["noise"]
                    moved = "" if abs(change) <= allowed else "  better" if change > 0 else "  WORSE"
                    line += f"{before['ratio']:7.2f}{moved}"
                print(line, flush=True)
    print(f"{time.monotonic() - began:.0f} s")
    if values.save:
        kept = {"machine": machine, "figures": last.get("figures", {}) | figures}
        values.release.write_text(json.dumps(kept, indent=1) + "\n")
    if "cuda" in subprocess.check_output([sys.executable, "-c", "import jax; print(jax.devices())"], text=True).lower():
        return subprocess.run([sys.executable, str(FOLDER / "gpu.py")], check=False).returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
