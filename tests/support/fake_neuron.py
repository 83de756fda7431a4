"""Lowers NKI attention where JAX knows a platform `neuron`; prints its kernel calls. Run by test_nki_attention.

The platform is known and has no devices, and the kernels of the argument `kernels` only mark their place: nothing here
can run, and nothing may. `documents` are the calls where rows hold several documents.
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


def no_devices():
    raise RuntimeError("a fake platform has no devices")


def main():
    xla_bridge.register_backend_factory("neuron", no_devices, priority=-500, fail_quietly=True)
    grids = []
    if "kernels" in sys.argv:
        sys.modules.update(nki_contracts.fake_modules(nki_contracts.CONTRACTS["2.33.1"], grids))
    mesh = AbstractMesh((128, 4), ("data", "tensor"))
    spec = P("data", None, "tensor")

    def kernel_calls(*, has_segments):
        @functools.partial(
            jax.shard_map, mesh=mesh, in_specs=(*(spec,) * 4, P("data")), out_specs=spec, check_vma=False
        )
        def step(q, k, v, dout, ids):
            attend = functools.partial(nki.attention, segment_ids_BT=ids if has_segments else None)
            out, pullback = jax.vjp(attend, q, k, v)
            return out + sum(grad.sum() for grad in pullback(dout))

        text = jax.jit(step).trace(q, k, k, q, ids).lower(lowering_platforms=("neuron",)).as_text()
        lines = [line.rpartition(" : ")[2] for line in text.splitlines() if nki_contracts.TARGET in line]
        return text, [re.findall(r"tensor<([^>]+)>", line) for line in lines]

    where = NamedSharding(mesh, spec)
    q, k = (jax.ShapeDtypeStruct((128, 512, heads, 16), jnp.bfloat16, sharding=where) for heads in (8, 4))
    ids = jax.ShapeDtypeStruct((128, 512), jnp.int32, sharding=NamedSharding(mesh, P("data")))
    text, calls = kernel_calls(has_segments=False)
    found = {"calls": calls, "documents": kernel_calls(has_segments=True)[1], "grids": grids}
    print(json.dumps(found | {"partitions": int(re.search(r"num_partitions = (\d+)", text)[1])}))


if __name__ == "__main__":
    main()
