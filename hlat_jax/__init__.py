"""Pre-training of Llama-architecture language models on AWS Trainium with JAX."""

import sys

__version__ = "0.1.0"

# `python -m hlat_jax.COMMAND` imports this file first, while sys.argv[0] is "-m": from here on Ctrl-C is one line.
# Programs that import the package keep their own handling of signals: the word that "-m" stands for names the module,
# by itself or as in -umhlat_jax.COMMAND, and the command's own words follow it.
_words = sys.orig_argv[-len(sys.argv) :] if sys.argv[:1] == ["-m"] else []
if any((word.partition("m")[2] if word.startswith("-") else word).startswith(f"{__name__}.") for word in _words[:1]):
    from hlat_jax.host import process

    process.exit_on_interrupt()
