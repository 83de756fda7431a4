"""Throughput that AWS has published for Llama models on trn1.32xlarge, for comparison with a projection.

None of it was measured with HLAT itself, whose speed is not published. All rows have a global batch of 1,024 sequences.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Published:
    """One published measurement on trn1.32xlarge nodes of 32 cores."""

    params: float
    nodes: int
    layout: str
    seq_len: int
    sequences_per_s: float
    source: str

    @property
    def tokens_per_s_and_node(self) -> float:
        return self.sequences_per_s * self.seq_len / self.nodes


ROWS = (
    Published(6.74e9, 16, "TP8 DP64", 4096, 81.0, "AWS Neuron SDK 2.15 benchmarks, NxD"),
    Published(6.74e9, 16, "TP8 DP64", 4096, 92.93, "AWS Neuron SDK 2.18 benchmarks, NxD"),
    Published(6.74e9, 16, "TP8 DP64", 4096, 101.3, "AWS Neuron SDK 2.20 benchmarks, NxD"),
    Published(8.03e9, 32, "TP32 DP32", 8192, 49.47, "AWS Neuron SDK 2.20 benchmarks, NxD, Llama 3.1"),
    Published(68.98e9, 32, "TP32 PP4 DP8", 4096, 17.86, "AWS Neuron SDK 2.18 benchmarks, NxD"),
    Published(68.98e9, 32, "TP32 PP8 DP4", 4096, 14.2, "AWS Neuron SDK 2.20 benchmarks, NxD"),
    Published(70.6e9, 32, "TP32 PP8 DP4", 8192, 7.94, "AWS Neuron SDK 2.24 benchmarks, NxD, Llama 3.1"),
)


def nearest(num_params: int) -> list[Published]:
    """Returns the rows of models within a factor of 1.5 of this size."""
    return [row for row in ROWS if 1 / 1.5 < row.params / num_params < 1.5]
