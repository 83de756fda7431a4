"""Is the training step the same before and after a change that should only move code? Run in each tree, then compare.

    python benchmarks/unchanged.py record --out=before.json --runs=runs     # in the tree before the change
    python benchmarks/unchanged.py record --out=after.json --runs=runs      # in the tree after it
    python benchmarks/unchanged.py compare before.json after.json

For four layouts of a small model it trains 20 steps by `python -m hlat_jax.train` and records the hash of every array
of the last checkpoint, the hash of the text of the lowered step without locations, the seconds of a step (median) and
the peak memory of the process; beside them the seconds that `import hlat_jax.loop` takes and the first line of
`--help`. With `--runs` the first tree leaves its run folders there, and both resume a copy of them up to step 24: a run
written before the change continues after it. Only commands and files are used, so that trees with other module paths
compare. `--dump=DIR` keeps the texts.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import tempfile

LAYOUTS = {
    "one device": {"devices": 1},
    "data x tensor": {"devices": 4, "parallel.data": 2, "parallel.tensor": 2},
    "pipe x tensor": {"devices": 4, "parallel.pipe": 2, "parallel.tensor": 2, "train.num_microbatches": 2},
    "fsdp with ZeRO": {"devices": 4, "parallel.data": 2, "parallel.fsdp": 2, "parallel.zero1": "True"},
}
SMALL = {
    "train.num_steps": 20,
    "checkpoint.every_steps": 20,
    "train.eval_every_steps": 0,
    "train.num_eval_batches": 1,
    "train.eval_loss_low": 0.0,
    "train.eval_loss_high": 0.0,
    "train.sample_prompt": "",
    "metrics.plot": "False",
    "metrics.tensorboard": "False",
    "model.num_layers": 4,
    "precision.policy": "mixed",
    "data.validation": "",
}
MOST = 1.03  # of what was measured before; the shortest of several rounds, as timings here are noisy


def train(folder: pathlib.Path, layout: dict, *, num_steps: int = 20) -> tuple[dict, str]:
    """Trains in `folder / "run"`, or resumes the run there; returns hashes, seconds and peak bytes, and the text."""
    options = SMALL | {key: value for key, value in layout.items() if key != "devices"}
    options["train.num_steps"] = num_steps
    env = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={layout['devices']}",
        "JAX_DUMP_IR_TO": str(folder / "ir"),
        "JAX_INCLUDE_DEBUG_INFO_IN_DUMPS": "0",
        "PYTHONPATH": os.getcwd(),
    }
    words = [f"--config.{key}={value}" for key, value in options.items()]
    command = [sys.executable, "-m", "hlat_jax.train", "--config=tiny", f"--workdir={folder / 'run'}", *words]
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    printed = process.stdout.read()
    _, status, used = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command)} failed:\n{printed}")
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    text = step_text(folder / "ir")
    return {
        "bits": state_hash(folder / "run"),
        "text": hashlib.sha256(text.encode()).hexdigest(),
        "step_s": statistics.median(row["step_s"] for row in rows[4:]),
        "peak_bytes": used.ru_maxrss * 1024,
    }, text


def resumed(kept: pathlib.Path, layout: dict) -> dict[str, str]:
    """Returns the hashes of the state after four steps more of a run that some tree has left in `kept`."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(kept, pathlib.Path(folder) / "run")
        return train(pathlib.Path(folder), layout, num_steps=24)[0]["bits"]


def step_text(dumped: pathlib.Path) -> str:
    """Returns the lowered step without locations and without the number of its dump."""
    files = sorted(dumped.glob("*train_step*"))
    if not files:
        raise SystemExit(f"no lowered train_step among {sorted(path.name for path in dumped.iterdir())}")
    return re.sub(r"\s*loc\([^\n]*?\)(?=\n|$)|^#loc.*$", "", files[-1].read_text(), flags=re.M)


def state_hash(workdir: pathlib.Path) -> dict[str, str]:
    """Returns name -> hash of the bytes of every array of the newest checkpoint."""
    import jax
    import numpy as np
    import orbax.checkpoint as ocp

    newest = max(
        (path for path in (workdir / "checkpoints").iterdir() if path.name.isdigit()), key=lambda p: int(p.name)
    )
    checkpointer = ocp.PyTreeCheckpointer()
    saved = checkpointer.metadata(newest / "state").item_metadata.tree
    as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), saved)
    found = checkpointer.restore(newest / "state", restore_args=as_numpy)
    flat = {}

    def walk(tree, name):
        if isinstance(tree, dict):
            for key in sorted(tree):
                walk(tree[key], f"{name}.{key}")
        else:
            flat[name] = hashlib.sha256(np.asarray(tree).tobytes()).hexdigest()[:16]

    walk(found, "state")
    return flat


def import_s() -> float:
    """Returns the shortest of five imports of the loop, in processes of their own."""
    code = "import time; t = time.perf_counter(); import hlat_jax.loop; print(time.perf_counter() - t)"
    env = {**os.environ, "PYTHONPATH": os.getcwd()}
    runs = [subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True) for _ in range(5)]
    return min(float(run.stdout) for run in runs)


def record(out: pathlib.Path, *, rounds: int, runs: pathlib.Path | None, dump: pathlib.Path | None) -> None:
    """Writes what is measured of the tree in the working folder."""
    found: dict = {"layouts": {}}
    for name, layout in LAYOUTS.items():
        kept = runs / name.replace(" ", "_") if runs else None
        rows = []
        for _ in range(rounds):
            with tempfile.TemporaryDirectory() as folder:
                row, text = train(pathlib.Path(folder), layout)
                if kept and not kept.exists():
                    shutil.copytree(pathlib.Path(folder) / "run", kept)
            rows.append(row)
        if any((row["bits"], row["text"]) != (rows[0]["bits"], rows[0]["text"]) for row in rows):
            raise SystemExit(f"{name}: two runs of one tree differ")
        smallest = {key: min(row[key] for row in rows) for key in ("step_s", "peak_bytes")}
        found["layouts"][name] = rows[0] | smallest | {"resumed": resumed(kept, layout) if kept else {}}
        if dump is not None:
            dump.mkdir(parents=True, exist_ok=True)
            (dump / f"{name.replace(' ', '_')}.mlir").write_text(text)
        print(f"{name:<16} step {smallest['step_s']:.4f} s, peak {smallest['peak_bytes'] / 2**20:.0f} MiB", flush=True)
    found["import_s"] = import_s()
    words = [sys.executable, "-m", "hlat_jax.train", "--help"]
    helped = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": os.getcwd()})
    found["help"] = helped.stdout.strip().splitlines()[0]
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(found, indent=1) + "\n")


def compare(before: dict, after: dict) -> int:
    """Prints a table; returns 1 when bits or text differ or a ratio is above `MOST`."""
    bad = 0
    for name, old in before["layouts"].items():
        new = after["layouts"][name]
        same_bits, same_text = old["bits"] == new["bits"], old["text"] == new["text"]
        step, memory = new["step_s"] / old["step_s"], new["peak_bytes"] / old["peak_bytes"]
        same_end = old["resumed"] == new["resumed"]
        bad |= not (same_bits and same_text and same_end) or max(step, memory) > MOST
        print(
            f"{name:<16} bits {'same' if same_bits else 'DIFFER'}, text {'same' if same_text else 'DIFFERS'}, resumed "
            f"{'same' if same_end else 'DIFFERS'}, step x {step:.3f}, peak memory x {memory:.3f}"
        )
    ratio = after["import_s"] / before["import_s"]
    bad |= ratio > MOST
    print(f"import           {before['import_s']:.2f} s -> {after['import_s']:.2f} s, x {ratio:.3f}")
    print(f"--help           {before['help']!r}\n              -> {after['help']!r}")
    return int(bad)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("--out", type=pathlib.Path, required=True)
    recording.add_argument("--rounds", type=int, default=1)
    recording.add_argument("--runs", type=pathlib.Path)
    recording.add_argument("--dump", type=pathlib.Path)
    comparing = commands.add_parser("compare")
    comparing.add_argument("before", type=pathlib.Path)
    comparing.add_argument("after", type=pathlib.Path)
    args = parser.parse_args()
    if args.command == "record":
        record(args.out, rounds=args.rounds, runs=args.runs, dump=args.dump)
        return 0
    return compare(json.loads(args.before.read_text()), json.loads(args.after.read_text()))


if __name__ == "__main__":
    sys.exit(main())
