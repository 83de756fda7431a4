"""How many tokens a second does greedy decoding make on this CPU, against transformers?

    python benchmarks/decode.py [--folder HF_FOLDER] [--tokens 64] [--prompt 32] [--pairs 9] [--dtype float32]
        [--json FILE]

Both continue one prompt with the same weights: those of a Hugging Face folder, by default random ones in the shape of
SmolLM-135M. Each has a process of its own, and they run in turn: one continuation of the one, one of the other, of
which every token is compared. Times hold the prefill and everything up to the token ids on the host, not the
compilation. Ratios are medians over the pairs of (seconds of transformers / seconds of ours). A pair counts when other
processes used less than 0.15 of a core during both; the line of the ratio says how many did. The last line is a bound
of both: a token reads all weights once, and torch sums as many bytes with all cores.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

SMOLLM_135M = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
SIDES = ("transformers", "ours")
MAX_FOREIGN_CORES = 0.15


def write_random(folder: pathlib.Path) -> None:
    """Writes a model of the shape of SmolLM-135M whose greedy texts do not repeat one token."""
    import torch
    import transformers

    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMOLLM_135M))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(std=0.1 if "embed" in name else SMOLLM_135M["hidden_size"] ** -0.5)
    model.save_pretrained(folder)


def continues_with_transformers(args):
    """Returns the function of a prompt that gives the ids after it."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(args.folder, dtype=getattr(torch, args.dtype)).eval()
    options = {"max_new_tokens": args.tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}

    def run(prompt):
        ids = torch.tensor([prompt])
        with torch.no_grad():
            return model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()

    return run


def continues_with_ours(args):
    """Returns the same of this package."""
    from hlat_jax.generate.generator import Generator
    from hlat_jax.weights.trained import open_weights

    weights = open_weights(args.folder)
    generator = Generator(weights.model, weights.restore(None, dtype=args.dtype))
    return lambda prompt: generator([prompt], max_tokens=args.tokens)[0]


def work(args) -> None:
    """Continues a prompt for every line on stdin; writes its ids, its seconds and the CPU seconds of this process."""
    run = {"transformers": continues_with_transformers, "ours": continues_with_ours}[args.side](args)
    for line in sys.stdin:
        began, cpu = time.monotonic(), time.process_time()
        ids = run(json.loads(line))
        found = {"seconds": time.monotonic() - began, "cpu": time.process_time() - cpu, "ids": ids}
        print(json.dumps(found), flush=True)


def busy_seconds() -> float:
    """Returns the CPU seconds that all processes of this machine have used."""
    user, nice, system, _, _, irq, softirq, *_ = map(
        int, pathlib.Path("/proc/stat").read_text().split("\n")[0].split()[1:]
    )
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def measured(process, prompt) -> dict:
    """Returns what a worker found, with `foreign`, the cores that other processes used meanwhile."""
    began, busy = time.monotonic(), busy_seconds()
    process.stdin.write(json.dumps(prompt) + "\n")
    process.stdin.flush()
    found = json.loads(process.stdout.readline())
    return found | {"foreign": (busy_seconds() - busy - found["cpu"]) / (time.monotonic() - began)}


def seconds_to_read_weights(args) -> tuple[int, float]:
    """Returns the bytes of the weights, and the seconds in which all cores read as many from memory."""
    import jax
    import torch

    from hlat_jax.weights.trained import open_weights

    num_weights = sum(leaf.size for leaf in jax.tree.leaves(open_weights(args.folder).arrays))
    memory = torch.ones(num_weights * getattr(torch, args.dtype).itemsize // 4)
    seconds = []
    for _ in range(9):
        began = time.monotonic()
        memory.sum()
        seconds.append(time.monotonic() - began)
    return memory.nbytes, statistics.median(seconds)


def compare(args) -> None:
    words = [sys.executable, __file__, f"--folder={args.folder}", f"--tokens={args.tokens}", f"--dtype={args.dtype}"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    workers = {side: subprocess.Popen([*words, f"--side={side}"], **pipes) for side in SIDES}
    rounds = []
    for number in range(args.pairs + 1):  # the first one compiles
        prompt = [(7 * number + 13 * place) % 1000 + 3 for place in range(args.prompt)]
        rounds.append({side: measured(worker, prompt) for side, worker in workers.items()})
        same = rounds[-1]["ours"]["ids"] == rounds[-1]["transformers"]["ids"]
        rates = "   ".join(
            f"{side} {args.tokens / found['seconds']:6.2f} tokens/s" for side, found in rounds[-1].items()
        )
        print(f"{number}: {rates}   {'same' if same else 'OTHER'} tokens", flush=True)
    for worker in workers.values():
        worker.stdin.close()
        worker.wait()
    pairs = rounds[1:]
    quiet = [pair for pair in pairs if max(found["foreign"] for found in pair.values()) < MAX_FOREIGN_CORES]
    kept = quiet or pairs
    ratio = statistics.median(pair["transformers"]["seconds"] / pair["ours"]["seconds"] for pair in kept)
    for side in SIDES:
        seconds = statistics.median(pair[side]["seconds"] for pair in kept)
        cores = statistics.median(pair[side]["cpu"] / pair[side]["seconds"] for pair in kept)
        print(f"{side:<14} {args.tokens / seconds:6.2f} tokens/s, {cores:.2f} cores")
    if args.json:
        ratios = [pair["transformers"]["seconds"] / pair["ours"]["seconds"] for pair in kept]
        pathlib.Path(args.json).write_text(json.dumps({"ratios": ratios}))
    print(
        f"ratio {ratio:.2f}; {len(quiet)} of {len(pairs)} pairs were undisturbed{'' if quiet else ', all are counted'}"
    )
    num_bytes, seconds = seconds_to_read_weights(args)
    print(
        f"weights of {num_bytes / 1e6:.0f} MB, read at {num_bytes / seconds / 1e9:.1f} GB/s: {1 / seconds:.2f} tokens/s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", help="with config.json and safetensors; default: random weights")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=32, help="tokens of it")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--json", help="also write the ratio of each pair to this file")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        work(args)
    elif args.folder:
        compare(args)
    else:
        with tempfile.TemporaryDirectory() as folder:
            args.folder = folder
            write_random(pathlib.Path(folder))
            compare(args)


if __name__ == "__main__":
    main()
