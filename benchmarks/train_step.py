"""How fast is one training step on this CPU, and how much memory does it take, against PyTorch and plain JAX?

    python benchmarks/train_step.py [--size tiny|25m|125m] [--pairs 9] [--compile] [--also "model.remat=full ..."]
        [--json FILE] [--profile]

A step is forward, backward, clipping by the global norm and AdamW in fp32 on fresh tokens: 2 x 256 for the model of
`tiny`, else 2 x 512. Every variant runs in a process of its own, with the default allocator, ours as `train` sets it
(`host/allocator.py`), in turn with PyTorch (eager, default AdamW): one step of the one, one of the other. Ratios are
medians over these pairs of (seconds of PyTorch / seconds of the variant). A pair counts when other processes used less
than 0.15 of a core during both; the table says how many did. CPU seconds are user plus system time. Peak memory is the
largest resident set of the process, compiling included. The share of peak is what the step's products would take at the
speed of a large one in XLA, over what the step takes; products are 6 FLOPs a weight and token, the embedding left out,
and attention over the causal half. `--profile` prints where the time of our step alone goes, on one core: the longest
operations, then their kinds.
"""

from __future__ import annotations

import argparse
import collections
import functools
import json
import math
import os
import pathlib
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np

ROWS = 2
LARGE = {"vocab_size": 32000, "head_dim": 64}
SIZES = {
    "tiny": {"num_layers": 6, "embed_dim": 192, "mlp_dim": 512, "num_heads": 6, "num_kv_heads": 2}
    | {"vocab_size": 2048, "head_dim": 32},
    "25m": {"num_layers": 8, "embed_dim": 512, "mlp_dim": 1376, "num_heads": 8, "num_kv_heads": 8} | LARGE,
    "125m": {"num_layers": 12, "embed_dim": 768, "mlp_dim": 2048, "num_heads": 12, "num_kv_heads": 12} | LARGE,
}
BASELINE = "torch eager, default AdamW"
OURS = {
    "ours, default": "",
    "ours, least memory": "model.layer_loop=scan model.remat=full model.cross_entropy=chunked",
}
MAX_FOREIGN_CORES = 0.15
LEARNING_RATE, BETAS, EPS, DECAY = 3e-4, (0.9, 0.95), 1e-8, 0.1


def seq_len_of(size: dict) -> int:
    return 256 if size is SIZES["tiny"] else 512


def flops_of(size: dict) -> float:
    """Returns the FLOPs of the products that a step needs."""
    attention = 2 * size["embed_dim"] * size["head_dim"] * (size["num_heads"] + size["num_kv_heads"])
    layer = attention + 3 * size["embed_dim"] * size["mlp_dim"]
    weights = size["num_layers"] * layer + size["embed_dim"] * size["vocab_size"]
    scores = size["num_layers"] * size["num_heads"] * size["head_dim"] * seq_len_of(size)  # 12 / 2 of them a token
    return 6.0 * (weights + scores) * ROWS * seq_len_of(size)


def machine_flops() -> float:
    """Returns FLOP/s of a large fp32 product in XLA."""
    import jax

    a = jax.numpy.ones((2048, 2048))
    product = jax.jit(lambda a: a @ a).lower(a).compile()
    spent_s = []
    while sum(spent_s) < 3:
        began = time.perf_counter()
        product(a).block_until_ready()
        spent_s.append(time.perf_counter() - began)
    return 2 * 2048**3 / min(spent_s)


def torch_step(size: dict, *, fused: bool, compiled: bool):
    """Returns the step of transformers' LlamaForCausalLM in PyTorch: tokens -> loss."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=size["vocab_size"],
            hidden_size=size["embed_dim"],
            intermediate_size=size["mlp_dim"],
            num_hidden_layers=size["num_layers"],
            num_attention_heads=size["num_heads"],
            num_key_value_heads=size["num_kv_heads"],
            head_dim=size["head_dim"],
            attn_implementation="sdpa",
            use_cache=False,
        )
    )
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=BETAS, eps=EPS, weight_decay=DECAY, fused=fused or None
    )
    forward = torch.compile(model) if compiled else model

    def step(tokens_BT):
        ids = torch.from_numpy(tokens_BT).long()
        loss = forward(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def plain_jax_step(size: dict):
    """Returns the step of the model as one writes it down first: einsum on [B, T, ...], scan, an Optax chain."""
    import jax
    import jax.numpy as jnp
    import optax

    num_layers, d, f, n = (size[name] for name in ("num_layers", "embed_dim", "mlp_dim", "num_heads"))
    seq_len, head_dim, num_kv, vocab = seq_len_of(size), size["head_dim"], size["num_kv_heads"], size["vocab_size"]
    shapes = dict.fromkeys(("k", "v"), (num_layers, d, num_kv, head_dim)) | {"q": (num_layers, d, n, head_dim)}
    shapes |= {"out": (num_layers, n, head_dim, d), "gate": (num_layers, d, f), "up": (num_layers, d, f)}
    shapes |= {"down": (num_layers, f, d), "embed": (vocab, d), "head": (d, vocab)}
    keys = jax.random.split(jax.random.key(0), len(shapes))
    params = {name: 0.02 * jax.random.normal(key, shapes[name]) for name, key in zip(shapes, keys, strict=True)}
    params |= {name: jnp.ones((num_layers, d)) for name in ("attn_norm", "mlp_norm")} | {"final_norm": jnp.ones(d)}
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(LEARNING_RATE, *BETAS, eps=EPS, weight_decay=DECAY)
    )

    def norm(x, scale):
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * scale

    def rope(x_BTNH):
        angles = jnp.arange(seq_len)[:, None] * 10000.0 ** -(jnp.arange(0, head_dim, 2) / head_dim)
        cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
        a, b = jnp.split(x_BTNH, 2, axis=-1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def layer(x_BTD, p):
        y_BTD = norm(x_BTD, p["attn_norm"])
        q, k, v = (jnp.einsum("BTD,DNH->BTNH", y_BTD, p[name]) for name in ("q", "k", "v"))
        k, v = (jnp.repeat(x, n // num_kv, axis=2) for x in (rope(k), v))
        scores_BNTS = jnp.einsum("BTNH,BSNH->BNTS", rope(q), k) / head_dim**0.5
        causal = jnp.tril(jnp.ones((seq_len, seq_len), bool))
        probs_BNTS = jax.nn.softmax(jnp.where(causal, scores_BNTS, -1e30))
        x_BTD += jnp.einsum("BTNH,NHD->BTD", jnp.einsum("BNTS,BSNH->BTNH", probs_BNTS, v), p["out"])
        y_BTD = norm(x_BTD, p["mlp_norm"])
        return x_BTD + (jax.nn.silu(y_BTD @ p["gate"]) * (y_BTD @ p["up"])) @ p["down"], None

    def loss_fn(params, tokens_BT):
        stacked = {name: value for name, value in params.items() if name not in ("embed", "head", "final_norm")}
        x_BTD, _ = jax.lax.scan(layer, params["embed"][tokens_BT], stacked)
        logits_BTV = norm(x_BTD, params["final_norm"]) @ params["head"]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits_BTV[:, :-1], tokens_BT[:, 1:])
        return jnp.mean(losses)

    @functools.partial(jax.jit, donate_argnums=0)
    def train_step(state, tokens_BT):
        loss, grads = jax.value_and_grad(loss_fn)(state[0], tokens_BT)
        updates, opt_state = optimizer.update(grads, state[1], state[0])
        return (optax.apply_updates(state[0], updates), opt_state), loss

    return _threaded((params, optimizer.init(params)), train_step)


def our_program(size: dict, overrides: str):
    """Returns the program of `python -m hlat_jax.train`, with blank-separated `section.key=value`, and its layout."""
    import jax

    from hlat_jax import config as config_lib
    from hlat_jax.parallel.sharding import make_layout
    from hlat_jax.program import make_program
    from hlat_jax.resolve import resolve

    mutable = config_lib.default()
    mutable.model.update(size)
    mutable.data.update({"batch_size": ROWS, "seq_len": seq_len_of(size)})
    for override in overrides.split():
        path, value = override.split("=")
        section, key = path.split(".")
        mutable[section][key] = type(mutable[section][key])(value)
    config = resolve(mutable)
    layout = make_layout(config.parallel, jax.devices()[:1])
    return make_program(config, layout), layout


def our_step(size: dict, overrides: str):
    """Returns the step of `our_program`: tokens -> loss."""
    from hlat_jax.batch import concat_batch
    from hlat_jax.host import allocator
    from hlat_jax.parallel.rows import shard_batch

    allocator.keep_freed_memory()  # as the command does
    program, layout = our_program(size, overrides)

    def train_step(state, tokens_BT):
        state, metrics = program.step(state, shard_batch(concat_batch(tokens_BT), layout), np.float32(LEARNING_RATE))
        return state, metrics.loss

    return _threaded(program.init_state(), train_step)


def _threaded(state, train_step):
    def step(tokens_BT):
        nonlocal state
        state, loss = train_step(state, tokens_BT)
        return float(loss)

    return step


def profile(size: dict, overrides: str) -> None:
    """Prints the profile of our step on one core."""
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])  # before the threads of XLA
    from hlat_jax.batch import concat_batch
    from hlat_jax.host import allocator
    from hlat_jax.parallel.rows import shard_batch

    allocator.keep_freed_memory()
    program, layout = our_program(size, overrides)
    compiled, state = program.trace_step().lower().compile(), program.init_state()
    batch = shard_batch(concat_batch(np.zeros((ROWS, seq_len_of(size)), np.int32)), layout)

    def step():
        nonlocal state
        state, metrics = compiled(state, batch, np.float32(LEARNING_RATE))
        metrics.loss.block_until_ready()

    print_profile(compiled, step)


def print_profile(compiled, step, *, num_steps: int = 10, num_longest: int = 24) -> None:
    """Prints what `step`, which runs a compiled program once, does with its time, from a trace of JAX's profiler.

    Operations that run beside each other share the time. Products that XLA has fused count as other loops.
    """
    import jax

    lines = (re.match(r"\s*(?:ROOT )?%?([\w.-]+) = (.*)", line) for line in compiled.as_text().splitlines())
    defined = {line[1]: line[2] for line in lines if line and not re.search(r" (while|conditional|call)\(", line[2])}
    for _ in range(3):
        step()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            began = time.perf_counter()
            for _ in range(num_steps):
                step()
            whole_ms = 1e3 * (time.perf_counter() - began) / num_steps
        [path] = pathlib.Path(folder).rglob("*.xplane.pb")
        planes = jax.profiler.ProfileData.from_file(str(path)).planes
    events = [event for plane in planes for line in plane.lines for event in line.events]
    events = [event for event in events if event.name in defined and "hlo_op" in dict(event.stats)]
    ms, times = collections.Counter(), collections.Counter(event.name for event in events)
    edges = sorted(
        (at, change, event.name) for event in events for at, change in ((event.start_ns, 1), (event.end_ns, -1))
    )
    running, before_ns = collections.Counter(), 0.0
    for at_ns, change, name in edges:
        for each, count in running.items():
            ms[each] += (at_ns - before_ns) * count / running.total() / 1e6 / num_steps
        running[name] += change
        running, before_ns = +running, at_ns
    kinds = collections.Counter()
    print("      ms times  GFLOP/s")
    for name, spent in ms.most_common():
        shape, flops = defined[name].split("{")[0], _dot_flops(name, defined) * times[name] / num_steps
        is_zeros, is_square = name.startswith("wrapped_broadcast"), "/square" in defined[name] and "multiply" in name
        kind = "zeros to write into" if is_zeros else "squares to be summed" if is_square else "other loops and copies"
        kinds["products" if flops else kind] += spent
        if (num_longest := num_longest - 1) >= 0:
            source = re.search(r'op_name="([^"]*)"', defined[name])
            speed = f"{flops / spent / 1e6:8.0f}" if flops else " " * 8
            source = source[1][-60:] if source else ""
            print(f"{spent:8.2f}{times[name] / num_steps:6.0f}{speed}  {name} {shape}  {source}")
    kinds["between operations"] = whole_ms - ms.total()
    print(f"{whole_ms:8.1f} ms a step, on {len(os.sched_getaffinity(0))} of the cores")
    print(*(f"{spent:8.1f} ms {spent / whole_ms:4.0%}  {kind}" for kind, spent in kinds.most_common()), sep="\n")


def _dot_flops(name: str, defined: dict[str, str]) -> float:
    """Returns the FLOPs of a product of a compiled program; 0 for other operations."""
    found = re.search(r" dot\(%?([\w.-]+),.*lhs_contracting_dims={([\d,]+)}", defined[name])
    if not found:
        return 0.0
    out, left = (re.findall(r"\d+", re.search(r"\[([\d,]*)\]", defined[each])[1]) for each in (name, found[1]))
    return 2.0 * math.prod(map(int, out)) * math.prod(int(left[int(dim)]) for dim in found[2].split(","))


def worker(name: str, size: dict, overrides: str) -> None:
    """Builds one variant, says so on stdout, then makes one step for every line on stdin and prints its sample."""
    rng = np.random.default_rng(0)

    def tokens():
        return rng.integers(0, size["vocab_size"], (ROWS, seq_len_of(size))).astype(np.int32)

    if name.startswith("torch"):
        step = torch_step(size, fused="fused" in name, compiled="compile" in name)
    else:
        step = plain_jax_step(size) if name == "plain JAX" else our_step(size, overrides)
    began = time.perf_counter()
    step(tokens())
    print(json.dumps({"first_step_s": time.perf_counter() - began}), flush=True)
    step(tokens())
    for _ in sys.stdin:
        busy, own, began = _busy_cpu_s(), time.process_time(), time.perf_counter()
        loss = step(tokens())
        step_s = time.perf_counter() - began
        cpu_s = time.process_time() - own
        sample = {"step_s": step_s, "cpu_s": cpu_s, "foreign_cores": (_busy_cpu_s() - busy - cpu_s) / step_s}
        sample |= {"loss": loss, "peak_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}
        print(json.dumps(sample), flush=True)


def _busy_cpu_s() -> float:
    """Returns the seconds all cores have worked since boot, for whatever process."""
    ticks = [int(field) for field in pathlib.Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")


class Variant:
    """A worker process that makes a step when asked."""

    def __init__(self, name: str, size: str, overrides: str):
        self.name = name
        command = [sys.executable, __file__, "--size", size, "--worker", name, "--overrides", overrides]
        root = str(pathlib.Path(__file__).resolve().parent.parent)
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, env=env
        )
        self.first_step_s = self._read()["first_step_s"]

    def sample(self) -> dict:
        """Makes one step and returns what it took."""
        self.process.stdin.write("\n")
        return self._read()

    def close(self) -> None:
        """Lets the worker end."""
        self.process.stdin.close()
        self.process.wait()

    def _read(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the worker of {self.name!r} ended; its error is above")
        return json.loads(line)


def measure(baseline: Variant, variant: Variant, num_pairs: int, num_tokens: int) -> dict:
    """Returns the medians over clean pairs of steps, and every sample."""
    pairs = [(baseline.sample(), variant.sample()) for _ in range(num_pairs)]
    clean = [pair for pair in pairs if max(sample["foreign_cores"] for sample in pair) < MAX_FOREIGN_CORES]
    row = {"variant": variant.name, "clean_pairs": len(clean), "pairs": num_pairs}
    row["first_step_s"] = variant.first_step_s
    row["peak_rss_gib"] = pairs[-1][1]["peak_rss_gib"]
    row["cpu_s"] = statistics.median(own["cpu_s"] for _, own in pairs)
    row["cpu_ratio"] = statistics.median(base["cpu_s"] / own["cpu_s"] for base, own in pairs)
    row["step_s"] = statistics.median([own["step_s"] for _, own in clean] or [math.nan])
    row["tokens_per_s"] = num_tokens / row["step_s"]
    row["ratio"] = statistics.median([base["step_s"] / own["step_s"] for base, own in clean] or [math.nan])
    row["ratios"] = [base["step_s"] / own["step_s"] for base, own in clean or pairs]
    row["samples"] = pairs
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="25m")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--compile", action="store_true", help="measure torch.compile too; its first step is slow")
    parser.add_argument("--also", action="append", default=[], help="settings of one more variant of ours")
    parser.add_argument("--only", default="", help="measure only variants whose name holds one of these, by commas")
    parser.add_argument("--json", default="", help="write every sample to this file")
    parser.add_argument("--profile", action="store_true", help="where the time of our step goes, on one core")
    parser.add_argument("--gflops", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    parser.add_argument("--overrides", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.worker, SIZES[args.size], args.overrides)
        return
    if args.profile:
        profile(SIZES[args.size], " ".join(args.also))
        return
    if args.gflops:
        print(machine_flops())
        return
    flops, size = float(subprocess.check_output([sys.executable, __file__, "--gflops"])), SIZES[args.size]
    names = {"torch eager, fused AdamW": "", "plain JAX": "", **OURS}
    if args.compile:
        names["torch compile, default AdamW"] = ""
    names = {name: own for name, own in names.items() if any(word in name for word in args.only.split(","))}
    names |= {f"ours, {overrides}": overrides for overrides in args.also}
    width = max(map(len, [BASELINE, *names]))
    print(
        f"{args.size}, {ROWS} x {seq_len_of(size)} tokens, fp32, {os.cpu_count()} cores of {flops / 1e9:.0f} GFLOP/s; "
        f"ratios to {BASELINE}"
    )
    print(f"{'':{width}}  s/step   tok/s  ratio  of peak   CPU s  CPU ratio  peak GiB  first step s  clean pairs")
    baseline = Variant(BASELINE, args.size, "")
    rows = []
    for name, overrides in [(BASELINE, ""), *names.items()]:
        variant = baseline if name == BASELINE else Variant(name, args.size, overrides)
        row = measure(baseline, variant, args.pairs, ROWS * seq_len_of(size))
        row["of_peak"] = flops_of(size) / flops / row["step_s"]
        if variant is not baseline:
            variant.close()
        rows.append(row)
        print(
            f"{name:{width}}{row['step_s']:8.3f}{row['tokens_per_s']:8.0f}{row['ratio']:7.2f}"
            f"{row['of_peak']:9.0%}{row['cpu_s']:8.2f}"
            f"{row['cpu_ratio']:11.2f}{row['peak_rss_gib']:10.2f}{row['first_step_s']:14.1f}"
            f"{row['clean_pairs']:10}/{row['pairs']}",
            flush=True,
        )
    baseline.close()
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
