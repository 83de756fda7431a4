"""Pre-training of Llama-architecture language models on AWS Trainium with JAX."""

__version__ = "0.1.0"
