"""`python -m hlat_jax.neuron.cache_start`: runs one program and reports whether JAX's cache had it.

Run by `doctor` in a separate process, because within one process the second compilation is served from memory.
"""

from __future__ import annotations

import collections
import json
import sys
import time

import jax
import jax.numpy as jnp
from jax import monitoring

from hlat_jax.host.jax_compat import CACHE_HIT_EVENT


def main() -> int:
    """Prints one line of JSON: cache hits, compile time in seconds and the value that the program computed."""
    events: collections.Counter[str] = collections.Counter()
    monitoring.register_event_listener(lambda event, **_: events.update([event]))

    def program(x):
        return jax.lax.scan(lambda carry, _: (jnp.tanh(carry @ carry.T), None), x, length=4)[0].sum()

    traced = jax.jit(program).trace(jax.ShapeDtypeStruct((128, 128), jnp.float32))
    began = time.monotonic()
    compiled = traced.lower().compile()
    compile_s = time.monotonic() - began
    value = float(compiled(jnp.eye(128)))
    print(json.dumps({"hits": events[CACHE_HIT_EVENT], "compile_s": compile_s, "value": value}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
