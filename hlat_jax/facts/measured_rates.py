"""Rates and reserved memory that others measured on Trainium in 2026, not with JAX. We measured nothing."""

from __future__ import annotations

# KILN below is foxl-ai/kiln, docs/neuron-notes.md: 2 to 8 October 2026, SDK 2.32, neuronx-cc 2.27, PyTorch.
# chip -> share of its peak that bf16 products alone reach: of trn2 by XLA, from 1024 x 4096 x 4096 to 1024 x 4096 x
# 16384, 8 in a program; of trn1 by its tensor engine, derived from its time per
# column. Source: KILN, "FP8 in XLA dots" and "decode kernels".
PRODUCT_SHARES = {"trn1": (0.84, 0.84), "trn2": (0.64, 0.74)}
# chip -> bytes/s of a device's memory within a step, at the default LNC; alone it reaches its documented rate on trn2.
# Source: KILN, profiles of prefill and decode steps.
STEP_MEMORY_BYTES_PER_S = {"trn1": (175e9, 240e9), "trn2": (175e9, 175e9)}
# Length of a row -> share of the peak of one chip of trn2 in a forward pass of Qwen3 8B: with XLA's attention, whose
# scores go through memory, and with an NKI kernel. Source: foxl-ai/kiln, bench/results/2026-10-07-trn2.3xlarge-*.
XLA_ATTENTION_SHARES = {2048: 0.245, 8192: 0.121, 16384: 0.105, 32768: 0.066}
KERNEL_ATTENTION_SHARES = {2048: 0.28, 8192: 0.33, 16384: 0.33, 32768: 0.33}
LONG_ROW = 8192  # the shortest measured row at which a kernel is more than twice as fast
# What loaded programs take of a device beside `Device.reserved_bytes`: the instructions of its engines, and rings of
# descriptors for spills. Scratchpads hold temporaries. Source: KILN, "Configurations", a full core of trn1.
INSTRUCTION_BYTES = 64
RING_BYTES = round(0.325 * 2**30)


def attention_shares(seq_len: int) -> tuple[int, float, float]:
    """Returns (length, share with XLA's attention, share with a kernel) of the longest measured row up to `seq_len`."""
    length = max(length for length in XLA_ATTENTION_SHARES if length <= max(seq_len, min(XLA_ATTENTION_SHARES)))
    return length, XLA_ATTENTION_SHARES[length], KERNEL_ATTENTION_SHARES[length]
