"""Checks in a few minutes that this machine is ready for a run, `python -m hlat_jax.neuron doctor`."""

from __future__ import annotations

import os
import tempfile
from collections.abc import MutableMapping, Sequence
from typing import Any

from absl import flags, logging

from hlat_jax import config as config_lib
from hlat_jax.cli import flags as flags_lib
from hlat_jax.facts.local_paths import local_path
from hlat_jax.host import neuron_env, neuron_topology
from hlat_jax.neuron.probes import FAILED, NOT_HERE, PASSED, UNUSED
from hlat_jax.weights.init_model import parse_config


def main(argv: Sequence[str]) -> int:
    """Runs and prints every check, then a summary. Returns 1 if a check failed, else 0."""
    has_config = any(word.split("=")[0] in ("--config", "--init_from", "--help", "-h") for word in argv)
    config, values = parse_config(argv if has_config else ["--config=tiny", *argv], _define)
    flags_lib.check_output("--json", values.json)
    options = _prepare(config, values, os.environ, machine=neuron_topology.Machine())
    logging.set_verbosity(logging.ERROR)
    from hlat_jax.neuron import doctor  # imports JAX, which reads the environment prepared above

    where = options["instance"] or "a machine without Neuron devices"
    print(f"{config.name} ({config.precision.policy}) on {where}")
    rows = []
    for name, probe in doctor.checks(config, **options):
        outcome, seconds = doctor.run_check(probe)
        rows.append({"check": name, **outcome._asdict(), "seconds": round(seconds, 2)})
        print(
            f"{outcome.verdict:<18} {name:<20} {outcome.found} ({seconds:.1f} s)", flush=True
        )  # a later check may crash
        if outcome.advice:
            print(f"{'':<18} to do: {outcome.advice}", flush=True)
    print()
    for verdict in (PASSED, FAILED, UNUSED, NOT_HERE):
        names = [row["check"] for row in rows if row["verdict"] == verdict]
        if names or verdict != UNUSED:
            print(f"{verdict:<18} {len(names):>3}  {', '.join(names)}".rstrip())
    if not options["instance"]:
        print("No Trainium device was checked.")
    flags_lib.write_report(values.json, {"config": config.name, "instance": options["instance"], "checks": rows})
    return 1 if any(row["verdict"] == FAILED for row in rows) else 0


def _prepare(
    config: config_lib.Config,
    values: flags.FlagValues,
    environ: MutableMapping[str, str],
    *,
    machine: neuron_topology.Machine,
) -> dict[str, Any]:
    """Sets the environment that a run of the config needs; returns the options of `doctor.checks`."""
    platforms = environ.get("JAX_PLATFORMS", "")
    instance, num_devices = neuron_topology.instance_to_serve(values.instance, platforms, machine=machine), 0
    if values.cores and not instance:
        raise ValueError(f"--cores={values.cores} needs Neuron devices, which this machine lacks. Remove the flag.")
    if instance:
        wanted = neuron_topology.Topology(instance, lnc=neuron_topology.lnc_of(environ), cores=values.cores)
        options = {"current": environ, "config_flags": config.train.compiler_flags}
        computed = neuron_env.environment(config.precision, config.parallel, wanted, **options)
        environ.update(computed.variables)
        print(*computed.notes, sep="\n", end="\n" * bool(computed.notes))
        # with it, checks that need one device would run on the host's CPU
        environ.pop("NEURON_RUN_TRIVIAL_COMPUTATION_ON_CPU", None)
        num_devices = neuron_topology.resolve_topology(wanted).devices_per_node
    folder = environ.get("JAX_COMPILATION_CACHE_DIR") or tempfile.gettempdir()
    cache = local_path(folder, key="JAX_COMPILATION_CACHE_DIR", use="write")
    return {"instance": instance, "num_devices": num_devices, "cache": cache}


def _define(values: flags.FlagValues) -> None:
    options = {"flag_values": values}
    flags_lib.define_path(values, "json", "Also write the report to this file.", use="write")
    flags.DEFINE_string("instance", "", "Trainium instance type, by default detected.", **options)
    flags.DEFINE_integer("cores", 0, "Number of JAX devices of this instance to check. 0 means all.", **options)
