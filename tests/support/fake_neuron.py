"""Lowers NKI attention where JAX knows a platform `neuron`; prints its kernel calls. Run by test_nki_attention.

The platform is known and has no devices, and the kernels of the argument `kernels` only mark their place: nothing here
can run, and nothing may. With the argument `segments`, rows hold several documents.
"""

import functools
import json
import re
import sys

import jax
import jax.numpy as jnp
import nki_contracts
from jax._src import xla_bridge
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from hlat_jax.ops.nki import attention as nki

TARGET = nki_contracts.TARGET


def no_devices():
    raise RuntimeError("a fake platform has no devices")


def main():
    xla_bridge.register_backend_factory("neuron", no_devices, priority=-500, fail_quietly=True)
    grids = []
    if "kernels" in sys.argv:
        sys.modules.update(nki_contracts.fake_modules(nki_contracts.CONTRACTS["2.33.1"], grids))
    mesh = AbstractMesh((128, 4), ("data", "tensor"))
    spec = P("data", None, "tensor")

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(spec,) * 4 + (P("data"),), out_specs=spec, check_vma=False)
    def step(q, k, v, dout, ids):
        attend = functools.partial(nki.attention, segment_ids_BT=ids if "segments" in sys.argv else None)
        out, pullback = jax.vjp(attend, q, k, v)
        return out + sum(grad.sum() for grad in pullback(dout))

    where = NamedSharding(mesh, spec)
    q, k = (jax.ShapeDtypeStruct((128, 512, heads, 16), jnp.bfloat16, sharding=where) for heads in (8, 4))
    ids = jax.ShapeDtypeStruct((128, 512), jnp.int32, sharding=NamedSharding(mesh, P("data")))
    text = jax.jit(step).trace(q, k, k, q, ids).lower(lowering_platforms=("neuron",)).as_text()
    calls = [re.findall(r"tensor<([^>]+)>", line.rpartition(" : ")[2]) for line in text.splitlines() if TARGET in line]
    partitions = int(re.search(r"num_partitions = (\d+)", text)[1])
    print(json.dumps({"partitions": partitions, "calls": calls, "grids": grids}))


if __name__ == "__main__":
    main()
