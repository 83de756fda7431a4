"""Import from Hugging Face and export to it. From Python, use `load`:

model, params = hlat_jax.hf.load("SmolLM2-135M")
logits_BTV = hlat_jax.model.apply(params, model, tokens_BT)
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hlat_jax.hf.importing import load as load


def __getattr__(name: str) -> Any:
    if name == "load":
        from hlat_jax.hf.importing import load

        return load
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
