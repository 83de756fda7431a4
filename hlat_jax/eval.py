"""The address that the harness's command had; prints where it is."""

import shlex
import sys

if __name__ == "__main__":
    words = [shlex.quote(word) for word in sys.argv[1:]]
    print("error: python -m hlat_jax.eval is now python -m hlat_jax.evaluate lm_eval", *words, file=sys.stderr)
    sys.exit(2)
