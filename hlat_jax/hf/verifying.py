"""Comparison of imported weights with transformers: the logits of both for random tokens."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hlat_jax.host.optional_import import import_optional
from hlat_jax.model import apply
from hlat_jax.weights.hf_reading import HFCheckpoint
from hlat_jax.weights.trained import Weights

# Of the largest logit. Sums of fp32 in another order differ by 1e-6 to 1e-5; another computation by far more.
BOUND = 1e-3
_NUM_IDS = 128


def require_transformers() -> Any:
    """Returns (torch, transformers); raises ValueError if one of them cannot be imported."""
    needs = "--verify needs {}: pip install 'hlat_jax[verify]', or leave it out."
    return tuple(import_optional(name, missing=needs.format(name)) for name in ("torch", "transformers"))


def verify(source: HFCheckpoint, weights: Weights) -> str:
    """Returns a line with the largest difference between the logits, relative to the largest logit.

    Both models compute in fp32 with the weights rounded to the dtype of the import. One model at a time is in memory.

    Args:
      source: the source, for transformers.
      weights: what was imported from it.

    Raises:
      ValueError: the difference is above `BOUND`, transformers cannot load the source, or is not installed.
    """
    torch, transformers = require_transformers()
    num_ids = min(_NUM_IDS, weights.model.max_positions)
    tokens_BT = np.random.default_rng(0).integers(0, weights.model.vocab_size, (1, num_ids), np.int32)
    params = weights.restore(None, dtype=jnp.float32)
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
        raise ValueError(f"--verify: transformers cannot load {source.folder}: {first}.") from None
    with torch.no_grad():
        theirs_BTV = model(torch.from_numpy(tokens_BT).long()).logits.numpy()
    largest = np.abs(theirs_BTV).max()
    difference = np.abs(ours_BTV - theirs_BTV).max() / largest
    relative = f"{difference:.1e} of the largest logit, {largest:.3g}"
    if not difference <= BOUND:  # NaN too
        raise ValueError(
            f"--verify: the logits of {num_ids} tokens differ from those of transformers by {relative}; at most "
            f"{BOUND:.0e} is allowed, so the import is not the model of the folder."
        )
    return f"verified         the logits of {num_ids} tokens differ from those of transformers by at most {relative}"
