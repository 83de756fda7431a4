"""The model against transformers' LlamaForCausalLM: random weights, fp32, 1,024 tokens, logits and gradients.

Tolerances: 1e-4 absolute on logits of size 1 to 5 and 1e-4 relative on each gradient. Both sides round to 24 bits, sum
in different orders, and Hugging Face computes its rotary frequencies in fp32 (half a unit in the last place, times
1,023 positions): measured 4e-5 on logits and 4e-6 on gradients. Two norms exchanged, or a norm eps of 1e-6 for 1e-5,
move logits by 1e-2.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hf_cases import CASES, hugging_face, random_params
from hf_weights import hf_state_dict

from hlat_jax.config import ModelConfig
from hlat_jax.model import apply

TOKENS_BT = np.random.default_rng(7).integers(0, 384, (1, 1025), dtype=np.int32)
pytestmark = pytest.mark.usefixtures("one_torch_thread")


def logits_difference(cfg: ModelConfig, params: dict, model: torch.nn.Module) -> float:
    """Returns the largest absolute difference over 1,024 tokens between our logits under `cfg` and those of `model`."""
    tokens_BT = TOKENS_BT[:, :-1]
    ours = np.asarray(jax.jit(apply, static_argnums=1)(params, cfg, tokens_BT))
    with torch.no_grad():
        theirs = model(torch.from_numpy(tokens_BT).long()).logits.numpy()
    assert ours.dtype == np.float32
    assert 1 < np.abs(theirs).max() < 10
    return float(np.abs(ours - theirs).max())


@pytest.mark.quick_cases("llama3_scaled")
@pytest.mark.parametrize("cfg", CASES.values(), ids=CASES)
def test_logits_and_gradients_equal_hugging_face(cfg):
    params = random_params(cfg)
    model = hugging_face(params, cfg)
    assert logits_difference(cfg, params, model) <= 1e-4
    tokens, targets = torch.from_numpy(TOKENS_BT[:, :-1]).long(), torch.from_numpy(TOKENS_BT[:, 1:]).long()
    torch.nn.functional.cross_entropy(model(tokens).logits.flatten(0, 1), targets.flatten()).backward()

    def mean_cross_entropy(params):
        logprobs_BTV = jax.nn.log_softmax(apply(params, cfg, TOKENS_BT[:, :-1]))
        return -jnp.take_along_axis(logprobs_BTV, TOKENS_BT[:, 1:, None], axis=-1).mean()

    ours = hf_state_dict(jax.tree.map(np.asarray, jax.jit(jax.grad(mean_cross_entropy))(params)))
    theirs = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert ours.keys() == theirs.keys()
    deviations = {name: float((ours[name] - grad).norm() / grad.norm()) for name, grad in theirs.items()}
    assert max(deviations.values()) <= 1e-4, deviations
