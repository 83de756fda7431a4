"""Rows of metrics.jsonl as the loop writes them."""

import math

TOKENS_PER_STEP = 100


def row(step, **changes):
    return {
        "step": step,
        "loss": 4.0 + 1 / (step + 3),
        "tokens": step * TOKENS_PER_STEP,
        "grad_norm": 0.5,
        "param_norm": 12.0,
        "learning_rate": 1e-4,
        "step_s": 0.5,
        "data_wait_s": 0.05,
        "peak_memory_bytes": 3 * 2**30,
        "batch_hash": f"{step:08x}",
        "nonfinite": 0,
    } | changes


def eval_row(step):
    return {"step": step, "eval_loss": 4.5, "perplexity": math.exp(4.5), "bits_per_byte": 1.75, "eval_tokens": 4096}
