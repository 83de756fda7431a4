"""Compiles the training step for virtual CPU devices in a subprocess and compares it with the plan of that layout.

There are at most 2,048 virtual CPU devices, so the data degree is reduced until they suffice; the rows per device are
unchanged. On CPU a bf16 program computes products in fp32 and sends bf16 as fp32, so the program is compiled, and
planned, under the fp32 policy, with the same layers, layout and schedule. `python -m hlat_jax.plan.aot` is the
subprocess: it reads a JSON object from stdin and writes one to stdout.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from typing import Any

from hlat_jax.config import Config, PrecisionConfig
from hlat_jax.facts import hardware
from hlat_jax.facts.byte_sizes import format_bytes
from hlat_jax.plan.report import Site, layout_dict, layout_text
from hlat_jax.resolve import resolve

MAX_DEVICES = 512
_POLICY = "fp32"


def partition(config: Config, site: Site, *, max_devices: int = MAX_DEVICES) -> dict[str, Any]:
    """Returns figures of the step compiled at a smaller data degree, with the planned ones.

    Raises:
      ValueError: a layout whose other degrees alone take more than 2,048 devices.
      RuntimeError: the compiling process failed; the message ends with its last output.
    """
    small, num_devices = fewer_replicas(config, site.num_devices, max_devices=max_devices)
    small = dataclasses.replace(small, precision=PrecisionConfig(policy=_POLICY))
    platform = hardware.target(site.target).platform
    task = {"config": small.to_dict(), "num_devices": num_devices, "platform": platform}
    flags = f"--xla_force_host_platform_device_count={num_devices} --xla_backend_optimization_level=0"
    flags += " --xla_cpu_scheduler_type=CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"
    env = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "hlat_jax.plan.aot"]
    done = subprocess.run(command, input=json.dumps(task), env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"compiling for {num_devices} virtual CPU devices failed: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def fewer_replicas(config: Config, num_devices: int, *, max_devices: int) -> tuple[Config, int]:
    """Returns (config with a data degree for at most `max_devices` and the same rows per device, number of devices)."""
    from hlat_jax.parallel.virtual_devices import planned_layout

    degrees = planned_layout(config, num_devices, platform="cpu").degrees
    inner = num_devices // degrees["data"]
    if inner > 2048:
        raise ValueError(
            f"this layout takes {inner:,} devices for one replica; virtual CPU devices are limited to 2,048."
        )
    few = max(1, max_devices // inner)
    data = max(d for d in range(1, few + 1) if degrees["data"] % d == 0)  # a divisor, so that the config stays valid
    tree = config.to_dict()
    tree["data"]["batch_size"] = config.data.batch_size // degrees["data"] * data
    tree["parallel"]["data"] = data
    return resolve(tree), inner * data


def compiled(config: Config, num_devices: int, platform: str) -> dict[str, Any]:
    """Returns the result of `partition`; runs in a process that has `num_devices` CPU devices."""
    import jax

    from hlat_jax.ops.choices import chosen_model
    from hlat_jax.parallel.degrees import layout_over
    from hlat_jax.passes.liveness import estimated_temporaries
    from hlat_jax.passes.products import live_jaxpr
    from hlat_jax.program import make_program, state_bytes

    start = time.monotonic()
    layout = layout_over(config, jax.devices()[:num_devices])
    model = chosen_model(config, layout, platform=platform)
    # layers in a loop, unless unrolled ones were asked for: the same collectives, compiled in seconds
    model = dataclasses.replace(model, layer_loop=config.model.layer_loop)
    if model.attention == "nki":  # a CPU does not have the kernel; no collective is in it
        model = dataclasses.replace(model, attention="auto")
    config = dataclasses.replace(config, model=model)
    program = make_program(config, layout)
    arguments, jaxpr = program.step_arguments, live_jaxpr(program.trace_step())
    step = program.trace_step().lower().compile()
    memory = step.memory_analysis()
    return {
        "devices": num_devices,
        "layout": layout_dict(config, layout),
        "policy": config.precision.policy,
        "seconds": time.monotonic() - start,
        "argument_bytes": memory.argument_size_in_bytes,
        "planned_argument_bytes": state_bytes(arguments[0]) + state_bytes(arguments[1]) + 4,
        "temporary_bytes": memory.temp_size_in_bytes,
        "planned_temporary_bytes": estimated_temporaries(jaxpr, arguments).total,
    }


def partition_text(part: dict[str, Any]) -> str:
    """Returns the figures of the program compiled for virtual devices, next to the planned ones."""
    lines = [
        f"Compiled for {part['devices']} virtual CPU devices ({layout_text(part['layout'])}), {part['seconds']:.0f} s, "
        f"under precision.policy={part['policy']}"
    ]
    for name in ("argument_bytes", "temporary_bytes"):
        compiled, planned = (format_bytes(part[key]) for key in (name, f"planned_{name}"))
        lines.append(f"  {name.replace('_', ' '):<16} {compiled:>12}, planned {planned:>12}")
    return "\n".join(lines)


if __name__ == "__main__":
    task = json.load(sys.stdin)
    print(json.dumps(compiled(resolve(task["config"]), task["num_devices"], task["platform"])))
