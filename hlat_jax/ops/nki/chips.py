"""Refuses NKI kernels on chips that AWS does not document them for, and prefers them if they were measured faster."""

from __future__ import annotations

from hlat_jax.config import ModelConfig
from hlat_jax.facts.chips import DOCUMENTED, chip_of
from hlat_jax.facts.measured_rates import LONG_ROW, attention_shares


def exclusions(model: ModelConfig, device: str) -> dict[str, dict[str, str]]:
    """Returns op -> implementation -> why it is not used on a device, for any call.

    Args:
      model: the model. Its `allow_nki_on_trn1` lets an implementation that it names pass.
      device: name of the device, as for `chip_of`. If its chip is unknown, nothing is excluded.
    """
    chip = chip_of(device)
    if not chip or chip in DOCUMENTED or (model.attention == "nki" and model.allow_nki_on_trn1):
        return {}
    why = (
        f"since SDK 2.29 AWS documents NKI for {' and '.join(DOCUMENTED)} only, not for {chip} (nki/nki_faq), so it "
        "needs model.allow_nki_on_trn1=True"
    )
    return {"attention": {"nki": why}}


def preferences(seq_len: int, device: str) -> dict[str, dict[str, str]]:
    """Returns op -> implementation -> why `auto` takes it on a device for rows of `seq_len` tokens."""
    if chip_of(device) != "trn2" or seq_len < LONG_ROW:
        return {}
    row, by_xla, by_kernel = attention_shares(seq_len)
    why = f"others measured trn2 at {by_kernel:.0%} of peak with a kernel and {by_xla:.0%} without, for rows of {row:,}"
    return {"attention": {"nki": why}}
