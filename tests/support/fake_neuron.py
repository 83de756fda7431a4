"""Lowers NKI attention where JAX knows a platform `neuron`; prints its kernel calls. Run by test_nki_attention.

The platform is known and has no devices, and the kernels of the argument `kernels` only mark their place: nothing here
can run, and nothing may.
"""

import functools
import json
import re
import sys
import types

import jax
import jax.numpy as jnp
from jax._src import xla_bridge
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from hlat_jax.ops.nki import attention as nki

TARGET = "AwsNeuronCustomNativeKernel"


def no_devices():
    raise RuntimeError("a fake platform has no devices")


def attention_cte(q, k, v, *, scale, causal_mask, tp_q, cache_softmax):
    assert causal_mask
    assert tp_q
    assert cache_softmax
    numbers = jax.ShapeDtypeStruct((q.shape[0], 128, q.shape[1] // 128), jnp.float32)
    return jax.ffi.ffi_call(TARGET, (jax.ShapeDtypeStruct(q.shape, q.dtype), numbers, numbers))(q, k, v)


def attention_bwd(q_ref, k_ref, v_ref, o_ref, dy_ref, lse_ref, *, use_causal_mask, mixed_precision, softmax_scale):
    """Its arguments have the kernel's own names."""
    assert use_causal_mask
    assert mixed_precision
    results = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q_ref, k_ref, v_ref))
    return jax.ffi.ffi_call(TARGET, results)(q_ref, k_ref, v_ref, o_ref, dy_ref, lse_ref)


def main():
    xla_bridge.register_backend_factory("neuron", no_devices, priority=-500, fail_quietly=True)
    if "kernels" in sys.argv:
        for kernel in (attention_cte, attention_bwd):
            sys.modules[f"nkilib.core.attention.{kernel.__name__}"] = types.SimpleNamespace(**{kernel.__name__: kernel})
    mesh = AbstractMesh((128, 4), ("data", "tensor"))
    spec = P("data", None, "tensor")

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(spec,) * 4, out_specs=spec, check_vma=False)
    def step(q, k, v, dout):
        out, pullback = jax.vjp(nki.attention, q, k, v)
        return out + sum(grad.sum() for grad in pullback(dout))

    where = NamedSharding(mesh, spec)
    q, k = (jax.ShapeDtypeStruct((128, 512, heads, 16), jnp.bfloat16, sharding=where) for heads in (8, 4))
    text = jax.jit(step).trace(q, k, k, q).lower(lowering_platforms=("neuron",)).as_text()
    calls = [re.findall(r"tensor<([^>]+)>", line.rpartition(" : ")[2]) for line in text.splitlines() if TARGET in line]
    print(json.dumps({"partitions": int(re.search(r"num_partitions = (\d+)", text)[1]), "calls": calls}))


if __name__ == "__main__":
    main()
