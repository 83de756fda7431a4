"""Merges the flags of neuronx-cc that a run needs with the user's NEURON_CC_FLAGS, and explains a killed compiler.

Only flags that the neuronx-cc CLI reference documents are set here. A config or the user may append others.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from hlat_jax.host.neuron_topology import Topology

_SAME = {"-O": "--optlevel", "-lnc": "--logical-nc-config"}
COMPILER_KILLED = r"\bF137\b|(failed with|code|exitcode=) ?-9\b"  # an extended regular expression of grep too
# The value of a switch is None. Source: AWS Neuron docs, neuronx-cc CLI reference, SDK 2.32; a test compares them with
# the defaults of each release in `sdk_releases`.
Flags = dict[str, str | None]


def compiler_flags(topology: Topology) -> Flags:
    """Returns the flags of a checked topology, in the order in which they are written."""
    flags: Flags = {
        "--target": topology.kind.target,
        "--model-type": "transformer",
        "--optlevel": "1",  # the default is 2; every JAX launcher of large models that we read uses 1
        "--auto-cast": "none",  # precision.policy decides; matmult was the default before SDK 2.27
        "--enable-mixed-precision-accumulation": None,  # the default since SDK 2.27
        "--logical-nc-config": str(topology.lnc),  # must equal NEURON_LOGICAL_NC_CONFIG
        "--implicit-integer-downcast": "all",  # of 2.32; another default is announced for 2.33
    }
    if topology.kind.target == "trn2":
        flags["--native-int64"] = "disabled"  # trn2 only: int64 as on trn1
    else:
        flags["--distribution-strategy"] = "llm-training"  # HLAT's scripts, on trn1
    return flags


def with_config(flags: Flags, text: str, topology: Topology) -> Flags:
    """Returns flags merged with `train.compiler_flags`, which replace flags of the same name, see `merge_flags`."""
    given = dict(_parse_checked("train.compiler_flags", text, topology))
    kept = {name: value for name, value in flags.items() if _subject(name) not in map(_subject, given)}
    return kept | given


def merge_flags(flags: Flags, yours: str, topology: Topology) -> tuple[str, list[str]]:
    """Returns (NEURON_CC_FLAGS, a line for each of `flags` that the user overrides).

    The user's text is kept unchanged, after the `flags` that it does not set.

    Raises:
      ValueError: a flag contradicts the topology or the config.
    """
    given = {_subject(name): value for name, value in _parse_checked("NEURON_CC_FLAGS", yours, topology)}
    ours = {name: value for name, value in flags.items() if _subject(name) not in given}
    notes = []
    for name, value in flags.items():
        subject = _subject(name)
        if name not in ours and not (given[subject] == value and (value or name in yours)):
            notes.append(f"NEURON_CC_FLAGS: your value replaces {_word(name, value)}")
    return " ".join([*(_word(name, value) for name, value in ours.items()), *([yours] if yours else [])]), notes


def _word(name: str, value: str | None) -> str:
    return name if value is None else f"{name}={shlex.quote(value)}"


def _subject(name: str) -> str:
    """Returns the name of a switch without its sense, so that `--disable-x` overrides `--enable-x`."""
    return name.replace("--disable-", "--enable-")


def _parse_checked(where: str, text: str, topology: Topology) -> Iterator[tuple[str, str | None]]:
    try:
        for name, value in _parse(text):
            _check(name, value, topology)
            yield name, value
    except ValueError as error:
        raise ValueError(f"{where}={text!r}: {error}") from None


def _parse(text: str) -> Iterator[tuple[str, str | None]]:
    """Yields (long name, value) of `--a=b`, `--a b`, `-O1`, `-lnc 2` and `--switch`."""
    words = shlex.split(text)
    index = 0
    while index < len(words):
        name, is_pair, value = words[index].partition("=")
        index += 1
        if not is_pair and name.startswith("-O") and name[2:].isdecimal():
            name, is_pair, value = "-O", "=", name[2:]
        if not is_pair and index < len(words) and not words[index].startswith("-"):
            is_pair, value = "=", words[index]
            index += 1
        yield _SAME.get(name, name), value if is_pair else None


def _check(name: str, value: str | None, topology: Topology) -> None:
    if name == "--logical-nc-config" and value != str(topology.lnc):
        raise ValueError(
            f"{name}={value} contradicts --lnc={topology.lnc} of the runtime (NEURON_LOGICAL_NC_CONFIG). "
            "Leave the flag out, or set the variable to the same value."
        )
    if name == "--auto-cast" and value != "none":
        raise ValueError(
            f"{name}={value} rounds values that precision.policy keeps. Set {name}=none and choose "
            "another --config.precision.policy."
        )
    if name == "--cache_dir":
        raise ValueError(f"neuronx-cc refuses {name} (NCC_EARG002). Set NEURON_COMPILE_CACHE_URL={value}.")
    if name == "--target" and (value or "")[:4] != topology.kind.target[:4]:
        raise ValueError(f"{name}={value} does not match {topology.instance}. Set {name}={topology.kind.target}.")


def compiler_killed(text: str) -> str:
    """Returns advice if a log or an error shows that neuronx-cc was killed, else "".

    Source: github.com/aws-neuron/aws-neuron-samples/issues/64.
    """
    if not re.search(COMPILER_KILLED, text):
        return ""
    return (
        "neuronx-cc was killed, as a rule because the host has too little memory (F137, exit code -9). Compile on a "
        "host with more, or a smaller program"
    )
