"""Pre-training of Llama-architecture language models on AWS Trainium with JAX."""

import sys

__version__ = "0.1.0"

# `python -m hlat_jax.COMMAND` imports this file first, while sys.argv[0] is "-m": from here on Ctrl-C is one line.
# Programs that import the package keep their own handling of signals.
if sys.argv[:1] == ["-m"] and any(word.removeprefix("-m").startswith(f"{__name__}.") for word in sys.orig_argv[1:]):
    from hlat_jax import process

    process.exit_on_interrupt()
