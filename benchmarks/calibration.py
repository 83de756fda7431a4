"""How far are the planner's step times from published ones, and which efficiencies bring them together?

    python benchmarks/calibration.py [--plot docs/images/projection.png]

Plans the 16 configurations that AWS has published for trn1.32xlarge, and 8 that others have measured on one chip of
trn2, with the memory that each would take, and fits the efficiency of each training library. Nothing here was run by
us: one side is published, the other projected.

The rules:

- a configuration is a model, its nodes, batch, degrees and precision; its value is the best of all SDK releases;
- recomputation and attention are those of the published scripts;
- a configuration with a `doubt` contradicts another publication of itself. It is neither fitted nor in the held-out
  error, and is printed beside it;
- the fit minimizes the sum of |log(projected / published)|, each configuration once;
- the rows of trn1 come from two training libraries, NxD and the older NeMo Megatron, those of trn2 from a third one,
  Optimum Neuron. Each has an efficiency of its own, of products and update, which are work of the device;
- of a LoRA run the gradients of the weights and the update are left out;
- a model is held out by a fit on all other models of its library. The package has the fit on all models.

The last rule is younger than the first fit. Before, the models went by size, in turn, to a fit and to a held-out side.
Then the published scripts showed that two rows use an attention kernel, and one of them recomputes the MLP. With these
facts that split leaves three rows of NxD to the fit: an efficiency of 0.43, and a held-out median of 17 %.
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
from hlat_jax.facts import hardware
from hlat_jax.facts.byte_sizes import format_bytes
from hlat_jax.plan.report import Site, make_plan
from hlat_jax.plan.roofline import ERRORS, STACKS, Seconds
from hlat_jax.resolve import resolve

# model -> (parameters, layers, width, width of the MLP, heads, KV heads, width of a head, vocabulary, tied). GPT-3 as a
# SwiGLU of equal FLOPs, 8/3 of the width. Source: the papers and model cards; gpt_*.sh of neuronx-nemo-megatron.
MODELS = {
    "TinyLlama 1.1B": (1.1e9, 22, 2048, 5632, 32, 4, 64, 32000, False),
    "Qwen3 1.7B": (1.72e9, 28, 2048, 6144, 16, 8, 128, 151936, True),
    "GPT-3 6.7B": (6.7e9, 32, 4096, 10920, 32, 32, 128, 51200, False),
    "Llama-2 7B": (6.74e9, 32, 4096, 11008, 32, 32, 128, 32000, False),
    "Llama-3.1 8B": (8.03e9, 32, 4096, 14336, 32, 8, 128, 128256, False),
    "Qwen3 8B": (8.19e9, 36, 4096, 12288, 32, 8, 128, 151936, False),
    "Llama-2 13B": (13.0e9, 40, 5120, 13824, 40, 40, 128, 32000, False),
    "GPT-3 23B": (23e9, 28, 8192, 21840, 64, 64, 128, 51200, False),
    "Qwen3 32B": (32.8e9, 64, 5120, 25600, 64, 8, 128, 151936, False),
    "GPT-3 46B": (46e9, 56, 8192, 21840, 64, 64, 128, 51200, False),
    "Llama-2 70B": (69.0e9, 80, 8192, 28672, 64, 8, 128, 32000, False),
    "Llama-3.1 70B": (70.6e9, 80, 8192, 28672, 64, 8, 128, 128256, False),
    "GPT-3 175B": (175e9, 96, 12288, 32768, 96, 96, 128, 51200, False),
}


@dataclasses.dataclass(frozen=True)
class Configuration:
    """One published configuration.

    Attributes:
      model: a key of MODELS.
      nodes: number of nodes.
      seq_len: tokens of a sequence.
      batch_size: sequences of a step; a microbatch has one.
      tensor: degree.
      pipe: degree.
      policy: ours that comes nearest: bf16_sr for BF16 with stochastic rounding, mixed for an fp32 optimizer.
      remat: as in the published scripts; selective for NxD.
      attention: as in the published scripts; nki for rows of 8,192 tokens.
      sequences_per_s: the best of all releases.
      sdk: the release of that value.
      doubt: how the publication contradicts itself; "": it does not.
      target: the node.
      is_lora: whether it trained adapters alone.
      stack: the training library, a key of STACKS: on trn1, that with an fp32 optimizer is NxD.
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
    attention: str = "einsum"
    target: str = "trn1.32xlarge"
    is_lora: bool = False

    @property
    def stack(self) -> str:
        if self.target == "trn2.3xlarge":
            return "Optimum Neuron"
        return "NxD" if self.policy == "mixed" else "NeMo Megatron"


# Source: general/benchmarks/trn1/*.csv of aws-neuron-sdk, SDK 2.3 to 2.24, every version of every table. The page is
# awsdocs-neuron.readthedocs-hosted.com/en/v2.29.1/about-neuron/benchmarks/trn1/trn1-training-performance.html; later
# releases archive it.
_FAR = 1.15  # a row of the figure that is off by more has its name beside it
_COST = "published with the cost of the 13B model"
_NODES = "the same rate is published for 16 and for 32 nodes"
# Both scripts of Llama 3 use a flash-attention kernel. The script of 70B recomputes the MLP of rows of 8,192 too.
# Source: run_llama_nxd.py, run_llama3_70B_tp_pp.sh, tp_zero1_llama3_8B_hf_pretrain.sh of neuronx-distributed, 0598cd8.
_NO_MLP = "names:attn_norm,q,k,v,attn_out,residual,mlp_norm"
CONFIGURATIONS = (
    Configuration("GPT-3 6.7B", 1, 2048, 64, 8, 1, "bf16_sr", "full", 8.23, "2.6.0"),
    Configuration("GPT-3 6.7B", 16, 2048, 1024, 8, 1, "bf16_sr", "full", 143.75, "2.13.0"),
    Configuration("Llama-2 7B", 16, 4096, 256, 8, 1, "bf16_sr", "full", 49.75, "2.13.1"),
    Configuration("Llama-2 7B", 16, 4096, 1024, 8, 1, "mixed", "selective", 101.3, "2.20.0"),
    Configuration("Llama-2 7B", 32, 4096, 1024, 8, 4, "bf16_sr", "full", 89.0, "2.17.0", _COST),
    Configuration("Llama-3.1 8B", 32, 8192, 1024, 32, 1, "mixed", "selective", 53.51, "2.21.0", attention="nki"),
    Configuration("Llama-2 13B", 16, 4096, 1024, 8, 4, "bf16_sr", "full", 64.7, "2.17.0", _NODES),
    Configuration("Llama-2 13B", 32, 4096, 1024, 8, 4, "bf16_sr", "full", 60.0, "2.15.0", _NODES),
    Configuration("Llama-2 13B", 32, 4096, 1024, 8, 4, "mixed", "selective", 87.44, "2.18.0"),
    Configuration("Llama-2 13B", 32, 4096, 1024, 8, 8, "mixed", "selective", 84.0, "2.20.0"),
    Configuration("GPT-3 23B", 32, 2048, 1024, 8, 4, "bf16_sr", "selective", 107.18, "2.18.0"),
    Configuration("GPT-3 46B", 32, 2048, 1024, 8, 8, "bf16_sr", "full", 48.24, "2.18.0"),
    Configuration("Llama-2 70B", 32, 4096, 1024, 32, 4, "mixed", "selective", 17.86, "2.18.0"),
    Configuration("Llama-2 70B", 32, 4096, 1024, 32, 8, "mixed", "selective", 14.44, "2.21.0"),
    Configuration("Llama-3.1 70B", 32, 8192, 1024, 32, 8, "mixed", _NO_MLP, 7.97, "2.21.0", attention="nki"),
    Configuration("GPT-3 175B", 32, 2048, 1024, 32, 8, "bf16_sr", "selective", 14.6, "2.18.0"),
)


def _on_trn2(model: str, seq_len: int, remat: str, tokens_per_s: float, *, is_lora: bool = True) -> Configuration:
    rate, on = tokens_per_s / seq_len, {"attention": "nki", "target": "trn2.3xlarge", "is_lora": is_lora}
    return Configuration(model, 1, seq_len, 8, 4, 1, "bf16", remat, rate, "2.31.0", **on)


# By the trainer's log, as step callbacks miss a part of an asynchronous step. Source: alpharomercoma/torchneuronx, logs
# of REPORT-EXTENSIONS.md 13 to 30: one trn2.3xlarge, SDK 2.31, optimum-neuron 0.4.3, 29 July to 12 August 2026.
CONFIGURATIONS += (
    _on_trn2("Llama-3.1 8B", 8192, "full", 3767),
    _on_trn2("Llama-3.1 8B", 4096, "full", 4340),
    _on_trn2("Llama-3.1 8B", 2048, "full", 3307),
    _on_trn2("Llama-3.1 8B", 2048, "none", 4780),
    _on_trn2("Qwen3 8B", 2048, "full", 2812),
    _on_trn2("Qwen3 32B", 2048, "full", 1032),
    _on_trn2("Qwen3 1.7B", 2048, "full", 6000, is_lora=False),
    _on_trn2("TinyLlama 1.1B", 2048, "full", 7620, is_lora=False),
)


def run_config(c: Configuration) -> config_lib.Config:
    """Returns our config of a published configuration: microbatches of one sequence, ZeRO-1, sequence parallelism."""
    _, layers, width, mlp, heads, kv_heads, head_dim, vocab, is_tied = MODELS[c.model]
    config = config_files.load("7b")
    config.model.num_layers, config.model.embed_dim, config.model.mlp_dim = layers, width, mlp
    config.model.num_heads, config.model.num_kv_heads, config.model.vocab_size = heads, kv_heads, vocab
    config.model.head_dim, config.model.tie_embeddings = head_dim, is_tied
    config.model.fuse_qkv = c.tensor <= kv_heads
    config.model.max_positions = config.data.seq_len = c.seq_len
    config.model.remat, config.precision.policy = c.remat, c.policy
    config.model.attention, config.model.allow_nki_on_trn1 = c.attention, c.attention == "nki"
    config.parallel.tensor, config.parallel.pipe = c.tensor, c.pipe
    config.parallel.data = c.nodes * hardware.node(c.target).num_devices() // (c.tensor * c.pipe)
    config.parallel.zero1 = config.parallel.data > 1
    config.data.batch_size = c.batch_size
    config.train.num_microbatches = c.batch_size // config.parallel.data
    return resolve(config)


@dataclasses.dataclass(frozen=True)
class Row:
    """A published configuration, the parts of its step at full speed, and its memory.

    Attributes:
      fits: whether the plan lets it run.
      total_bytes: of the fullest device, at its peak.
    """

    configuration: Configuration
    seconds: Seconds
    fits: bool = True
    total_bytes: int = 0

    @property
    def published_s(self) -> float:
        return self.configuration.batch_size / self.configuration.sequences_per_s

    def projected_s(self, efficiency: float) -> float:
        """Returns the projected step under an efficiency."""
        return dataclasses.replace(self.seconds, efficiency=efficiency).step

    def ratio(self, efficiency: float) -> float:
        """Returns the published step over the projected one."""
        return self.published_s / self.projected_s(efficiency)


def planned(c: Configuration) -> Row:
    """Returns a configuration with its planned parts."""
    plan = make_plan(run_config(c), Site(c.target, c.nodes))
    seconds = Seconds(**{field.name: plan["projection"][field.name] for field in dataclasses.fields(Seconds)})
    if c.is_lora:  # its state is not ours
        node = hardware.node(c.target)
        weight_grads = 2 * MODELS[c.model][0] * c.batch_size * c.seq_len / (node.device.peak_flops * node.num_devices())
        return Row(c, dataclasses.replace(seconds, products=seconds.products - weight_grads, update=0.0))
    return Row(c, seconds, plan["fits"], plan["device_bytes"]["total"])


def fitted(rows: Sequence[Row]) -> float:
    """Returns the efficiency, to a hundredth, with the least sum of |log(published / projected)|."""
    tried = [k / 100 for k in range(20, 101)]
    return min(tried, key=lambda efficiency: sum(abs(math.log(row.ratio(efficiency))) for row in rows))


def consistent(rows: Sequence[Row], stack: str) -> list[Row]:
    """Returns the rows of a training library that no other publication contradicts."""
    return [row for row in rows if row.configuration.stack == stack and not row.configuration.doubt]


def efficiencies(rows: Sequence[Row]) -> dict[str, float]:
    """Returns the efficiency of each training library, fitted on all its consistent rows."""
    return {stack: fitted(consistent(rows, stack)) for stack in STACKS}


def held_out_ratio(row: Row, rows: Sequence[Row]) -> float:
    """Returns the published step over the projected one, under the fit on all other models of the library."""
    model = row.configuration.model
    others = [other for other in consistent(rows, row.configuration.stack) if other.configuration.model != model]
    return row.ratio(fitted(others))


def errors(rows: Sequence[Row], chip: str) -> list[float]:
    """Returns |published / projected - 1| of the held-out rows of the training libraries of a chip."""
    some = [row for stack, one in STACKS.items() if one.chip == chip for row in consistent(rows, stack)]
    return [abs(held_out_ratio(row, rows) - 1) for row in some]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", help="also draw projected against published steps to this file")
    args = parser.parse_args()
    rows = [planned(c) for c in CONFIGURATIONS]
    found = efficiencies(rows)
    print(
        "model          nodes  batch  degrees   stack          memory     published s  published / projected, held out"
    )
    for row in sorted(rows, key=lambda row: bool(row.configuration.doubt)):
        c = row.configuration
        memory = (format_bytes(row.total_bytes) if row.total_bytes else "LoRA") + " REFUSED" * (not row.fits)
        print(
            f"{c.model:14} {c.nodes:5}  {c.batch_size:5}  TP{c.tensor:<2} PP{c.pipe}  {c.stack:14} {memory:>9}  "
            f"{row.published_s:11.2f}  {held_out_ratio(row, rows):6.2f}{'  doubt: ' * bool(c.doubt)}{c.doubt}"
        )
    for stack, efficiency in found.items():
        off = [abs(held_out_ratio(row, rows) - 1) for row in consistent(rows, stack)]
        print(
            f"efficiency of products and update, {stack}: {efficiency:.2f}, in the package {STACKS[stack].efficiency}\n"
            f"  held out median {statistics.median(off):.1%}, worst {max(off):.1%}, of {len(off)}"
        )
    for chip in ERRORS:
        off = errors(rows, chip)
        print(f"held out, all of {chip}: median {statistics.median(off):.1%}, worst {max(off):.1%}, of {len(off)}")
    if args.plot:
        plot(rows, found, args.plot)
    return 0


def plot(rows: Sequence[Row], found: dict[str, float], path: str) -> None:
    """Draws projected against published steps, on logarithmic axes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 5.2))
    marks = {
        "NxD": ("s", "#08519c"),
        "NeMo Megatron": ("o", "#6baed6"),
        "Optimum Neuron": ("^", "#d94801"),
        "contradicts itself, not counted": ("x", "#969696"),
    }
    for label, (marker, color) in marks.items():
        some = [row for row in rows if ("contradicts itself, not counted" if row.configuration.doubt else
                row.configuration.stack) == label]  # fmt: skip
        xs, ys = [row.published_s for row in some], [row.projected_s(found[row.configuration.stack]) for row in some]
        axes.plot(xs, ys, marker, color=color, label=label)
    for row in rows:
        projected_s = row.projected_s(found[row.configuration.stack])
        if not 1 / _FAR < projected_s / row.published_s < _FAR:
            left = projected_s > row.published_s  # away from the line
            place = {"xytext": (-6, 3), "ha": "right"} if left else {"xytext": (6, -6), "ha": "left"}
            at = row.published_s, projected_s
            axes.annotate(row.configuration.model, at, textcoords="offset points", fontsize=7, **place)
    ends = [0.8, 200]
    axes.plot(ends, ends, "k-", linewidth=0.8)
    low, high = STACKS["NxD"].step_range  # the wider one of trn1
    axes.fill_between(ends, [x / high for x in ends], [x / low for x in ends], alpha=0.1, color="#08519c", linewidth=0)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel="published step (s)")
    axes.set(ylabel="projected step (s), not measured", title="1 to 32 trn1.32xlarge, one trn2.3xlarge")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    raise SystemExit(main())
