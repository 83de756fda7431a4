"""How far are the planner's step times from published ones, and which efficiency of trn1 brings them together?

    python benchmarks/calibration.py [--plot docs/images/projection.png]

Plans the 16 configurations that AWS has published for trn1.32xlarge, fits the efficiencies on some models, and compares
with the others, which are held out. Nothing here ran on Trainium: one side is published, the other projected.

The split and the rules were written before the fit, though not blind: the ratios of an earlier planner to most of these
rows were known. They are:

- a configuration is a model, its nodes, batch, degrees and precision; its value is the best of all SDK releases;
- the models, by their number of parameters, go to the fit and to the held-out side in turn, the smallest to the fit;
- a configuration with a `doubt` contradicts another publication of itself. It is neither fitted nor in the headline
  error, and is printed beside it;
- the fit minimizes the sum of |log(projected / published)|, each configuration once;
- the rows come from two training libraries, NxD and the older NeMo Megatron, and each has an efficiency of its own, of
  products and update, which are work of the device.

That there is one for each library was decided after a fit of all rows together, whose errors differed in sign between
them: the rows of NxD were projected too slow, those of NeMo Megatron too fast. The split of the models did not change.
A second efficiency, of the collectives, was tried on all rows and not kept: without bounds it becomes an overlap, which
the roofline does not have.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
from collections.abc import Sequence

from hlat_jax import config as config_lib
from hlat_jax.cli import config_files
from hlat_jax.plan.report import Site, make_plan
from hlat_jax.plan.roofline import STACKS, Seconds
from hlat_jax.resolve import resolve

TARGET, NODE_DEVICES = "trn1.32xlarge", 32
# model -> (parameters, layers, width, width of the MLP, heads, KV heads, vocabulary). GPT-3 as a SwiGLU of equal FLOPs,
# 8/3 of the width. Source: the Llama papers; scripts gpt_*.sh of neuronx-nemo-megatron.
MODELS = {
    "GPT-3 6.7B": (6.7e9, 32, 4096, 10920, 32, 32, 51200),
    "Llama-2 7B": (6.74e9, 32, 4096, 11008, 32, 32, 32000),
    "Llama-3.1 8B": (8.03e9, 32, 4096, 14336, 32, 8, 128256),
    "Llama-2 13B": (13.0e9, 40, 5120, 13824, 40, 40, 32000),
    "GPT-3 23B": (23e9, 28, 8192, 21840, 64, 64, 51200),
    "GPT-3 46B": (46e9, 56, 8192, 21840, 64, 64, 51200),
    "Llama-2 70B": (69.0e9, 80, 8192, 28672, 64, 8, 32000),
    "Llama-3.1 70B": (70.6e9, 80, 8192, 28672, 64, 8, 128256),
    "GPT-3 175B": (175e9, 96, 12288, 32768, 96, 96, 51200),
}
FITTED = list(MODELS)[0::2]
HELD_OUT = list(MODELS)[1::2]


@dataclasses.dataclass(frozen=True)
class Configuration:
    """One published configuration on trn1.32xlarge.

    Attributes:
      model: a key of MODELS.
      nodes: number of nodes.
      seq_len: tokens of a sequence.
      batch_size: sequences of a step; a microbatch has one.
      tensor: degree.
      pipe: degree.
      policy: ours that comes nearest: bf16_sr for BF16 with stochastic rounding, mixed for an fp32 optimizer.
      remat: as in the published scripts; selective for NxD.
      sequences_per_s: the best of all releases.
      sdk: the release of that value.
      doubt: how the publication contradicts itself; "": it does not.
      stack: the training library, a key of STACKS: that with an fp32 optimizer is NxD.
    """

    model: str
    nodes: int
    seq_len: int
    batch_size: int
    tensor: int
    pipe: int
    policy: str
    remat: str
    sequences_per_s: float
    sdk: str
    doubt: str = ""

    @property
    def stack(self) -> str:
        return "NxD" if self.policy == "mixed" else "NeMo Megatron"


# Source: general/benchmarks/trn1/*.csv of aws-neuron-sdk, SDK 2.3 to 2.24, every version of every table. The page is
# awsdocs-neuron.readthedocs-hosted.com/en/v2.29.1/about-neuron/benchmarks/trn1/trn1-training-performance.html; later
# releases archive it.
_COST = "published with the cost of the 13B model"
_NODES = "the same rate is published for 16 and for 32 nodes"
CONFIGURATIONS = (
    Configuration("GPT-3 6.7B", 1, 2048, 64, 8, 1, "bf16_sr", "full", 8.23, "2.6.0"),
    Configuration("GPT-3 6.7B", 16, 2048, 1024, 8, 1, "bf16_sr", "full", 143.75, "2.13.0"),
    Configuration("Llama-2 7B", 16, 4096, 256, 8, 1, "bf16_sr", "full", 49.75, "2.13.1"),
    Configuration("Llama-2 7B", 16, 4096, 1024, 8, 1, "mixed", "selective", 101.3, "2.20.0"),
    Configuration("Llama-2 7B", 32, 4096, 1024, 8, 4, "bf16_sr", "full", 89.0, "2.17.0", _COST),
    Configuration("Llama-3.1 8B", 32, 8192, 1024, 32, 1, "mixed", "selective", 53.51, "2.21.0"),
    Configuration("Llama-2 13B", 16, 4096, 1024, 8, 4, "bf16_sr", "full", 64.7, "2.17.0", _NODES),
    Configuration("Llama-2 13B", 32, 4096, 1024, 8, 4, "bf16_sr", "full", 60.0, "2.15.0", _NODES),
    Configuration("Llama-2 13B", 32, 4096, 1024, 8, 4, "mixed", "selective", 87.44, "2.18.0"),
    Configuration("Llama-2 13B", 32, 4096, 1024, 8, 8, "mixed", "selective", 84.0, "2.20.0"),
    Configuration("GPT-3 23B", 32, 2048, 1024, 8, 4, "bf16_sr", "selective", 107.18, "2.18.0"),
    Configuration("GPT-3 46B", 32, 2048, 1024, 8, 8, "bf16_sr", "full", 48.24, "2.18.0"),
    Configuration("Llama-2 70B", 32, 4096, 1024, 32, 4, "mixed", "selective", 17.86, "2.18.0"),
    Configuration("Llama-2 70B", 32, 4096, 1024, 32, 8, "mixed", "selective", 14.44, "2.21.0"),
    Configuration("Llama-3.1 70B", 32, 8192, 1024, 32, 8, "mixed", "selective", 7.97, "2.21.0"),
    Configuration("GPT-3 175B", 32, 2048, 1024, 32, 8, "bf16_sr", "selective", 14.6, "2.18.0"),
)


def run_config(c: Configuration) -> config_lib.Config:
    """Returns our config of a published configuration: microbatches of one sequence, ZeRO-1, sequence parallelism."""
    _, layers, width, mlp, heads, kv_heads, vocab = MODELS[c.model]
    config = config_files.load("7b")
    config.model.num_layers, config.model.embed_dim, config.model.mlp_dim = layers, width, mlp
    config.model.num_heads, config.model.num_kv_heads, config.model.vocab_size = heads, kv_heads, vocab
    config.model.head_dim = width // heads
    config.model.fuse_qkv = c.tensor <= kv_heads
    config.model.max_positions = config.data.seq_len = c.seq_len
    config.model.remat, config.precision.policy = c.remat, c.policy
    config.parallel.tensor, config.parallel.pipe = c.tensor, c.pipe
    config.parallel.data = c.nodes * NODE_DEVICES // (c.tensor * c.pipe)
    config.data.batch_size = c.batch_size
    config.train.num_microbatches = c.batch_size // config.parallel.data
    return resolve(config)


@dataclasses.dataclass(frozen=True)
class Row:
    """A published configuration and the parts of its step at full speed."""

    configuration: Configuration
    seconds: Seconds

    @property
    def published_s(self) -> float:
        return self.configuration.batch_size / self.configuration.sequences_per_s

    @property
    def side(self) -> str:
        if self.configuration.doubt:
            return "doubt"
        return "fit" if self.configuration.model in FITTED else "held out"

    def projected_s(self, efficiency: float) -> float:
        """Returns the projected step under an efficiency."""
        return dataclasses.replace(self.seconds, efficiency=efficiency).step

    def ratio(self, efficiency: float) -> float:
        """Returns the published step over the projected one."""
        return self.published_s / self.projected_s(efficiency)


def planned(c: Configuration) -> Row:
    """Returns a configuration with its planned parts."""
    found = make_plan(run_config(c), Site(TARGET, c.nodes))["projection"]
    return Row(c, Seconds(**{field.name: found[field.name] for field in dataclasses.fields(Seconds)}))


def fitted(rows: Sequence[Row]) -> float:
    """Returns the efficiency, to a hundredth, with the least sum of |log(published / projected)|."""
    tried = [k / 100 for k in range(20, 101)]
    return min(tried, key=lambda efficiency: sum(abs(math.log(row.ratio(efficiency))) for row in rows))


def by_stack(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Returns the rows of each training library."""
    return {stack: [row for row in rows if row.configuration.stack == stack] for stack in STACKS}


def efficiencies(rows: Sequence[Row]) -> dict[str, float]:
    """Returns the efficiency of each training library, fitted on the rows of the fit side."""
    return {stack: fitted([row for row in some if row.side == "fit"]) for stack, some in by_stack(rows).items()}


def ratios(rows: Sequence[Row], found: dict[str, float]) -> list[float]:
    """Returns the published step over the projected one of each row, under the efficiency of its library."""
    return [row.ratio(found[row.configuration.stack]) for row in rows]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", help="also draw projected against published steps to this file")
    args = parser.parse_args()
    rows = [planned(c) for c in CONFIGURATIONS]
    found = efficiencies(rows)
    print("model          nodes  batch  degrees   stack          published s  projected s  published / projected  side")
    for row in sorted(rows, key=lambda row: row.side):
        c, efficiency = row.configuration, found[row.configuration.stack]
        print(
            f"{c.model:14} {c.nodes:5}  {c.batch_size:5}  TP{c.tensor:<2} PP{c.pipe}  {c.stack:13} "
            f"{row.published_s:11.2f}  {row.projected_s(efficiency):11.2f}  {row.ratio(efficiency):21.2f}  {row.side}"
        )
    for stack, efficiency in found.items():
        print(
            f"efficiency of products and update, {stack}: {efficiency:.2f}; in the package: {STACKS[stack].efficiency}"
        )
    for side in ("fit", "held out", "doubt"):
        for stack, some in {"all": rows, **by_stack(rows)}.items():
            off = [abs(ratio - 1) for ratio in ratios([row for row in some if row.side == side], found)]
            if off:
                print(f"  {side:8} {stack:13} median {statistics.median(off):.1%}, worst {max(off):.1%}, of {len(off)}")
    if args.plot:
        plot(rows, found, args.plot)
    return 0


def plot(rows: Sequence[Row], found: dict[str, float], path: str) -> None:
    """Draws projected against published steps, on logarithmic axes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 5.2))
    marks = {"fit": ("o", "#9ecae1"), "held out": ("s", "#08519c"), "doubt": ("x", "#969696")}
    for side, (marker, color) in marks.items():
        some = [row for row in rows if row.side == side]
        label = {"doubt": "contradicts itself, not counted"}.get(side, side)
        xs, ys = [row.published_s for row in some], [row.projected_s(found[row.configuration.stack]) for row in some]
        axes.plot(xs, ys, marker, color=color, label=label)
    for number, row in enumerate(sorted(rows, key=lambda row: row.published_s)):  # in turn below and above the line
        below = {"xytext": (5, -8), "ha": "left"} if number % 2 == 0 else {"xytext": (-5, 5), "ha": "right"}
        at = (row.published_s, row.projected_s(found[row.configuration.stack]))
        axes.annotate(row.configuration.model, at, textcoords="offset points", fontsize=6, **below)
    ends = [3, 200]
    axes.plot(ends, ends, "k-", linewidth=0.8)
    low, high = STACKS["NeMo Megatron"].step_range  # the wider one
    axes.fill_between(ends, [x / high for x in ends], [x / low for x in ends], alpha=0.1, color="#08519c", linewidth=0)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel="published step (s)")
    axes.set(ylabel="projected step (s), not measured", title="trn1.32xlarge, 1 to 32 nodes")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    raise SystemExit(main())
