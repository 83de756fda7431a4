"""What XLA is told on GPUs so that collectives run beside computation. Elsewhere it is told nothing.

Source: "GPU performance tips" of JAX and "Tips for High-Performance LLMs with JAX and XLA" of NVIDIA's JAX toolbox. Not
yet run on several GPUs; tests see that XLA knows each name.
"""

from __future__ import annotations

from hlat_jax.parallel.sharding import Layout

# Collectives start as soon as their operands are there and end where they are read; those inside a loop over layers are
# moved to the trip before (gathers) or after (reductions), for which two copies of what a trip holds are kept.
_PRESET = {
    "xla_gpu_enable_latency_hiding_scheduler": True,
    "xla_gpu_enable_pipelined_all_gather": True,
    "xla_gpu_enable_pipelined_reduce_scatter": True,
    "xla_gpu_enable_pipelined_all_reduce": True,
    "xla_gpu_enable_while_loop_double_buffering": True,
}
_COMBINED = (
    "xla_gpu_all_gather_combine_threshold_bytes",
    "xla_gpu_all_reduce_combine_threshold_bytes",
    "xla_gpu_reduce_scatter_combine_threshold_bytes",
)


def compiler_options(layout: Layout, *, platform: str = "") -> dict[str, bool | int]:
    """Returns the options for `lowered.compile(compiler_options=...)`; none on one device, or off a GPU.

    Args:
      layout: of the run. Its `bucket_bytes`, where there are any, also limit what XLA itself combines.
      platform: JAX's word for the devices; default: that of the layout's.
    """
    if layout.mesh.size == 1 or (platform or layout.platform) not in ("gpu", "cuda", "rocm"):
        return {}
    return _PRESET | (dict.fromkeys(_COMBINED, layout.bucket_bytes) if layout.bucket_bytes else {})
