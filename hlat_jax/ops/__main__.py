"""Former address of the ops commands; prints the new one."""

import shlex
import sys

if __name__ == "__main__":
    words = [shlex.quote(word) for word in sys.argv[1:]]
    print("error: python -m hlat_jax.ops is now python -m hlat_jax.plan", *words, file=sys.stderr)
    sys.exit(2)
