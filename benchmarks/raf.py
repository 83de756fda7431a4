"""RAF's own evaluation on this CPU or a GPU: BERT and GPT-2 against PyTorch, and the largest batches, run.

    python benchmarks/raf.py step [--models=bert-base,gpt2] [--rounds=5] [--batch=2] [--seq_len=256]
    python benchmarks/raf.py batch [--models=bert-base,bert-large,gpt2] [--rounds=5] [--shrink=3] [--seq_len=128]
    python benchmarks/raf.py memory [--models=bert-base] [--batch=32] [--seq_len=128]
    python benchmarks/raf.py profile [--models=bert-base,gpt2] [--only="plain JAX,chunk"]
    python benchmarks/raf.py step --gpu --batch=32 --seq_len=128 ; python benchmarks/raf.py batch --gpu --limit=16GiB

`step`: a training step in fp32 (forward, backward, AdamW) of the masked language model and of GPT-2, written below in
plain JAX, under `jax.jit` alone, with each pass, and with all; and of the same models of `transformers` in PyTorch,
with the same weights, eager and under `torch.compile`. `--layers`, `--width` and `--vocab` make them smaller.

`batch`: RAF's table of largest batches. The limit is what the program takes without rematerialization at RAF's batch,
or `--limit`. Widths, heads and vocabularies are divided by `--shrink`. SGD, as RAF had.

`memory`: what a step with SGD takes by XLA's accounting, compiled and not run; RAF's wiki has one such figure.

`profile`: where the time of a step in JAX goes, on one core, as `train_step.py --profile` has it.

Every contender has a process of its own and is compiled first; then all make one step in turn. Ratios are medians over
the rounds in which other processes took less than 0.15 of a core; the last line of a table says how many did. Peak
memory is the largest resident set of a step after compilation, above that of the process with its libraries loaded;
XLA's bytes are its own accounting of arguments, results that alias none, and temporaries.

`--gpu` runs both on the GPU, fp32 with products in TF32, PyTorch under autocast to bf16 too; sizes are then RAF's own
(`--shrink=1`), contenders compile beside each other, every round counts, and peak memory is that of PyTorch's
allocations, blank for JAX.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import ctypes
import dataclasses
import functools
import gc
import json
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import time

import numpy as np

MAX_FOREIGN_CORES = 0.15
MIB = 2**20
RATE, DECAY = 1e-4, 0.01  # AdamW's betas and eps are those of both libraries: 0.9, 0.999, 1e-8
TOLERANCE = 1e-4  # of losses in fp32, relative
TORCH = {"PyTorch eager": False, "PyTorch torch.compile": True}
TORCH_BF16 = {f"{name} bf16": is_compiled for name, is_compiled in TORCH.items()}  # with --gpu
CHUNK = "64MiB"
PASSES = {
    "plain JAX": (),
    "chunk": ("chunk",),
    "residuals": ("residuals",),
    "budget": ("budget",),
    "all in fp32": ("chunk", "residuals", "budget"),
    "autocast": ("autocast",),
    "all": ("autocast", "kernels", "chunk", "residuals", "budget"),
}


@dataclasses.dataclass(frozen=True)
class Model:
    """Sizes; `raf`: its batches without and with rematerialization, and its relative throughput.

    Source: awslabs/raf wiki, rematerialization.
    """

    layers: int
    width: int
    vocab: int
    positions: int
    is_causal: bool
    raf: tuple[int, int, float]

    @property
    def heads(self) -> int:
        return self.width // 64

    def divided(self, by: int) -> Model:
        """Returns the model with so many times fewer heads, and so less width, and a smaller vocabulary."""
        return dataclasses.replace(self, width=64 * (self.heads // by), vocab=self.vocab // by)


MODELS = {
    "bert-base": Model(12, 768, 30522, 512, False, (16, 32, 0.943)),
    "bert-large": Model(24, 1024, 30522, 512, False, (8, 16, 0.965)),
    "gpt2": Model(12, 768, 50257, 1024, True, (8, 24, 0.932)),
}


# The models in plain JAX.


def loss_fn(params, batch, *, heads, is_causal):
    """Returns the mean cross-entropy of the tokens that have a target: of GPT-2 if causal, else of BERT's."""
    import jax
    import jax.numpy as jnp

    tokens_BT, targets_BT = batch
    x_BTD = params["tokens"][tokens_BT] + params["positions"][: tokens_BT.shape[1]]
    if not is_causal:
        x_BTD = norm(params["norm"], x_BTD + params["types"][0])
    for layer in params["layers"]:
        if is_causal:
            x_BTD = x_BTD + attention(layer, norm(layer["norm1"], x_BTD), heads, is_causal=True)
            x_BTD = x_BTD + mlp(layer, norm(layer["norm2"], x_BTD), approximate=True)
        else:
            x_BTD = norm(layer["norm1"], x_BTD + attention(layer, x_BTD, heads, is_causal=False))
            x_BTD = norm(layer["norm2"], x_BTD + mlp(layer, x_BTD, approximate=False))
    if is_causal:
        logits_BTV = norm(params["norm"], x_BTD, eps=1e-5) @ params["tokens"].T
    else:
        x_BTD = norm(params["head_norm"], jax.nn.gelu(dense(params["head"], x_BTD), approximate=False))
        logits_BTV = x_BTD @ params["tokens"].T + params["head_bias"]
    log_probs = jax.nn.log_softmax(logits_BTV)
    losses_BT = -jnp.take_along_axis(log_probs, jnp.maximum(targets_BT, 0)[..., None], -1)[..., 0]
    has_target = targets_BT >= 0
    return jnp.sum(jnp.where(has_target, losses_BT, 0.0)) / jnp.sum(has_target)


def attention(layer, x_BTD, heads, *, is_causal):
    import jax
    import jax.numpy as jnp

    b, t, d = x_BTD.shape
    q, k, v = jnp.unstack(dense(layer["qkv"], x_BTD).reshape(b, t, 3, heads, d // heads), axis=2)
    scores_BNTS = jnp.einsum("BTNH,BSNH->BNTS", q, k) / (d // heads) ** 0.5
    if is_causal:
        scores_BNTS = jnp.where(jnp.tril(jnp.ones((t, t), bool)), scores_BNTS, -1e30)
    mixed_BTNH = jnp.einsum("BNTS,BSNH->BTNH", jax.nn.softmax(scores_BNTS), v)
    return dense(layer["out"], mixed_BTNH.reshape(b, t, d))


def mlp(layer, x, *, approximate):
    import jax

    return dense(layer["down"], jax.nn.gelu(dense(layer["up"], x), approximate=approximate))


def dense(p, x):
    return x @ p["kernel"] + p["bias"]


def norm(p, x, eps=1e-5):
    import jax
    import jax.numpy as jnp

    centred = x - jnp.mean(x, -1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.mean(centred**2, -1, keepdims=True) + eps) * p["scale"] + p["bias"]


def weights(model: Model) -> dict:
    """Returns drawn parameters, of NumPy; biases and scales are drawn too, so that each is told from the others."""
    rng, d = np.random.default_rng(0), model.width

    def draw(*shape, mean=0.0):
        return (mean + 0.02 * rng.standard_normal(shape)).astype(np.float32)

    def linear(ins, outs):
        return {"kernel": draw(ins, outs), "bias": draw(outs)}

    def scaling():
        return {"scale": draw(d, mean=1.0), "bias": draw(d)}

    def layer():
        products = {"qkv": linear(d, 3 * d), "out": linear(d, d), "up": linear(d, 4 * d), "down": linear(4 * d, d)}
        return products | {"norm1": scaling(), "norm2": scaling()}

    params = {"tokens": draw(model.vocab, d), "positions": draw(model.positions, d), "norm": scaling()}
    params["layers"] = [layer() for _ in range(model.layers)]
    if not model.is_causal:
        params |= {"types": draw(1, d), "head": linear(d, d), "head_norm": scaling(), "head_bias": draw(model.vocab)}
    return params


def drawn_batch(model: Model, rows: int, seq_len: int, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns (tokens, targets), -100 where there is none: the next tokens, or 15 % of them, masked by token 3."""
    rng = np.random.default_rng(number)
    tokens = rng.integers(4, model.vocab, (rows, seq_len)).astype(np.int32)
    if model.is_causal:
        return tokens, np.concatenate((tokens[:, 1:], np.full((rows, 1), -100, np.int32)), 1)
    is_masked = rng.random(tokens.shape) < 0.15
    return np.where(is_masked, 3, tokens).astype(np.int32), np.where(is_masked, tokens, -100).astype(np.int32)


# The same models in PyTorch.


def torch_model(model: Model, params: dict):
    """Returns the model of `transformers` with these weights, without dropout."""
    import torch
    import transformers

    if model.is_causal:
        config = transformers.GPT2Config(
            vocab_size=model.vocab,
            n_embd=model.width,
            n_layer=model.layers,
            n_head=model.heads,
            n_positions=model.positions,
            use_cache=False,
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        )
        net = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.BertConfig(
            vocab_size=model.vocab,
            hidden_size=model.width,
            num_hidden_layers=model.layers,
            num_attention_heads=model.heads,
            intermediate_size=4 * model.width,
            max_position_embeddings=model.positions,
            type_vocab_size=1,
            layer_norm_eps=1e-5,
            **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
        )
        net = transformers.BertForMaskedLM(config)
    named = (gpt2_names if model.is_causal else bert_names)(params)
    missing, unknown = net.load_state_dict({name: torch.tensor(value) for name, value in named.items()}, strict=False)
    if unknown or {*missing} - {"lm_head.weight", "cls.predictions.decoder.weight", "cls.predictions.decoder.bias"}:
        raise ValueError(f"transformers names its weights otherwise: missing {missing}, unknown {unknown}")
    return net.train()


def gpt2_names(params: dict) -> dict:
    """Returns our parameters by the names that transformers has for those of GPT-2."""
    parts = {"attn.c_attn": "qkv", "attn.c_proj": "out", "mlp.c_fc": "up", "mlp.c_proj": "down"}
    parts |= {"ln_1": "norm1", "ln_2": "norm2"}
    found = {"wte.weight": params["tokens"], "wpe.weight": params["positions"]} | _named("ln_f", params["norm"])
    for number, layer in enumerate(params["layers"]):
        for theirs, ours in parts.items():
            found |= _named(f"h.{number}.{theirs}", layer[ours])
    return {f"transformer.{name}": value for name, value in found.items()}


def bert_names(params: dict) -> dict:
    """Returns our parameters by the names that transformers has for those of BERT."""
    parts = {"attention.output.dense": "out", "intermediate.dense": "up", "output.dense": "down"}
    parts |= {"attention.output.LayerNorm": "norm1", "output.LayerNorm": "norm2"}
    found = {}
    for theirs, ours in {"word": "tokens", "position": "positions", "token_type": "types"}.items():
        found[f"bert.embeddings.{theirs}_embeddings.weight"] = params[ours]
    found |= _named("bert.embeddings.LayerNorm", params["norm"])
    for number, layer in enumerate(params["layers"]):
        prefix = f"bert.encoder.layer.{number}"
        for theirs, ours in parts.items():
            found |= _named(f"{prefix}.{theirs}", layer[ours], transpose=True)
        for place, part in enumerate(("query", "key", "value")):
            own = {key: np.split(value, 3, axis=-1)[place] for key, value in layer["qkv"].items()}
            found |= _named(f"{prefix}.attention.self.{part}", own, transpose=True)
    found |= _named("cls.predictions.transform.dense", params["head"], transpose=True)
    found |= _named("cls.predictions.transform.LayerNorm", params["head_norm"])
    return found | {"cls.predictions.bias": params["head_bias"]}


def _named(name: str, p: dict, *, transpose: bool = False) -> dict:
    weight = p["scale"] if "scale" in p else p["kernel"].T if transpose else p["kernel"]
    return {f"{name}.weight": weight, f"{name}.bias": p["bias"]}


def torch_step(job: dict):
    """Returns (tokens, targets -> loss, None, "") of a step in PyTorch."""
    import torch

    model, device = Model(**job["model"]), "cuda" if job["gpu"] else "cpu"
    if job["gpu"]:
        torch.set_float32_matmul_precision("high")  # TF32, which is JAX's default
    net = torch_model(model, weights(model)).to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=RATE, weight_decay=DECAY, fused=True)
    forward = torch.compile(net) if (TORCH | TORCH_BF16)[job["name"]] else net

    def step(tokens, targets):
        ids, labels = (torch.from_numpy(x).long().to(device) for x in (tokens, tokens if model.is_causal else targets))
        with torch.autocast(device, torch.bfloat16, enabled=job["name"] in TORCH_BF16):
            loss = forward(input_ids=ids, labels=labels).loss  # which shifts GPT-2's labels itself
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step, None, ""


# The steps in JAX.


def optimized(optimizer, loss):
    """Returns the jitted step of (params, opt_state), batch, scheduled for memory as XLA does on accelerators."""
    import jax
    import optax

    def step(state, batch):
        value, grads = jax.value_and_grad(loss)(state[0], batch)
        updates, opt_state = optimizer.update(grads, state[1], state[0])
        return (optax.apply_updates(state[0], updates), opt_state), value

    options = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
    return jax.jit(step, donate_argnums=0, compiler_options=options if jax.default_backend() == "cpu" else None)


def jax_step(job: dict):
    """Returns (tokens, targets -> loss, the compiled program, what the passes did) of a step in JAX."""
    import jax
    import jax.numpy as jnp
    import optax

    from hlat_jax.passes import naming, remat_pass
    from hlat_jax.passes.autocast_pass import autocast
    from hlat_jax.passes.chunk_pass import chunk
    from hlat_jax.passes.kernels_pass import kernels
    from hlat_jax.passes.residuals import select_residuals

    model = Model(**job["model"])
    plain = loss = functools.partial(loss_fn, heads=model.heads, is_causal=model.is_causal)
    optimizer = optax.sgd(RATE) if job["optimizer"] == "sgd" else optax.adamw(RATE, weight_decay=DECAY)
    step_of = functools.partial(optimized, optimizer)
    params = jax.tree.map(jnp.array, weights(model))  # copies: they are donated
    state = params, optimizer.init(params)
    tokens = jax.ShapeDtypeStruct((job["batch"], job["seq_len"]), jnp.int32)
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state), (tokens, tokens)
    done = []
    if "autocast" in job["passes"]:
        loss = autocast(loss, "bf16")
    for name, rewriting in (("kernels", kernels), ("chunk", functools.partial(chunk, max_bytes=CHUNK))):
        if name in job["passes"]:
            loss = rewriting(loss)
            jax.eval_shape(loss, args[0][0], args[1])
            done += [f"{one.op} x{one.count}" for one in loss.report().replacements]
    if "residuals" in job["passes"]:
        loss = select_residuals(loss)
    if "budget" in job["passes"]:
        measure = remat_pass.temporaries if job["budget"] < 1 else remat_pass.total_bytes
        budget = job["budget"]
        if budget < 1:
            budget *= remat_pass.temporaries(step_of(plain).trace(*args))
        options = remat_pass.RematOptions(measure=measure, max_compilations=job["compilations"])
        try:
            plan = remat_pass.fit(loss, *args, budget_bytes=int(budget), step=step_of, options=options)
        except remat_pass.BudgetNotMet:
            loss = naming.checkpointed(loss, naming.RematChoice(), region="auto")
            kept = "NOT MET, nothing kept"
        else:
            loss = plan.fn
            kept = "fits as it is" if plan.choice is None else f"{plan.region}, products {plan.recompute_share:+.1%}"
        done.append(f"budget {budget / MIB:.0f} MiB: {kept}")
    compiled = step_of(loss).trace(*args).lower().compile()

    def step(tokens, targets):
        nonlocal state
        state, value = compiled(state, (jnp.asarray(tokens), jnp.asarray(targets)))
        return float(value)

    return step, compiled, "; ".join(done)


def bytes_of(compiled) -> int:
    """Returns the arguments, results that alias none, and temporaries of a compiled program."""
    memory = compiled.memory_analysis()
    taken = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    return taken + memory.output_size_in_bytes - memory.alias_size_in_bytes


def largest_batches(job: dict) -> dict:
    """Returns the limit, and the largest batches that fit it without rematerialization and with nothing kept."""
    import jax
    import jax.numpy as jnp
    import optax
    from remat import largest_batch

    from hlat_jax.facts.byte_sizes import parse_bytes
    from hlat_jax.passes import remat_pass

    model, step_of = Model(**job["model"]), functools.partial(optimized, optax.sgd(RATE))
    loss = functools.partial(loss_fn, heads=model.heads, is_causal=model.is_causal)
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), weights(model))
    state = params, optax.sgd(RATE).init(params)

    def make_step(batch):
        tokens = jax.ShapeDtypeStruct((batch, job["seq_len"]), jnp.int32)
        return loss, (state, (tokens, tokens))

    if job["limit"]:
        limit = parse_bytes(job["limit"], name="--limit")
    else:
        limit = remat_pass.total_bytes(step_of(loss).trace(*make_step(model.raf[0])[1]))
    without = largest_batch(make_step, limit, step=step_of)
    return {
        "limit": limit,
        "without": without,
        "most": largest_batch(make_step, limit, step=step_of, keeps_nothing=True),
    }


# Processes.


def resident(key: str) -> int:
    """Returns the bytes of this process that are in memory now (VmRSS), or were at most (VmHWM)."""
    return 1024 * int(re.search(rf"{key}:\s+(\d+)", pathlib.Path("/proc/self/status").read_text())[1])


def busy_seconds() -> float:
    """Returns the CPU seconds that all processes of this machine have used."""
    ticks = [int(field) for field in pathlib.Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")


def work(job: dict) -> None:
    """Makes the step of a job, says so on stdout, and makes one for every line on stdin."""
    if job["name"] == "largest batches":
        print(json.dumps(largest_batches(job)), flush=True)
        return
    load_libraries(job)
    model, libraries, began = Model(**job["model"]), resident("VmRSS"), time.monotonic()
    step, compiled, done = (torch_step if job["name"] in TORCH | TORCH_BF16 else jax_step)(job)
    losses = [] if job["compile_only"] else [step(*drawn_batch(model, job["batch"], job["seq_len"], 0))]
    xla_bytes = None if compiled is None else bytes_of(compiled)
    print(json.dumps({"bytes": xla_bytes, "done": done, "first_s": time.monotonic() - began}), flush=True)
    for number, _ in enumerate(sys.stdin, 1):
        batch = drawn_batch(model, job["batch"], job["seq_len"], number)
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what compilation has left
        pathlib.Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins again
        busy, cpu, began = busy_seconds(), time.process_time(), time.monotonic()
        losses.append(step(*batch))
        seconds, cpu = time.monotonic() - began, time.process_time() - cpu
        found = {"seconds": seconds, "foreign": 0.0 if job["gpu"] else (busy_seconds() - busy - cpu) / seconds}
        peak = gpu_peak(job) if job["gpu"] else resident("VmHWM") - libraries
        print(json.dumps(found | {"losses": losses, "peak": peak}), flush=True)


def gpu_peak(job: dict) -> int:
    """Returns the largest bytes that PyTorch has allocated on the GPU; 0 of JAX, whose allocator reserves."""
    if job["name"] not in TORCH | TORCH_BF16:
        return 0
    import torch

    return torch.cuda.max_memory_allocated()


def load_libraries(job: dict) -> None:
    if job["name"] in TORCH | TORCH_BF16:
        import torch
        import transformers  # noqa: F401

        torch.zeros(1)
        return
    import jax
    import jax.numpy as jnp

    jax.block_until_ready(jax.jit(jax.grad(lambda x: jnp.sum(jnp.tanh(x @ x))))(jnp.ones((8, 8))))  # the compiler too


class Worker:
    """A process that makes a step when asked."""

    def __init__(self, name: str, model: Model, **job):
        job = {
            "name": name,
            "model": dataclasses.asdict(model),
            "passes": PASSES.get(name, ()),
            "compile_only": False,
            "gpu": False,
            **job,
        }
        root = str(pathlib.Path(__file__).resolve().parents[1])
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])}
        env |= {"TF_CPP_MIN_LOG_LEVEL": "3", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # several share a GPU
        words = [sys.executable, __file__, "worker", json.dumps(job)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
        self.name, self.model, self.batch = name, model, job.get("batch")
        self.process = subprocess.Popen(words, env=env, **pipes)
        line = self.process.stdout.readline()
        self.ready = json.loads(line) if line else None  # None: its error is on stderr

    def sample(self) -> dict:
        """Makes one step and returns what it took."""
        self.process.stdin.write("\n")
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        """Lets the worker end."""
        self.process.stdin.close()
        self.process.wait()


def start_workers(jobs: list[dict], *, at_once: bool) -> list[Worker]:
    """Returns the workers of these jobs that are ready; they compile one after another or all beside each other."""
    with concurrent.futures.ThreadPoolExecutor(max(1, len(jobs)) if at_once else 1) as pool:
        workers = list(pool.map(lambda job: Worker(**job), jobs))
    for worker in workers:
        if worker.ready is None:
            print(f"{worker.name} of {worker.model}: failed", flush=True)
    return [worker for worker in workers if worker.ready is not None]


def in_turn(workers: list[Worker], num_rounds: int) -> tuple[list[list[dict]], int]:
    """Returns (samples by worker and round, how many rounds were undisturbed); these alone if there are any."""
    rounds = [[worker.sample() for worker in workers] for _ in range(num_rounds)]
    quiet = [samples for samples in rounds if max(one["foreign"] for one in samples) < MAX_FOREIGN_CORES]
    return list(zip(*(quiet or rounds), strict=True)), len(quiet)


def median_ratio(above: list[dict], below: list[dict]) -> float:
    """Returns the median over rounds of the ratio of seconds."""
    return statistics.median(a["seconds"] / b["seconds"] for a, b in zip(above, below, strict=True))


def compare_steps(name: str, model: Model, args: argparse.Namespace) -> bool:
    """Prints the table of one model; returns whether all losses in fp32 agree."""
    job = {"optimizer": "adamw", "batch": args.batch, "seq_len": args.seq_len, "compilations": args.compilations}
    job["gpu"], bf16 = args.gpu, TORCH_BF16 if args.gpu else {}
    names = [each for each in (*TORCH, *bf16, *PASSES) if not args.only or each in args.only.split(",")]
    print(f"\n{name}: {args.batch} x {args.seq_len} tokens, {model}, {os.cpu_count()} cores")
    if TORCH.keys() & {*names} and not shutil.which("g++") and "PyTorch torch.compile" in names:
        print("PyTorch torch.compile: left out, there is no C++ compiler (g++)")
        names.remove("PyTorch torch.compile")
    job |= {"model": model, "budget": args.budget_share}
    workers = start_workers([{"name": each, **job} for each in names], at_once=args.gpu)
    if not workers:
        return False
    samples, num_quiet = in_turn(workers, args.rounds)
    by_name = dict(zip([worker.name for worker in workers], samples, strict=True))
    first = workers[0].name
    print("| | s/step | faster than PyTorch | than plain JAX | peak MiB | XLA's MiB | loss apart | first s | |")
    print("|---|---|---|---|---|---|---|---|---|")
    agree, tolerance = True, TOLERANCE * (10 if args.gpu else 1)  # TF32 has ten bits of mantissa
    for worker in workers:
        found = by_name[worker.name]
        ratios = [
            f"{median_ratio(by_name[base], found):.2f}" if base in by_name else ""
            for base in ("PyTorch eager", "plain JAX")
        ]
        pairs = zip(found[-1]["losses"], by_name[first][-1]["losses"], strict=True)
        apart = max(abs(a / b - 1) for a, b in pairs)
        agree &= apart <= tolerance or worker.name in TORCH_BF16 or "autocast" in PASSES.get(worker.name, ())
        cells = (
            worker.name,
            f"{statistics.median(one['seconds'] for one in found):.4f}",
            *ratios,
            f"{max(one['peak'] for one in found) / MIB:.0f}",
            "" if worker.ready["bytes"] is None else f"{worker.ready['bytes'] / MIB:.0f}",
            f"{apart:.0e}",
            f"{worker.ready['first_s']:.0f}",
            worker.ready["done"],
        )
        print("| " + " | ".join(cells) + " |", flush=True)
        worker.close()
    print(f"{num_quiet} of {args.rounds} rounds undisturbed{'' if num_quiet else ', all are counted'}")
    if not agree:
        print(f"LOSSES in fp32 are more than {tolerance:.0e} apart")
    return agree


def compare_batches(models: dict[str, Model], args: argparse.Namespace) -> bool:
    """Prints the rows of each model: without rematerialization, at RAF's factor, and at the largest batch."""
    job = {"optimizer": "sgd", "seq_len": args.seq_len, "compilations": args.compilations, "gpu": args.gpu}
    jobs = [{"name": "largest batches", "model": model, "limit": args.limit} | job for model in models.values()]
    searches = start_workers(jobs, at_once=args.gpu)
    batches_of = {search.model: search.ready for search in searches}
    for search in searches:
        search.close()
    for name, model in models.items():
        if model in batches_of:
            print_batches(name, model, batches_of[model], job, args)
    return len(batches_of) == len(models)


def print_batches(name: str, model: Model, found: dict, job: dict, args: argparse.Namespace) -> None:
    """Prints the rows of one model, of which these are the limit and the largest batches."""
    limit, without, most = (found[key] for key in ("limit", "without", "most"))
    batches = {"plain JAX": [without], "budget": sorted({min(without * model.raf[1] // model.raf[0], most), most})}
    jobs = [
        {"name": each, "model": model, "batch": batch, "budget": limit} | job
        for each, sizes in batches.items()
        for batch in sizes
    ]
    workers = start_workers(jobs, at_once=args.gpu)
    samples, num_quiet = in_turn(workers, args.rounds)
    raf = f"RAF {model.raf[0]} to {model.raf[1]} at {model.raf[2]:.1%}"
    for worker, own in zip(workers, samples, strict=True):
        throughput = median_ratio(samples[0], own) * worker.batch / workers[0].batch
        cells = (
            f"{name}, {model.layers} x {model.width}",
            f"{limit / MIB:.0f}",
            f"{worker.batch}",
            f"{worker.ready['bytes'] / MIB:.0f}",
            f"{max(one['peak'] for one in own) / MIB:.0f}",
            f"{worker.batch / statistics.median(one['seconds'] for one in own):.2f}",
            f"{throughput:.1%}",
            worker.ready["done"] or raf,
            f"{num_quiet} of {args.rounds}",
        )
        print("| " + " | ".join(cells) + " |", flush=True)
        worker.close()


def print_memory(name: str, model: Model, args: argparse.Namespace) -> bool:
    """Prints the bytes of a step of one model with each pass."""
    job = {"optimizer": "sgd", "batch": args.batch, "seq_len": args.seq_len, "compilations": args.compilations}
    for each in (each for each in PASSES if not args.only or each in args.only.split(",")):
        worker = Worker(each, model, budget=args.budget_share, compile_only=True, **job)
        found = worker.ready or {"bytes": 0, "done": "failed"}
        print(f"| {name}, {each} | {found['bytes'] / MIB:.0f} | {found['done']} |", flush=True)
        worker.close()
    return True


def profile(name: str, model: Model, args: argparse.Namespace) -> bool:
    """Prints where the time of a step of one model goes, with each pass."""
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])  # before the threads of XLA
    from train_step import print_profile

    job = {"optimizer": "adamw", "batch": args.batch, "seq_len": args.seq_len, "compilations": args.compilations}
    job |= {"model": dataclasses.asdict(model), "budget": args.budget_share}
    batch = drawn_batch(model, args.batch, args.seq_len, 0)
    for each in (each for each in PASSES if each in (args.only or "plain JAX").split(",")):
        step, compiled, _ = jax_step({"passes": PASSES[each], **job})
        print(f"\n{name}, {each}: {args.batch} x {args.seq_len} tokens")
        print_profile(compiled, functools.partial(step, *batch), num_steps=3)
    return True


def main() -> None:
    if sys.argv[1:2] == ["worker"]:
        work(json.loads(sys.argv[2]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("step", "batch", "memory", "profile"))
    parser.add_argument("--models", help="names, with commas")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, help="rows; default: 2 for step and profile, 32 for memory")
    parser.add_argument("--seq_len", type=int, help="default: 256 for step and profile, else 128")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--width", type=int, help="a multiple of 64, the width of a head")
    parser.add_argument("--vocab", type=int)
    parser.add_argument("--only", default="", help="contenders, with commas")
    parser.add_argument("--gpu", action="store_true", help="run on the GPU")
    parser.add_argument("--budget_share", type=float, default=0.8, help="of the temporaries of plain JAX")
    parser.add_argument("--compilations", type=int, default=4, help="most programs of a search under a budget")
    parser.add_argument("--shrink", type=int, default=3, help="of batch: divides heads, widths, vocabularies")
    parser.add_argument("--limit", default="", help="of batch, such as 1GiB")
    args = parser.parse_args()
    is_timed = args.what in ("step", "profile")
    args.seq_len = args.seq_len or (256 if is_timed else 128)
    args.batch = args.batch or (2 if is_timed else 32)
    names = ["bert-base", "gpt2"] if is_timed else {"batch": list(MODELS), "memory": ["bert-base"]}[args.what]
    names = args.models.split(",") if args.models else names
    unknown = sorted({*names} - {*MODELS})
    if unknown:
        parser.error(f"--models: {', '.join(unknown)}: there are {', '.join(MODELS)}")
    if args.what == "batch":
        print(f"fp32, SGD, {args.seq_len} tokens a row, {os.cpu_count()} cores; MiB")
        print("| | limit | batch | XLA's | peak | samples/s | throughput | | undisturbed |")
        print("|---|---|---|---|---|---|---|---|---|")
    elif args.what == "memory":
        print(f"fp32, SGD, {args.batch} x {args.seq_len} tokens, by XLA's accounting")
        print("| | MiB | |")
        print("|---|---|---|")
    sizes = {key: value for key in ("layers", "width", "vocab") if (value := getattr(args, key)) is not None}
    shrink = args.shrink if args.what == "batch" and not args.gpu else 1
    models = {name: dataclasses.replace(MODELS[name].divided(shrink), **sizes) for name in names}
    if args.what == "batch":
        sys.exit(not compare_batches(models, args))
    compare = {"step": compare_steps, "memory": print_memory, "profile": profile}[args.what]
    are_well = [compare(name, model, args) for name, model in models.items()]
    sys.exit(not all(are_well))


if __name__ == "__main__":
    main()
