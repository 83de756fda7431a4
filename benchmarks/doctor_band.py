"""Where the doctor's short training ends, over policies, seeds of the weights and orders of the data.

    python benchmarks/doctor_band.py                              # 8 runs of about a minute on two quiet CPU cores
    taskset -c 0 python benchmarks/doctor_band.py --runs=fp32:0:1234   # on one thread
    XLA_FLAGS=--xla_force_host_platform_device_count=2 python benchmarks/doctor_band.py --runs=fp32:0:1234

`hlat_jax.neuron.short_training.BAND` is what these print, with room on both sides; its comment has the numbers.
"""

import argparse
import dataclasses
import time

import jax

from hlat_jax.config import PrecisionConfig
from hlat_jax.neuron import short_training

RUNS = "fp32:0:1234,fp32:1:1234,mixed:2:1234,bf16_sr:3:1234,bf16:4:1234,fp32:0:99,fp32:5:7,mixed:6:8"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", default=RUNS, help="POLICY:SEED OF THE WEIGHTS:SEED OF THE DATA,...")
    found = []
    print(f"{'policy':<8} {'weights':>7} {'data':>6} {'devices':>7} {'first':>7} {'validation':>10} {'seconds':>8}")
    for run in parser.parse_args().runs.split(","):
        policy, seed, data_seed = run.split(":")
        config = short_training.short_config(PrecisionConfig(policy))
        config = dataclasses.replace(
            config,
            train=dataclasses.replace(config.train, seed=int(seed)),
            data=dataclasses.replace(config.data, seed=int(data_seed)),
        )
        began = time.monotonic()
        done = short_training.train(config, jax.devices())
        found.append(done.eval_loss)
        numbers = (
            f"{done.num_devices:>7} {done.losses[0]:>7.3f} {done.eval_loss:>10.4f} {time.monotonic() - began:>8.0f}"
        )
        print(f"{policy:<8} {seed:>7} {data_seed:>6} {numbers}", flush=True)
    low, high = short_training.BAND
    print(f"from {min(found):.4f} to {max(found):.4f}; the band is {low:g} to {high:g}")


if __name__ == "__main__":
    main()
