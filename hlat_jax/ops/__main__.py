"""Former address of the ops commands; prints the new one."""

import sys

if __name__ == "__main__":
    print(f"error: python -m hlat_jax.ops is now python -m hlat_jax.plan {' '.join(sys.argv[1:])}", file=sys.stderr)
    sys.exit(2)
