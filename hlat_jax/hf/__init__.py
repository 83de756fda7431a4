"""Import from Hugging Face and export to it.

model, params = hlat_jax.hf.load("SmolLM2-135M")
logits_BTV = hlat_jax.model.apply(params, model, tokens_BT)
hlat_jax.hf.save(params, model, "SmolLM2-135M", "continued")  # with the tokenizer of that folder
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hlat_jax.hf.exporting import save as save
    from hlat_jax.hf.importing import load as load


def __getattr__(name: str) -> Any:
    if name == "load":
        from hlat_jax.hf.importing import load

        return load
    if name == "save":
        from hlat_jax.hf.exporting import save

        return save
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
