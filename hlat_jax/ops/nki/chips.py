"""The chips that NKI kernels are documented for, and what is refused on the others."""

from __future__ import annotations

import re

from hlat_jax.config import ModelConfig

# Since SDK 2.29. Source: nki/nki_faq; release-notes/components/nxd-inference of 2.29 ("NKI 0.3.0 kernels are not
# supported on Trn1/Inf2").
DOCUMENTED = ("trn2", "trn3")


def chip_of(device: str) -> str:
    """Returns the chip of a device_kind of JAX, an instance type or a target, such as "trn2"; "" where it is none."""
    found = re.match(r"trn(\d+)|nc_v(\d+)", device.lower())
    if found is None:
        return ""
    return f"trn{found[1] or int(found[2]) - 1}"  # NC_v3 is a core of trn2


def excluded(model: ModelConfig, device: str) -> dict[str, dict[str, str]]:
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
