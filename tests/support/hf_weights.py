"""Our parameter tree as a state dict of Hugging Face's LlamaForCausalLM, for tests. Written apart from `hlat_jax.hf`.

The map is linear (slices and transposes), so that it serves gradients as well as weights.
"""

from __future__ import annotations

import numpy as np
import torch
import transformers


def hf_state_dict(params: dict) -> dict[str, torch.Tensor]:
    """Returns name -> tensor under Hugging Face's names, from nested dicts of arrays; no `lm_head` when tied."""
    stacked = params["layers"]
    arrays = {"model.embed_tokens.weight": params["embed"], "model.norm.weight": params["final_norm"]["scale"]}
    if "head" in params:
        arrays["lm_head.weight"] = params["head"]
    attention, mlp = stacked["attention"], stacked["mlp"]
    for i in range(stacked["attention_norm"]["scale"].shape[0]):
        if "qkv" in attention:  # [D, K, G + 2, H]: G queries, key, value of each kv head
            q_DKGH, k_DKH, v_DKH = np.split(attention["qkv"][i], (-2, -1), axis=2)
        else:  # [D, K, G, H] and [D, 2, K, H]
            q_DKGH, (k_DKH, v_DKH) = attention["q"][i], np.moveaxis(np.asarray(attention["kv"][i]), 1, 0)
        embed_dim = q_DKGH.shape[0]
        of_layer = {
            "input_layernorm": stacked["attention_norm"]["scale"][i],
            "self_attn.q_proj": np.reshape(q_DKGH, (embed_dim, -1)).T,
            "self_attn.k_proj": np.reshape(k_DKH, (embed_dim, -1)).T,
            "self_attn.v_proj": np.reshape(v_DKH, (embed_dim, -1)).T,
            "self_attn.o_proj": np.reshape(attention["out"][i], (-1, embed_dim)).T,
            "post_attention_layernorm": stacked["mlp_norm"]["scale"][i],
            "mlp.gate_proj": mlp["gate_up"][i, :, 0].T,
            "mlp.up_proj": mlp["gate_up"][i, :, 1].T,
            "mlp.down_proj": mlp["down"][i].T,
        }
        arrays |= {f"model.layers.{i}.{name}.weight": value for name, value in of_layer.items()}
    return {name: torch.from_numpy(np.array(value, np.float32)) for name, value in arrays.items()}


def hf_model(params: dict, **overrides) -> transformers.LlamaForCausalLM:
    """Returns the Hugging Face model that holds `params`. `overrides` are LlamaConfig's: heads, eps, RoPE, tying."""
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**overrides)).eval()
    state = hf_state_dict(params)
    if overrides.get("tie_word_embeddings"):
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, strict=True)
    return model
