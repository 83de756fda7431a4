"""Limits of neuronx-cc on the instructions of a program and an operation, and advice to stay below them."""

from __future__ import annotations

import re
from collections.abc import Iterable

# Numbers in the errors of public logs; the documentation gives none.
# Source: github.com/aws-neuron/aws-neuron-sdk/issues/987, 1003 (a program); reports of NCC_EXTP003 (an operation).
PROGRAM_LIMIT = 5_000_000
OPERATION_LIMIT, OPERATION_LIMIT_TRN1 = 300_000, 150_000
# Undocumented. Source: a public launch script of AXLearn for trn2 raises the limit to 20,000,000 by the first; ports of
# other models set the second too, because the first passes of the compiler have a check of their own.
LIMIT_FLAG = "--internal-max-instruction-limit"
PROGRAM_ADVICE = (
    "fewer rows in a microbatch, more parallel.tensor or parallel.pipe; in train.compiler_flags (undocumented) "
    f"{LIMIT_FLAG}=N moves the limit, and --internal-hlo2tensorizer-options='--tiled-inst-limit=N' one before it"
)
PROGRAMS_ADVICE = "train.accumulate=programs (a program holds one microbatch, or one tick of a pipeline)"
OPERATION_ADVICE = (
    "fewer rows in a microbatch, a shorter data.seq_len, more parallel.tensor; for the loss model.cross_entropy=chunked"
)
# Counts of 37 to 40 million recur in unrelated programs: of SmolLM2-360M (37,536,776), a video decoder (39,093,968) and
# an MoE prefill (39,723,713). They mark the compiler's modular split, above 2e11 multiplications, and measure none.
ESTIMATE_NOTE = "an order of magnitude: no public count of the compiler can be compared with it"

ROOM = 1.4


def may_exceed(estimate: int, limit: int) -> bool:
    """Returns whether an estimate is above a limit, or within a factor ROOM of it."""
    return ROOM * estimate > limit


def program_limit(compiler_flags: str) -> int:
    """Returns the instructions of a program at which the compiler stops, under flags such as NEURON_CC_FLAGS."""
    given = re.findall(rf"{LIMIT_FLAG}[= ](\d+)", compiler_flags)
    return int(given[-1]) if given else PROGRAM_LIMIT


def operation_limit(target: str) -> int:
    """Returns the instructions of one operation above which public logs show errors, by chip or instance type."""
    return OPERATION_LIMIT_TRN1 if target.startswith("trn1") else OPERATION_LIMIT


def program_advice(names: Iterable[str]) -> str:
    """Returns advice to make programs of these names smaller. `train` has all microbatches (train.accumulate=scan)."""
    return f"{PROGRAMS_ADVICE}, {PROGRAM_ADVICE}" if "train" in names else PROGRAM_ADVICE


def round_estimate(count: int) -> str:
    """Returns a number rounded to two digits, the precision of an estimate."""
    step = 10 ** max(0, len(str(count)) - 2)
    return f"{round(count / step) * step:,}"
