"""What is refused on chips that NKI kernels are not documented for."""

from __future__ import annotations

from hlat_jax.config import ModelConfig
from hlat_jax.facts.chips import DOCUMENTED, chip_of
from hlat_jax.facts.measured_rates import LONG_ROW, attention_shares


def exclusions(model: ModelConfig, device: str) -> dict[str, dict[str, str]]:
    """Returns op -> implementation -> why it is not used on a device, whatever the call.

    Args:
      model: whose `allow_nki_on_trn1` lets an implementation that it names pass.
      device: as for `chip_of`; where that is not known, nothing is excluded.
    """
    chip = chip_of(device)
    if not chip or chip in DOCUMENTED or (model.attention == "nki" and model.allow_nki_on_trn1):
        return {}
    why = (
        f"since SDK 2.29 AWS documents NKI for {' and '.join(DOCUMENTED)} only, not for {chip} (nki/nki_faq); to run "
        "it all the same, set model.allow_nki_on_trn1=True"
    )
    return {"attention": {"nki": why}}


def preferences(seq_len: int, device: str) -> dict[str, dict[str, str]]:
    """Returns op -> implementation -> why `auto` takes it on a device for rows of a length; `device` as above."""
    if chip_of(device) != "trn2" or seq_len < LONG_ROW:
        return {}
    row, by_xla, by_kernel = attention_shares(seq_len)
    why = f"others measured trn2 at {by_kernel:.0%} of peak with a kernel and {by_xla:.0%} without, for rows of {row:,}"
    return {"attention": {"nki": why}}
