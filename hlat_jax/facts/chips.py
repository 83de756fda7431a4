"""Chips by the names in other software, and the chips that NKI documents."""

from __future__ import annotations

import re

# Since SDK 2.29. Source: nki/nki_faq; release-notes/components/nxd-inference of 2.29 ("NKI 0.3.0 kernels are not
# supported on Trn1/Inf2").
DOCUMENTED = ("trn2", "trn3")


def chip_of(device: str) -> str:
    """Returns the chip of a device_kind of JAX, an instance type or a target, such as "trn2", or "" without one."""
    match = re.match(r"trn(\d+)|nc_v(\d+)", device.lower())
    if match is None:
        return ""
    return f"trn{match[1] or int(match[2]) - 1}"  # NC_v3 is a core of trn2
