"""XLA compiler options that overlap collectives with computation on GPUs.

Source: "GPU performance tips" of JAX and "Tips for High-Performance LLMs with JAX and XLA" of NVIDIA's JAX toolbox. The
XLA of JAX 0.11 has no options for pipelined collectives any more. These are not yet run on several GPUs. Tests check
that XLA accepts each name.
"""

from __future__ import annotations

from hlat_jax.parallel.sharding import Layout

# Collectives start as soon as their operands are ready and finish where their results are read, also across iterations
# of the loop over layers, which double-buffers the loop's values.
_PRESET = {
    "xla_gpu_enable_latency_hiding_scheduler": True,
    "xla_gpu_enable_while_loop_double_buffering": True,
}
_COMBINED = (
    "xla_gpu_all_gather_combine_threshold_bytes",
    "xla_gpu_all_reduce_combine_threshold_bytes",
    "xla_gpu_reduce_scatter_combine_threshold_bytes",
)


def compiler_options(layout: Layout, *, platform: str = "") -> dict[str, bool | int]:
    """Returns the options for `lowered.compile(compiler_options=...)`, or none on one device or without GPUs.

    Args:
      layout: layout of the run. A `bucket_bytes` above 0 is also XLA's threshold for combining collectives.
      platform: JAX's name of the platform, by default the platform of the layout's devices.
    """
    if layout.mesh.size == 1 or (platform or layout.platform) not in ("gpu", "cuda", "rocm"):
        return {}
    return _PRESET | (dict.fromkeys(_COMBINED, layout.bucket_bytes) if layout.bucket_bytes else {})
