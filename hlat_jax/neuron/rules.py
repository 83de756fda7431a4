"""The rules of `neuron.lint`: what Neuron documents as unsupported, why it matters, what to write instead.

Programs that run once have severities of their own, because such a program may run on the host's CPU.
"""

from __future__ import annotations

import dataclasses

SEVERITIES = ("error", "warning", "info")
# A device, and the instance whose nodes programs for it are checked for.
TARGETS = {"trn1": "trn1.32xlarge", "trn2": "trn2.48xlarge"}

_ISSUES = "frameworks/jax/setup/jax-neuronx-known-issues"
_INF2 = "measured by others on inf2 (github.com/xbill9/tpu-jax)"
_DTYPES = "about-neuron/arch/neuron-features/data-types"


def _code(*names: str) -> str:
    return "compiler/error-codes/" + ", ".join(names)


@dataclasses.dataclass(frozen=True)
class Rule:
    """One rule.

    Attributes:
      severity: "error": Neuron documents that it refuses this or computes it wrongly; "warning": it may fail, or costs;
        "info": worth knowing.
      seen: what in the program the rule looks for.
      why: what happens.
      instead: what to write.
      source: page of the Neuron documentation (awsdocs-neuron.readthedocs-hosted.com), or who found it.
      once: severity in a program that runs once, such as the initial state's; None: the same.
      trn1: severity there, where it differs from `severity`.
    """

    severity: str
    seen: str
    why: str
    instead: str
    source: str
    once: str | None = None
    trn1: str | None = None

    def severity_on(self, target: str, *, recurring: bool) -> str:
        """Returns the severity for a target of `TARGETS`, in a program that runs every step or once."""
        if not recurring and self.once is not None:
            return self.once
        return self.trn1 if target == "trn1" and self.trn1 is not None else self.severity


RULES: dict[str, Rule] = {
    "LW01": Rule(
        "error",
        "a primitive that JAX cannot lower for platform neuron",
        "the program cannot be built; host callbacks and LAPACK decompositions end here",
        "no debug.print, pure_callback, eigh or svd in it; do that on the host",
        _ISSUES,
    ),
    "CF01": Rule(
        "error",
        "`case` or `if` on a computed index",
        "lax.cond and lax.switch are not supported",
        "jnp.where over both branches, or decide on the host",
        _ISSUES,
    ),
    "CF02": Rule(
        "info",
        "`case` on a constant index",
        "platform_dependent leaves one; it folds away",
        "nothing; exporting for neuron alone removes it",
        "seen in lowered programs; no page",
    ),
    "CF03": Rule(
        "error",
        "`while` whose length is not a constant of the program",
        "only loops of static length are supported",
        "lax.scan, or fori_loop with Python integers as bounds",
        _ISSUES,
    ),
    "CF04": Rule(
        "info",
        "`while` of static length",
        "supported; the compiler may unroll it, and then the program is as large as the loop is long",
        "model.layer_loop=unroll where the compiler asks for it",
        _ISSUES,
    ),
    "RED01": Rule(
        "error",
        "`reduce` of several operands together",
        "argmax, argmin and categorical lower to it; variadic reductions are not supported",
        "max, compare, and min of an iota; or choose on the host",
        _ISSUES,
        once="warning",
    ),
    "RED02": Rule(
        "warning",
        "`reduce_window`",
        "cumsum and its like lower to it; slow, and little used",
        "a product with a triangular mask, associative_scan, or the host",
        _code("EVRF017", "EVRF018", "EVRF019"),
    ),
    "RED03": Rule(
        "error",
        "`reduce_window` with dilation, or with several inputs",
        "the compiler refuses it",
        "a window without dilation, one input at a time",
        _code("EVRF017", "EVRF018", "EVRF019"),
    ),
    "RNG01": Rule(
        "error",
        "a call of threefry2x32",
        "Threefry is not completely supported; also the split and fold_in of rbg keys emit it",
        'keys of impl="rbg"; in a step an integer hash of (seed, step, index)',
        _ISSUES,
        once="warning",
    ),
    "RNG02": Rule(
        "error",
        "`rng_bit_generator` with another algorithm than DEFAULT",
        "the compiler refuses it",
        'jax.random.key(seed, impl="rbg")',
        _code("EVRF006"),
    ),
    "RNG03": Rule(
        "error",
        "the old `rng` operation",
        "it is folded to a constant",
        "jax.random with an rbg key",
        "third-party reading of the compiler; no page",
    ),
    "RNG04": Rule(
        "warning",
        "a call of jax.random.randint",
        "its values do not have the expected distribution",
        "NumPy on the host",
        _ISSUES,
    ),
    "RP01": Rule(
        "error",
        "`reduce_precision` to fewer bits than its operand has",
        "not supported",
        "astype",
        _ISSUES,
    ),
    "RP02": Rule(
        "warning",
        "`reduce_precision` to the operand's own bits",
        "not supported; remat policies that save values emit it, and it does nothing",
        "hlat_jax.host.neuron_lowering.elide_idle_roundings() before the step is lowered",
        _ISSUES,
    ),
    "CB01": Rule(
        "error",
        "a custom call that is not on Neuron's list; infeed, outfeed, send, recv",
        "the compiler recognises 29 targets and no host transfer",
        "plain JAX, or a kernel by AwsNeuronCustomNativeKernel",
        _code("EHCA005", "EVRF015"),
    ),
    "OP01": Rule(
        "error",
        "`triangular_solve`, `cholesky`, `fft`",
        "not supported",
        "the host, or a form of matrix products",
        _code("EUOC002", "EVRF001"),
    ),
    "OP02": Rule("error", "`top_k`", "not supported", "repeated max, or the host", _code("EUOC002")),
    "OP03": Rule("error", "`top_k` of integers", "not supported", "float32, then repeated max", _code("EVRF013")),
    "OP04": Rule(
        "error",
        "`sort` by more than one comparison LT, LE, GT or GE",
        "other comparators are not supported; floats sort by total order, several keys by a chain",
        "one integer key; or the host",
        _ISSUES,
    ),
    "OP05": Rule(
        "error", "`shift_right_arithmetic` of other than 32 bits", "the compiler refuses it", "int32", _code("EVRF022")
    ),
    "OP06": Rule(
        "info",
        "an operation of the `chlo` dialect",
        "the plugin writes it out; erf_inv, of normal draws, is long",
        "nothing; no truncated normal draws in a step",
        "third-party reading of the plugin; no page",
    ),
    "OP07": Rule(
        "info",
        "`optimization_barrier`",
        "a pass of the compiler drops it, so it may hold nothing apart",
        "nothing; do not rely on it for memory",
        "third-party reading of the compiler; no page",
    ),
    "OP08": Rule(
        "error",
        "convolution with both dilations, or with stride and lhs dilation",
        "the compiler refuses it",
        "two convolutions, or products",
        _code("EVRF010", "EVRF011"),
    ),
    "OP09": Rule(
        "error",
        "an operation that the file of --operators does not name",
        "`neuronx-cc list-operators --framework XLA` is the compiler's own list",
        "operations of that list",
        _code("EVRF001"),
    ),
    "DT01": Rule(
        "error", "complex numbers", "not supported", "real arithmetic: cos and sin for RoPE", _code("EVRF004")
    ),
    "DT02": Rule("error", "f8E4M3FN", "trn1 and trn2 have no such type", "jnp.float8_e4m3", _code("EVRF051")),
    "DT03": Rule(
        "error", "an FNUZ float, f8E4M3B11FNUZ", "not supported", "jnp.float8_e4m3", _code("ESPP047", "EVRF005")
    ),
    "DT04": Rule("error", "floats of 4 or 6 bits", "not supported", "jnp.float8_e4m3", _code("ESPP004")),
    "DT05": Rule("error", "float64", "in no table of types", "jax_enable_x64 off", _DTYPES),
    "DT06": Rule(
        "warning",
        "64-bit integers beyond the state of a key",
        "cast down to 32 bits, on trn2 unless --native-int64; the default of that cast is announced to change",
        "int32, or two words of 32 bits",
        _DTYPES,
    ),
    "DT07": Rule(
        "error", "a uint64 constant of 2^32 or more", "it has no 32-bit form", "two uint32 words", _code("ESFH002")
    ),
    "INT01": Rule(
        "error",
        "`dot_general` of integers",
        "refused, or cast down; of int32 on trn1 with a warning today",
        "cast to bfloat16 or float32",
        _code("EVRF035"),
        trn1="warning",
    ),
    "INT02": Rule(
        "error",
        "scatter that computes on integers or booleans",
        "the compiler refuses it",
        "a sum of one-hot float32 vectors",
        _code("EVRF016", "EVRF060"),
    ),
    "INT03": Rule(
        "error",
        "integer `all_reduce` or `reduce_scatter`",
        "refused, or summed in float32, which is exact below 2^24 only",
        "float32 counts whose every addend and total stay below 2^24, or counts in several words",
        _code("EVRF061", "EVRF063"),
    ),
    "INT04": Rule("error", "`power` of 64-bit integers", "the compiler refuses it", "int32", _code("EVRF062")),
    "GS01": Rule(
        "error",
        "gather or scatter by an iota that reaches beyond the operand",
        "the compiler refuses indices that it can see to lie outside",
        "as many indices as rows; positions below model.max_positions",
        _code("EVRF031", "EVRF056"),
    ),
    "GS02": Rule(
        "info",
        "gather or scatter by indices that are data, or a constant that reaches beyond the operand",
        "one that lies outside ends the run with status 1006",
        'jnp.clip of the indices: mode="clip" leaves it to the gather itself',
        "neuron-runtime/nrt-troubleshoot",
    ),
    "GS03": Rule(
        "info",
        "scatter-add of floats into 8,192 rows or more",
        "the gradient of a large lookup: slow",
        "split the vocabulary over devices, or a one-hot product",
        "performance; no page",
    ),
    "SH01": Rule("error", "a dynamic shape", "every dimension must be static", "fixed shapes", _code("EMOD025")),
    "SH02": Rule(
        "warning",
        "an array of 4 GB or more on one device",
        "before SDK 2.28 its size overflows; others saw a gather from 4.7 GB return zeros silently",
        "shard it, or split the stack of layers",
        "release-notes/components/runtime (2.30.50; known issues of SDK 2.26); " + _INF2,
    ),
    "SH03": Rule(
        "warning",
        "more than 128 arguments",
        "a call of 512 took 418 ms, of 128 took 8 ms",
        "layers stacked into few arrays",
        _INF2,
    ),
    "DN01": Rule(
        "warning",
        "an argument of 1 MiB or more that could hold a result and is not donated",
        "both live at once",
        "donate_argnums, the result's sharding equal to the argument's",
        "jax.jit's donate_argnums, which Neuron takes since JAX 0.4.34",
    ),
    "DA01": Rule(
        "warning",
        "`dot_general` with an algorithm",
        "not supported; jax.nn.dot_product_attention sets one",
        "dtypes of the operands and preferred_element_type",
        _ISSUES,
    ),
    "CC01": Rule(
        "error",
        "more than 16 different sets of replica groups",
        "more are refused; 12 before SDK 2.32",
        "fewer combinations of mesh axes",
        "release-notes/components/runtime",
    ),
    "CC02": Rule(
        "warning",
        "`collective_permute` other than along rings of neighbouring cores of a node",
        "other rings may crash or be slow",
        "the axis inside a node, or NEURON_COLLECTIVE_PERMUTE_TO_ALL_GATHER=1",
        "neuron-runtime/about/collectives; " + _ISSUES,
    ),
    "CC03": Rule(
        "warning",
        "replica groups without one stride per axis, or with parts of chips that differ",
        "meshes of cores that are not connected may crash",
        "a mesh in device order, its tensor axis innermost and a divisor or multiple of the chip's cores",
        _ISSUES,
    ),
    "MEM1": Rule(
        "error",
        "more bytes than a device has",
        "the compiler or the load fails",
        "more sharding or rematerialization, smaller microbatches",
        _code("EOOM001", "EOOM002", "EVRF009", "EXSP001"),
    ),
    "CG01": Rule(
        "warning",
        "more than a million 128x128x512 products once loops are unrolled",
        "instructions per program have a limit, of which the pages give no number",
        "more tensor or pipeline parallelism, fewer microbatches in a step, -O1",
        _code("EBVF030", "EVRF007", "EXTP004"),
    ),
    "NK01": Rule(
        "error",
        "a native kernel whose artifact file is not there",
        "the custom call names it by absolute path",
        "trace on the machine that compiles",
        _code("EVRF059"),
    ),
}

# Limits that cannot be seen in a program: an attribute of the kernel, the kernel's own contract.
UNSEEN = {
    "NK02": "kernel traced by an older NKI (compiler/error-codes/EVRF065): its version stands inside the artifact",
    "MLP1": "MLP kernel wider than 4,096 per core (compiler/error-codes/EBIR023): a limit of that kernel, checked "
    "where it is chosen",
}
