"""The rules of `neuron.lint`, with unsupported operations in Neuron's documents, their effect and alternatives.

A program that runs once can have another severity, because it may run on the host's CPU.
"""

from __future__ import annotations

import dataclasses

from hlat_jax.facts import core_groups
from hlat_jax.facts.compiler_limits import LIMIT_FLAG, OPERATION_ADVICE, PROGRAM_ADVICE, PROGRAMS_ADVICE

SEVERITIES = ("error", "warning", "info")
LINTED = tuple(core_groups.RULES)  # what programs are checked for

_ISSUES = "frameworks/jax/setup/jax-neuronx-known-issues"
_COMPILER_NOTES = "release-notes/components/compiler (2.32)"
_INF2 = "third-party measurement on inf2 (github.com/xbill9/tpu-jax)"
_THREAD = "github.com/aws-neuron/aws-neuron-sdk/issues/"
_KILN = "github.com/foxl-ai/kiln docs/neuron-notes.md"
_DNS = "github.com/aws-samples/sample-spectral-dns-on-aws-neuron docs/neuron-rules.md"
_TPU_JAX = "github.com/xbill9/tpu-jax-inf2 docs/neuron-jax-quirks.md"
_DTYPES = "about-neuron/arch/neuron-features/data-types"


def _code(*names: str) -> str:
    return "compiler/error-codes/" + ", ".join(names)


@dataclasses.dataclass(frozen=True)
class Rule:
    """One rule.

    Attributes:
      severity: "error" if documented as unsupported or wrong, "warning" if it may fail or be slow, else "info".
      matches: the part of a program that breaks the rule.
      why: the effect on the device.
      source: the page below awsdocs-neuron.readthedocs-hosted.com/en/v2.32.0, or who found it.
      once: the severity in a program that runs once, such as initialization, or None for the same.
      many: the severity in a program for several devices, or None for the same.
      trn1: the severity on trn1, or None for the same.
      seen: the versions that crash or compute wrongly, and whether that is fixed, or "" for documented rules.
    """

    severity: str
    matches: str
    why: str
    instead: str
    source: str
    once: str | None = None
    many: str | None = None
    trn1: str | None = None
    seen: str = ""

    def severity_in(self, *, recurring: bool, many_devices: bool = False, target: str = "") -> str:
        """Returns the severity in a program that runs every step or once, on several devices or one of a target."""
        if target == "trn1" and self.trn1 is not None:
            return self.trn1
        if many_devices and self.many is not None:
            return self.many
        return self.once if not recurring and self.once is not None else self.severity


RULES: dict[str, Rule] = {
    "LW01": Rule(
        "error",
        "a primitive that JAX cannot lower for platform neuron",
        "the program cannot be lowered; usual causes are host callbacks and LAPACK decompositions",
        "move debug.print, pure_callback, eigh and svd to the host",
        _ISSUES,
    ),
    "CF01": Rule(
        "error",
        "`case` or `if` on a computed index",
        "lax.cond and lax.switch are not supported",
        "jnp.where over both branches, or decide on the host",
        _ISSUES,
    ),
    "CF03": Rule(
        "error",
        "`while` whose trip count is not static",
        "only static trip counts are supported",
        "lax.scan, or fori_loop with Python integers as bounds",
        _ISSUES,
    ),
    "CF04": Rule(
        "info",
        "`while` with a static trip count",
        "supported, but the compiler may unroll it; the program then grows with the trip count",
        "model.layer_loop=unroll if the compiler requires it",
        _ISSUES,
    ),
    "RED01": Rule(
        "error",
        "`reduce` with several operands",
        "argmax, argmin and categorical lower to it; variadic reductions are not supported",
        "max, compare, and min of an iota; or choose on the host",
        _ISSUES,
        once="warning",
    ),
    "RED02": Rule(
        "warning",
        "`reduce_window`",
        "cumsum and similar functions lower to it; slow and rarely used: 9.6 ms instead of 5.7 ms for a layer. As "
        "associative_scan, a cumsum of integers was wrong on trn1 in 2023",
        "a matmul with a triangular mask, or the host",
        _code("EVRF017", "EVRF018", "EVRF019") + f"; {_THREAD}767; {_KILN} (trn1, SDK 2.32)",
    ),
    "RED03": Rule(
        "error",
        "`reduce_window` with dilation, or with several inputs",
        "the compiler rejects it",
        "a window without dilation, one input at a time",
        _code("EVRF017", "EVRF018", "EVRF019"),
    ),
    "RNG01": Rule(
        "error",
        "a call to threefry2x32",
        "Threefry is not fully supported; split and fold_in of rbg keys emit it too",
        'jax.random.key(seed, impl="rbg"); in a step an integer hash of (seed, step, index)',
        _ISSUES,
        once="warning",
    ),
    "RNG02": Rule(
        "error",
        "`rng_bit_generator` with an algorithm other than DEFAULT",
        "the compiler rejects it",
        'jax.random.key(seed, impl="rbg")',
        _code("EVRF006"),
    ),
    "RNG04": Rule(
        "warning",
        "a call to jax.random.randint",
        "its values do not have the expected distribution",
        "NumPy on the host",
        _ISSUES,
    ),
    "RP01": Rule(
        "error",
        "`reduce_precision` to less than the precision of its operand",
        "not supported",
        "astype",
        _ISSUES,
    ),
    "RP02": Rule(
        "warning",
        "`reduce_precision` to the precision of its operand",
        "not supported; emitted by remat policies that save values, and a no-op",
        "call hlat_jax.host.neuron_lowering.elide_idle_roundings() before lowering",
        _ISSUES,
    ),
    "CB01": Rule(
        "error",
        "a custom call that Neuron does not list; infeed, outfeed, send, recv",
        "the compiler supports 29 custom calls and no host transfers",
        "plain JAX, or a kernel called by AwsNeuronCustomNativeKernel",
        _code("EHCA005", "EVRF015"),
    ),
    "OP01": Rule(
        "error",
        "`triangular_solve`, `cholesky`, `fft`",
        "not supported",
        "the host, or an algorithm that uses matmuls",
        _code("EUOC002", "EVRF001"),
    ),
    "OP02": Rule(
        "error",
        "`top_k`",
        "not supported. Where it compiled, a row with NaN gave the index 2^32 - 1, and a gather of that index ended "
        "all processes; an axis of 2 gave wrong values",
        "repeated max, or the host; clip the index before a gather",
        _code("EUOC002") + f"; {_KILN} (trn1, trn2, SDK 2.32)",
    ),
    "OP03": Rule("error", "`top_k` of integers", "not supported", "float32, then repeated max", _code("EVRF013")),
    "OP04": Rule(
        "error",
        "`sort` whose comparator is not a single LT, LE, GT or GE",
        "not supported; floats and several sort keys lower to longer comparators",
        "one integer key, or the host",
        _ISSUES,
    ),
    "OP05": Rule(
        "error",
        "`shift_right_arithmetic` of integers other than 32-bit",
        "the compiler rejects it",
        "int32",
        _code("EVRF022"),
    ),
    "OP08": Rule(
        "error",
        "convolution with lhs dilation and also rhs dilation or stride",
        "the compiler rejects it",
        "two convolutions, or matmuls",
        _code("EVRF010", "EVRF011"),
    ),
    "DT01": Rule(
        "error",
        "complex numbers",
        "pages contradict each other: the known issues and the error code say not supported, the compiler notes list "
        "30 operations of complex64",
        "real arithmetic: cos and sin for RoPE",
        _code("EVRF004") + f"; {_ISSUES}; {_COMPILER_NOTES}",
    ),
    "DT02": Rule(
        "error",
        "f8E4M3FN",
        "trn1 and trn2 do not have this type",
        "jnp.float8_e4m3",
        _code("EVRF051"),
    ),
    "DT03": Rule(
        "error", "an FNUZ float, f8E4M3B11FNUZ", "not supported", "jnp.float8_e4m3", _code("ESPP047", "EVRF005")
    ),
    "DT04": Rule(
        "error",
        "floats of 4 or 6 bits, integers of 2 or 4",
        "not supported; integers of 2 and 4 bits are not in the tables of supported types",
        "jnp.float8_e4m3; int8",
        _code("ESPP004") + "; " + _DTYPES,
    ),
    "DT08": Rule(
        "error",
        "f8E3M4",
        "the table of types has it for trn1 only, and the JAX page for no chip",
        "jnp.float8_e4m3",
        _DTYPES + "; " + _ISSUES,
        trn1="warning",
    ),
    "DT09": Rule(
        "error",
        "f8E8M0FNU",
        "trn1 and trn2 do not have this type",
        "scales in bfloat16 or float32",
        _DTYPES + "; " + _ISSUES,
    ),
    "DT05": Rule("error", "float64", "not in the tables of supported types", "jax_enable_x64=False", _DTYPES),
    "DT06": Rule(
        "warning",
        "64-bit integers other than the state of a key",
        "cast to 32 bits on trn1, and on trn2 with --native-int64=disabled, which a run sets; `enabled` is announced "
        "as the default after SDK 2.32 (the compiler notes of 2.33 could not be read)",
        "int32, or two 32-bit words",
        _DTYPES + "; " + _COMPILER_NOTES,
    ),
    "DT07": Rule(
        "error", "a uint64 constant of 2^32 or more", "it does not fit in 32 bits", "two uint32 words", _code("ESFH002")
    ),
    "INT01": Rule(
        "error",
        "`dot_general` of integers",
        "an error with --implicit-integer-downcast=none, announced as the default after SDK 2.32; cast with `all`, "
        "which a run sets. For trn1 pages contradict each other: supported with a warning, or not supported",
        "cast to bfloat16 or float32",
        _code("EVRF035") + "; " + _COMPILER_NOTES + "; " + _ISSUES,
        trn1="warning",
    ),
    "INT02": Rule(
        "error",
        "scatter with a computation on integers or booleans",
        "the compiler rejects it",
        "a sum of one-hot float32 vectors",
        _code("EVRF016", "EVRF060"),
    ),
    "INT03": Rule(
        "error",
        "integer `all_reduce` or `reduce_scatter`",
        "an error with --implicit-integer-downcast=none, announced as the default after SDK 2.32; with `all` summed in "
        "float32, which is exact only below 2^24",
        "float32 counts with all addends and totals below 2^24, or counts split into several words",
        _code("EVRF061", "EVRF063") + "; " + _COMPILER_NOTES,
    ),
    "INT04": Rule("error", "`power` of 64-bit integers", "the compiler rejects it", "int32", _code("EVRF062")),
    "GS01": Rule(
        "error",
        "gather or scatter whose indices are known, as an iota or a constant, and out of bounds",
        "the compiler rejects iotas that are out of bounds; a constant ends the run with status 1006, or is clamped",
        "at most as many indices as rows; positions below model.max_positions; the index that was meant",
        _code("EVRF031", "EVRF056") + "; neuron-runtime/nrt-troubleshoot",
    ),
    "GS02": Rule(
        "info",
        "gather or scatter with indices that depend on data and are not clipped",
        "an index out of bounds ends the run with status 1006, of all devices of a program over several",
        'jnp.clip the indices; mode="clip" leaves clipping to the gather',
        "neuron-runtime/nrt-troubleshoot",
        many="warning",
    ),
    "SH01": Rule("error", "a dynamic shape", "every dimension must be static", "fixed shapes", _code("EMOD025")),
    "SH03": Rule(
        "warning",
        "more than 128 arguments",
        "a call with 512 took 418 ms, a call with 128 took 8 ms",
        "stack the layers into fewer arrays",
        _INF2,
    ),
    "DN01": Rule(
        "warning",
        "an argument of 1 MiB or more that matches a result and is not donated",
        "argument and result are in memory at the same time",
        "donate_argnums, with the same sharding for argument and result",
        "jax.jit's donate_argnums, supported by Neuron since JAX 0.4.34",
    ),
    "DA01": Rule(
        "warning",
        "`dot_general` with an algorithm",
        "not supported; jax.nn.dot_product_attention sets one",
        "operand dtypes and preferred_element_type",
        _ISSUES,
    ),
    "DG01": Rule(
        "warning",
        "`dot_general` of fewer than 128 rows that contracts the second dimension of a large right-hand side",
        "the tensor engine transposes the right-hand side, which is more work than the product: 125 times as much for "
        "one row of 4,096",
        "a matrix stored with the contracted dimension first, [in, out]: lhs[t, k] x rhs[k, n]",
        _THREAD + "1336",
    ),
    "CC01": Rule(
        "error",
        "more than 16 different sets of replica groups",
        "the runtime rejects more; the limit was 12 before SDK 2.32",
        "fewer combinations of mesh axes",
        "release-notes/components/runtime",
    ),
    "CC02": Rule(
        "warning",
        "`collective_permute` other than in rings of neighboring cores of one node; between nodes it is an error",
        "only rings of linked cores are documented; other permutes may crash or be slow",
        "all_gather as parallel.pipe_exchange; else keep the axis within a node",
        "neuron-runtime/about/collectives; " + _ISSUES,
    ),
    "CC04": Rule(
        "error",
        "replica groups of a size or in an order for which Neuron lists no group of cores",
        "NxD's groups of this size have another order, or no page lists the size: it may crash or hang",
        "degrees whose groups are listed, see docs/parallelism.md; plan --search ranks only those",
        "en/v2.29.1/libraries/nxd-inference/developer_guides/feature-guide; NxD's parallel_layers/parallel_state.py; "
        "neuron-runtime/explore/internode-collective-comm",
    ),
    "CC05": Rule(
        "warning",
        "replica groups on which pages contradict each other, or in a pattern that none names",
        "it may work; nothing documents it",
        "degrees whose groups are listed, see docs/parallelism.md; plan --search ranks them first",
        "en/v2.29.1/libraries/nxd-inference/developer_guides/feature-guide; NxD's parallel_layers/parallel_state.py",
    ),
    "CC06": Rule(
        "warning",
        "a slice, concatenation, padding, reversal or window along a dimension that is split over devices by shardings",
        "the SPMD partitioner exchanges borders by permutes that do not form rings, which may crash or be slow; a "
        "matrix split in two along its sharded columns has crashed the compiler",
        "shard another dimension, or write it in a shard_map with ppermute in rings",
        "neuron-runtime/about/collectives; " + _ISSUES + f"; {_THREAD}1030",
        seen="the crash: November 2024, open",
    ),
    "CC07": Rule(
        "info",
        "a collective of rows whose length is above 128 and not a multiple of it",
        "one payload of rows of 4,096 + 24 was slower than two of 4,096 and 16",
        "a last dimension that is a multiple of 128, or two collectives",
        f"{_KILN} (trn1 and trn2, SDK 2.32)",
    ),
    "CC08": Rule(
        "warning",
        "`all_to_all` of repeated values",
        "an all_gather written so took 35 to 39 ms, where other collectives of the size took 6 to 7 ms",
        "jax.lax.all_gather",
        f"{_KILN} (trn1.32xlarge, SDK 2.32)",
    ),
    "KB01": Rule(
        "warning",
        "gather of values that shardings split over devices",
        "the compiler has stopped at `permutation.size() == data.size()` for a mesh of two cores",
        "the gather in a shard_map, on what a device holds",
        _THREAD + "1309",
        seen="libneuronxla 2.2, neuronx-cc 2.23 and 2.24, open",
    ),
    "KB02": Rule(
        "warning",
        "scatter with a computation on values that shardings split over devices",
        "where Shardy falls back to GSPMD, sums of a sharded gradient have been taken in the wrong order",
        "the scatter in a shard_map, followed by psum",
        "github.com/openxla/xla/issues/42481",
        seen="jaxlib up to 0.10.2",
    ),
    "KB03": Rule(
        "warning",
        "`while` that adds to an unsigned integer",
        'the compiler has stopped at "Output dtype must match input"',
        "int32 in the loop, or a sum without a loop",
        _THREAD + "1077",
        seen="trn1, January 2025, open",
    ),
    "KB04": Rule(
        "warning",
        "scatter into an array of values gathered from it at indices that depend on data: assignment through a mask",
        "a masked assignment has returned finite but wrong values on trn2 (PyTorch)",
        "jnp.where over the whole array",
        _THREAD + "1381",
        seen="neuronx-cc 2.26, open",
    ),
    "KB09": Rule(
        "warning",
        "division or remainder of integers by a number that is not a power of two, or not known",
        "the quotient is computed with an fp32 reciprocal and was off by one; powers of two are exact",
        "a power of two, a comparison with products of the divisor, or the host",
        f"{_KILN}, Integer division",
        seen="trn1.32xlarge, SDK 2.32, October 2026 (PyTorch)",
    ),
    "KB10": Rule(
        "info",
        "a cast to a narrower float and back",
        "the compiler removes the pair between elementwise operations, and the value stays as it was; wrong only where "
        "the rounding itself is wanted",
        "arithmetic on the bits, as in precision.stochastic_round",
        f"{_KILN}, layer-graph spill",
        seen="trn1 and trn2, SDK 2.32, October 2026 (PyTorch)",
    ),
    "KB11": Rule(
        "warning",
        "gather from more than 1.61 GB on a device",
        "a gather from 4.70 GB returned zeros in a program; up to 1.61 GB it was right",
        "a table sharded over the vocabulary, as parallel.tensor does; a gather from each of several chunks; a product "
        "with one-hot rows",
        _TPU_JAX,
        seen="inf2, jax 0.6.2, neuronx-cc 2.24, July 2026",
    ),
    "KB12": Rule(
        "warning",
        "an array of 4 GiB or more on a device",
        "offsets of a DMA have 32 bits: 4 GiB ended the run with a DMA abort, 2 and 3 GB did not",
        "more sharding, smaller microbatches, or the array in chunks",
        f"{_DNS}, rule 10",
        seen="trn1 and inf2, SDK 2.32, September 2026 (NKI)",
    ),
    "KB13": Rule(
        "warning",
        "a shift along rows, such as a causal convolution, at LNC 2",
        "the two cores of a logical core each take half of the rows; some lowerings lost the rows at the border, and "
        "the right one took 3 to 5 times as long",
        "a product with a banded matrix; NEURON_LOGICAL_NC_CONFIG=1; compare the rows around the middle with the host",
        f"{_KILN}, trn2 G1 prefill",
        seen="trn2, neuronx-cc 2.27, October 2026 (PyTorch)",
    ),
    "KB14": Rule(
        "warning",
        "`all_to_all` of integers",
        "the compiler has stopped at the attributes of the operation",
        "float32 values below 2^24, or all_gather and a slice",
        _THREAD + "1142",
        seen="an unknown version, open in November 2026",
    ),
    "MEM1": Rule(
        "error",
        "more memory than a device has",
        "compiling or loading the program fails",
        "more sharding or rematerialization, smaller microbatches",
        _code("EOOM001", "EOOM002", "EVRF009", "EXSP001"),
    ),
    "CG01": Rule(
        "warning",
        "more instructions in a program with all loops unrolled (of eval with none) than 5,000,000, or than "
        f"{LIMIT_FLAG} allows, estimated from tiles",
        "the compiler stops at 5,000,000 instructions per program in public logs, and has unrolled loops",
        f"where train.accumulate=scan: {PROGRAMS_ADVICE}; {PROGRAM_ADVICE}",
        _code("EBVF030", "EVRF007", "EXTP004") + f"; {_THREAD}987, 1003",
    ),
    "CG02": Rule(
        "warning",
        "an operation of more than 300,000 instructions, on trn1 150,000, estimated from tiles",
        "the compiler stops at 300,000 instructions per operation in public logs, on trn1 at 150,000",
        OPERATION_ADVICE,
        "NCC_EXTP003 in third-party reports; not documented",
    ),
}
