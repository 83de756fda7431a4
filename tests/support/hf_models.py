"""Tiny models made and saved by transformers, with weights that make every part matter."""

import math
import pathlib
import random

import torch
import transformers

SMALL = {
    "vocab_size": 384,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,  # 1,024 tokens see kept, interpolated and stretched wavelengths
}
CONFIGS = {
    "mha": transformers.LlamaConfig(**SMALL | {"num_key_value_heads": 6}),
    "gqa": transformers.LlamaConfig(**SMALL, rope_parameters={"rope_type": "default", "rope_theta": 50_000.0}),
    "tied": transformers.LlamaConfig(**SMALL, tie_word_embeddings=True),
    "llama3": transformers.LlamaConfig(**SMALL, rope_parameters=LLAMA3_ROPE),
    "mistral": transformers.MistralConfig(**SMALL, sliding_window=None, head_dim=24),  # not hidden_size / heads
}


ROPES = (
    {"rope_type": "default", "rope_theta": 50_000.0},
    {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 3.0},
    {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64},
)
WINDOW = 24
_ON = {"use_sliding_window": True, "sliding_window": WINDOW}
_QWEN_WINDOWS = (
    {},
    _ON | {"max_window_layers": 1},
    _ON | {"max_window_layers": 0},
    _ON | {"layer_types": ["sliding_attention", "full_attention"]},
)


def family(kind: str, seed: int):
    """Returns a random small config of a family, such as "llama" or "qwen2"; six seeds have every option of it."""
    rng, heads = random.Random(f"{kind} {seed}"), 8
    windows = {"llama": {}, "mistral": {"sliding_window": (WINDOW, None)[seed // 2 % 2]}}
    window = windows.get(kind, _QWEN_WINDOWS[seed % 4])
    biases = {"attention_bias": seed % 4 in (1, 2)} if kind in ("llama", "qwen3") else {}
    return transformers.AutoConfig.for_model(
        kind,
        vocab_size=rng.choice((200, 384)),
        hidden_size=64,
        intermediate_size=rng.choice((96, 160)),
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=heads // (1, 4, 8)[seed % 3],
        head_dim=(8, 16, 12)[seed % 3 - seed // 3],  # 8 x 8 is hidden_size
        tie_word_embeddings=bool(seed % 2),
        max_position_embeddings=256,
        rms_norm_eps=rng.choice((1e-5, 1e-6)),
        rope_parameters=dict(ROPES[(seed + seed // 3) % 3]),
        **window,
        **biases,
    )


def model(config, *, seed: int = 0) -> torch.nn.Module:
    """Returns a model whose activations and scores are of size 1 and whose norms are not 1."""
    made = transformers.AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            std = 0.1 if "embed_tokens" in name or "lm_head" in name else 1 / math.sqrt(config.hidden_size)
            std = 0.5 if name.endswith("bias") else std
            parameter.copy_(1 + 0.2 * drawn if "norm" in name else std * drawn)
    return made


def save(made: torch.nn.Module, folder: pathlib.Path, *, dtype=torch.float32, **options) -> pathlib.Path:
    """Writes a model as transformers does and returns the folder; the model has `dtype` from then on."""
    made.to(dtype).save_pretrained(folder, **options)
    return folder
