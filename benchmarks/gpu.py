"""How fast does a GPU train our configs, against transformers in PyTorch on the same GPU?

    python benchmarks/gpu.py [--configs=160m,1b,7b] [--steps=12] [--json=F.json]

A step of ours is the trainer's own: forward, backward, clipping and AdamW, on fresh tokens. PyTorch's is
LlamaForCausalLM with SDPA and fused AdamW, fp32 weights under autocast to bf16, eager and under torch.compile. Both
have the same sizes and tokens; 7b has 4 layers of its 32. Each contender has a process of its own and the GPU alone.
Seconds are medians over the steps after the third. MFU counts 6N and attention, of the data sheet's dense bf16 rate.
Memory is what XLA has for arguments, results and temporaries, and PyTorch's largest allocation.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

import numpy as np

# config -> its settings here; a batch is one microbatch
SIZES = {
    "160m": "data.batch_size=16 model.remat=none",
    "1b": "data.batch_size=4",
    "7b": "data.batch_size=2 model.num_layers=4 parallel.tensor=1 parallel.sequence_parallel=False",
}
ATTENTION = ("auto", "einsum", "chunked", "triton", "cudnn")
OURS = {f"ours, attention={name}": f"precision.policy=mixed model.attention={name}" for name in ATTENTION}
OURS["ours, policy=bf16_sr"] = "precision.policy=bf16_sr"
OURS["ours, policy=fp32"] = "precision.policy=fp32"
TORCH = {"PyTorch eager": False, "PyTorch torch.compile": True}
GIB = 2**30


def configured(name: str, settings: str):
    """Returns the config `name` with `section.key=value` settings, for one device."""
    from hlat_jax.cli import config_files
    from hlat_jax.resolve import resolve

    mutable = config_files.load(name)
    mutable.train.num_microbatches = 1
    for setting in f"{SIZES[name]} {settings}".split():
        path, value = setting.split("=")
        section, key = path.split(".")
        mutable[section][key] = value == "True" if value in ("True", "False") else type(mutable[section][key])(value)
    return resolve(mutable)


def our_step(config):
    """Returns (tokens -> loss, bytes that XLA has for the step)."""
    import jax

    from hlat_jax.batch import concat_batch
    from hlat_jax.parallel.rows import shard_batch
    from hlat_jax.parallel.sharding import make_layout
    from hlat_jax.program import make_program

    layout = make_layout(config.parallel, jax.devices()[:1])
    program = make_program(config, layout)
    state, rate = program.init_state(), np.float32(3e-4)
    compiled = None
    taken = 0

    def step(tokens_BT):
        nonlocal state, compiled, taken
        batch = shard_batch(concat_batch(tokens_BT), layout)
        if compiled is None:
            compiled = program.step.lower(state, batch, rate).compile()
            memory = compiled.memory_analysis()
            taken = memory.argument_size_in_bytes + memory.temp_size_in_bytes
            taken += memory.output_size_in_bytes - memory.alias_size_in_bytes
        state, metrics = compiled(state, batch, rate)
        return float(metrics.loss)

    return step, lambda: taken


def torch_step(config, *, compiles: bool):
    """Returns (tokens -> loss, bytes that PyTorch had allocated at most)."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    model = config.model
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = True
    net = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=model.vocab_size,
            hidden_size=model.embed_dim,
            intermediate_size=model.mlp_dim,
            num_hidden_layers=model.num_layers,
            num_attention_heads=model.num_heads,
            num_key_value_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            max_position_embeddings=model.max_positions,
            attn_implementation="sdpa",
            use_cache=False,
        )
    ).cuda()
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    forward = torch.compile(net) if compiles else net

    def step(tokens_BT):
        ids = torch.from_numpy(tokens_BT).long().cuda()
        with torch.autocast("cuda", torch.bfloat16):
            loss = forward(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step, torch.cuda.max_memory_allocated


def work(name: str, contender: str, num_steps: int) -> None:
    """Prints what one contender's steps of a config took, as JSON."""
    config = configured(name, OURS.get(contender, ""))
    is_torch = contender in TORCH
    step, taken = torch_step(config, compiles=TORCH[contender]) if is_torch else our_step(config)
    rng = np.random.default_rng(0)
    shape = config.data.batch_size, config.data.seq_len
    losses, seconds = [], []
    for _ in range(num_steps):
        tokens = rng.integers(0, config.model.vocab_size, shape).astype(np.int32)
        began = time.perf_counter()
        losses.append(step(tokens))
        seconds.append(time.perf_counter() - began)
    print(json.dumps({"seconds": seconds, "losses": losses, "bytes": taken()}))


def main() -> int:
    if sys.argv[1:2] == ["worker"]:
        work(sys.argv[2], sys.argv[3], int(sys.argv[4]))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configs", default=",".join(SIZES))
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--only", default="", help="contenders whose name holds one of these, by commas")
    parser.add_argument("--json", help="also write every sample to this file")
    args = parser.parse_args()
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # the memory is the workers'
    import jax  # here: a worker of PyTorch does not need it

    from hlat_jax.facts import hardware
    from hlat_jax.run import costs

    kind = jax.devices()[0].device_kind
    row = hardware.device(kind)
    everything = {}
    for name in args.configs.split(","):
        config = configured(name, "")
        tokens = config.data.batch_size * config.data.seq_len
        flops = costs.flops_per_token(config.model, config.data.seq_len) * tokens
        print(f"\n{name}, {config.model.num_layers} layers, {config.data.batch_size} x {config.data.seq_len}, {kind}")
        print("| | s/step | tokens/s | MFU | GiB | first step s | loss after |\n|---|---|---|---|---|---|---|")
        for contender in (*OURS, *TORCH):
            if not any(word in contender for word in args.only.split(",")):
                continue
            words = [sys.executable, __file__, "worker", name, contender, str(args.steps)]
            env = os.environ | {"PYTHONPATH": os.pathsep.join([str(pathlib.Path(__file__).parents[1]), *sys.path])}
            env |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "true", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9"}
            done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
            if done.returncode:
                reason = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
                print(f"| {contender} | failed: {reason[:150]} |", flush=True)
                continue
            measured = everything[f"{name}, {contender}"] = json.loads(done.stdout.splitlines()[-1])
            seconds = statistics.median(measured["seconds"][3:])
            mfu = f"{flops / seconds / row.peak_flops:.1%}" if row else ""
            print(
                f"| {contender} | {seconds:.4f} | {tokens / seconds:,.0f} | {mfu} | {measured['bytes'] / GIB:.1f} "
                f"| {measured['seconds'][0]:.0f} | {measured['losses'][-1]:.3f} |",
                flush=True,
            )
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(everything))
    return 0


if __name__ == "__main__":
    sys.exit(main())
