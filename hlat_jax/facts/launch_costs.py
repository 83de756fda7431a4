"""Fixed costs of one launch of a program on Neuron devices, as measured by others, not by us."""

from __future__ import annotations

# Key of `hardware.DEVICES` -> ranks of the job -> ms of a launch that holds a collective, whatever their number and
# size. trn1 refuses 4 ranks. trn2 is at LNC 2; LNC 1 and several nodes have not been measured.
# Source: github.com/foxl-ai/kiln, docs/neuron-notes.md, "Collectives across chips" and "Collectives on trn2", 3 October
# 2026: SDK 2.32, chained launches of an all-reduce of bf16 [4, 4096] by PyTorch.
COLLECTIVE_LAUNCH_MS = {
    "trn1": {2: 0.15, 8: 2.45, 16: 3.76, 32: 5.10},
    "trn2": {2: 0.15, 4: 1.04, 8: 1.49, 16: 1.98, 32: 2.54, 64: 2.97},
}
PLAIN_LAUNCH_MS = 0.15  # of an empty program: 0.09 to 0.15. The same source
# A jitted call with 8 or 128 arrays took 8 ms, and one with 512 arrays 418 ms. Source: github.com/xbill9/tpu-jax-inf2,
# docs/neuron-jax-quirks.md, section 8, July 2026: JAX 0.6.2 on inf2.
MOST_ARRAYS = 128


def collective_launch_ms(device_key: str, num_ranks: int) -> float | None:
    """Returns the ms of a launch with a collective over `num_ranks` ranks, or None for a device without measurements.

    Between two measured numbers of ranks it is the higher cost. Above the highest number it is a lower bound.
    """
    measured = COLLECTIVE_LAUNCH_MS.get(device_key)
    if measured is None:
        return None
    return measured[min((ranks for ranks in measured if ranks >= num_ranks), default=max(measured))]
