"""Compares imported weights with transformers, by the logits of both for random tokens and for a text."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hlat_jax.host.console import labelled
from hlat_jax.host.optional_import import import_optional
from hlat_jax.model import apply
from hlat_jax.weights.hf_reading import HFCheckpoint
from hlat_jax.weights.trained import Weights

# Times the difference of transformers' own fp32 from float64, on the same tokens. Right imports were seen at up to 2.8
# times; a wrong theta, eps or order of heads at 50 to a million.
_MOST_ROUNDINGS = 16
_LEAST_ROUNDING = 2e-6  # of the largest logit; rounding errors may cancel
_MOST = 0.1  # of the largest logit, whatever the rounding error
_NUM_IDS = 128
_TEXT = (  # Jane Austen, Pride and Prejudice
    "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of a "
    "wife. However little known the feelings or views of such a man may be on his first entering a neighbourhood, this "
    "truth is so well fixed in the minds of the surrounding families, that he is considered the rightful property of "
    "some one or other of their daughters. “My dear Mr. Bennet,” said his lady to him one day, “have you heard that "
    "Netherfield Park is let at last?” Mr. Bennet replied that he had not. “But it is,” returned she; “for Mrs. Long "
    "has just been here, and she told me all about it.” Mr. Bennet made no answer. “Do not you want to know who has "
    "taken it?” cried his wife, impatiently. “You want to tell me, and I have no objection to hearing it.”"
)


def require_transformers() -> Any:
    """Returns (torch, transformers), or raises ValueError if one of them cannot be imported."""
    needs = "--verify needs {}. Leave it out, or install it with\n  pip install 'hlat_jax[verify]'"
    return tuple(import_optional(name, missing=needs.format(name)) for name in ("torch", "transformers"))


def verify(source: HFCheckpoint, weights: Weights) -> str:
    """Returns lines with the largest difference between the logits, of random tokens and of a text.

    Both models compute in fp32 with the weights rounded to the dtype of the import. One model at a time is in memory.
    A difference may be 16 times the difference of transformers' own fp32 from float64 on these tokens. So a deep model
    with growing rounding errors is not refused.

    Args:
      source: the source, for transformers.
      weights: the weights that were imported from the source.

    Raises:
      ValueError: a larger difference, or transformers cannot load the source, or is not installed.
    """
    torch, transformers = require_transformers()
    tokens, lacking = _tokens(weights)
    tokens_BT = np.stack(list(tokens.values()))
    params = weights.restore(None, dtype=jnp.float32)
    with jax.default_matmul_precision("highest"):
        ours_BTV = np.asarray(jax.jit(apply, static_argnums=1)(params, weights.model, tokens_BT))
    for leaf in jax.tree.leaves(params):
        leaf.delete()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    dtype = getattr(torch, source.dtype.name)
    options = {"dtype": dtype, "trust_remote_code": False, "local_files_only": True, "use_safetensors": True}
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(source.folder, **options).float().eval()
    except Exception as error:  # of any type, by what is wrong with the folder or with this version
        first = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise ValueError(f"transformers cannot load {source.folder} for --verify ({first}).") from None
    with torch.no_grad():
        ids_BT = torch.from_numpy(tokens_BT).long()
        theirs_BTV = model(ids_BT).logits.numpy()
        exact_BTV = _float64_logits(torch, model, ids_BT).numpy()
    compared = zip(tokens, ours_BTV, theirs_BTV, exact_BTV, strict=True)
    return "\n".join([*(_compare(*each) for each in compared), *lacking])


def _compare(name: str, ours_TV: np.ndarray, theirs_TV: np.ndarray, exact_TV: np.ndarray) -> str:
    largest = np.abs(theirs_TV).max()
    difference, rounding = (np.abs(logits_TV - theirs_TV).max() / largest for logits_TV in (ours_TV, exact_TV))
    allowed = min(_MOST_ROUNDINGS * max(rounding, _LEAST_ROUNDING), _MOST)
    sizes = f"{difference:.1e} of the largest, {largest:.3g}"
    if not difference <= allowed:  # NaN too
        raise ValueError(
            f"--verify: the logits of {len(ours_TV)} {name} differ from transformers by {sizes}. At most "
            f"{allowed:.1e} is allowed for these tokens, so the import is not the model of the folder."
        )
    return labelled(
        "verified",
        f"the logits of {len(ours_TV)} {name} differ from transformers by {sizes}, and transformers in fp32 from "
        f"float64 by {rounding:.1e}",
    )


def _tokens(weights: Weights) -> tuple[dict[str, np.ndarray], list[str]]:
    """Returns name -> int32[T] of tokens of equal number, and a line if there are none of a text."""
    num_ids = min(_NUM_IDS, weights.model.max_positions)
    tokens = {"random tokens": np.random.default_rng(0).integers(0, weights.model.vocab_size, num_ids, np.int32)}
    try:
        tokenizer = weights.open_tokenizer()
    except ValueError as error:
        return tokens, [labelled("not verified", f"the logits of a text: {error}")]
    first = [tokenizer.bos_id] * (weights.begins_with_bos and tokenizer.bos_id >= 0)
    tokens["tokens of a text"] = np.resize(np.concatenate([first, tokenizer.encode(_TEXT)]), num_ids).astype(np.int32)
    return tokens, []


def _float64_logits(torch: Any, model: Any, tokens_BT: Any) -> Any:
    """Returns the logits of a model of transformers in float64, with one module's weights in float64 at a time.

    Its norms, angles and softmax ask for float32 by name. They get float64, or they would repeat the rounding errors
    that are to be measured.
    """

    class Float64(torch.overrides.TorchFunctionMode):
        moves_weights = False

        def __torch_function__(self, func, types, args=(), kwargs=None):
            given = kwargs or {}
            if not self.moves_weights:
                func = torch.Tensor.double if func is torch.Tensor.float else func
                args = [torch.float64 if value is torch.float32 else value for value in args]
                given = {key: torch.float64 if value is torch.float32 else value for key, value in given.items()}
            return func(*args, **given)

    mode = Float64()

    def move(module: Any, dtype: Any) -> None:
        mode.moves_weights = True
        module.to(dtype)
        mode.moves_weights = False

    for module in model.modules():
        if any(True for _ in module.parameters(recurse=False)):
            module.register_forward_pre_hook(lambda module, _: move(module, torch.float64))
            module.register_forward_hook(lambda module, *_: move(module, torch.float32))
    with mode:
        return model(tokens_BT).logits
