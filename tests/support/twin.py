"""A second implementation of model and recipe, in plain PyTorch, written from the definitions: the trajectory oracle.

Owns nothing of hlat_jax and imports nothing of it: it takes our parameter arrays as NumPy, splits them itself into
the separate projections of a textbook Llama, and runs the recipe on those. Everything is computed in one dtype (fp32,
or fp64 for asking which side of a difference is right), one head and one microbatch after the other where that reads
more plainly. Where PyTorch ships the definition itself (softmax, cross-entropy, AdamW) it is used as it stands.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import torch
from torch.nn import functional


@dataclasses.dataclass(frozen=True)
class Model:
    """A Llama decoder. `rope_llama3` is (factor, low_freq_factor, high_freq_factor, original_positions) or None."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    rope_llama3: tuple[float, float, float, float] | None = None


@dataclasses.dataclass(frozen=True)
class Recipe:
    """AdamW, clip, schedule, accumulation and loss. `decay` is 'all' or 'matrices'."""

    peak_lr: float
    min_lr_ratio: float
    warmup_steps: int
    horizon_steps: int
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decay: str
    clip_norm: float
    num_microbatches: int
    z_loss_weight: float


@dataclasses.dataclass(frozen=True)
class Batch:
    """NumPy arrays [B, T]: token ids, the ids that should follow, positions, and how much each target counts."""

    tokens: np.ndarray
    targets: np.ndarray
    positions: np.ndarray
    weights: np.ndarray


def train(params: dict, batches: list[Batch], *, model: Model, recipe: Recipe, dtype=torch.float32) -> np.ndarray:
    """Returns (loss, gradient norm before clipping, weight norm before the update, learning rate) of each step."""
    weights = split(params, model, dtype)
    decayed = [w for w in weights.values() if recipe.decay == "all" or w.ndim >= 2]
    spared = [w for w in weights.values() if recipe.decay != "all" and w.ndim < 2]
    groups = [{"params": decayed, "weight_decay": recipe.weight_decay}, {"params": spared, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=0.0, betas=(recipe.beta1, recipe.beta2), eps=recipe.eps
    )
    log = []
    for index, batch in enumerate(batches):
        optimizer.zero_grad()
        loss = accumulate_gradients(weights, batch, model, recipe)
        grad_norm = exact_norm([w.grad for w in weights.values()])
        param_norm = exact_norm(list(weights.values()))
        coefficient = min(1.0, recipe.clip_norm / (grad_norm + 1e-6)) if recipe.clip_norm else 1.0
        for weight in weights.values():
            weight.grad.mul_(coefficient)
        lr = learning_rate(index, recipe)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        log.append((loss, grad_norm, param_norm, lr))
    return np.array(log, np.float64)


def accumulate_gradients(weights: dict[str, torch.Tensor], batch: Batch, model: Model, recipe: Recipe) -> float:
    """Returns the loss of the whole batch; leaves its gradient in `.grad`. Microbatch m of M has rows m, m + M, ..."""
    total_weight = float(batch.weights.sum(dtype=np.float64))
    loss = 0.0
    for m in range(recipe.num_microbatches):
        rows = slice(m, None, recipe.num_microbatches)
        logits = decoder(weights, torch.tensor(batch.tokens[rows]), torch.tensor(batch.positions[rows]), model)
        targets, counted = torch.tensor(batch.targets[rows]).long(), torch.tensor(batch.weights[rows])
        share = weighted_loss(logits, targets, counted, recipe.z_loss_weight) / total_weight
        share.backward()
        loss += share.item()
    return loss


def weighted_loss(
    logits: torch.Tensor, targets: torch.Tensor, counted: torch.Tensor, z_loss_weight: float
) -> torch.Tensor:
    """Returns the sum over targets of weight * (cross-entropy + z_loss_weight * log_normaliser ** 2)."""
    losses = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    losses = losses + z_loss_weight * torch.logsumexp(logits, dim=-1).flatten() ** 2
    return (losses * counted.flatten()).sum()


def learning_rate(index: int, recipe: Recipe) -> float:
    """Returns HLAT's rate of update `index`, from 0: linear from 0, then a cosine to zero clipped at the floor."""
    if index < recipe.warmup_steps:
        return recipe.peak_lr * index / recipe.warmup_steps
    done = (index - recipe.warmup_steps) / (recipe.horizon_steps - recipe.warmup_steps)
    return recipe.peak_lr * max(recipe.min_lr_ratio, 0.5 * (1 + math.cos(math.pi * done)))


def exact_norm(tensors: list[torch.Tensor]) -> float:
    """Returns the L2 norm over all elements, summed in fp64: fp32 `vector_norm` on CPU is off by up to 1.4e-3."""
    return math.sqrt(sum(t.detach().double().square().sum().item() for t in tensors))


def split(params: dict, model: Model, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Returns leaf tensors of separate projections, each [out, in] as in `torch.nn.Linear`, from our fused arrays."""
    embed_dim = params["embed"].shape[1]
    arrays = {"embed": params["embed"], "final_norm": params["final_norm"]["scale"]}
    if "head" in params:
        arrays["head"] = params["head"]
    stacked = params["layers"]
    for i in range(stacked["attention_norm"]["scale"].shape[0]):
        arrays[f"{i}.attention_norm"] = stacked["attention_norm"]["scale"][i]
        q, k, v = split_attention({name: a[i] for name, a in stacked["attention"].items()}, model)
        arrays |= {f"{i}.q": q, f"{i}.k": k, f"{i}.v": v}
        arrays[f"{i}.out"] = stacked["attention"]["out"][i].reshape(model.num_heads * model.head_dim, embed_dim).T
        arrays[f"{i}.mlp_norm"] = stacked["mlp_norm"]["scale"][i]
        arrays[f"{i}.gate"] = stacked["mlp"]["gate_up"][i, :, 0].T
        arrays[f"{i}.up"] = stacked["mlp"]["gate_up"][i, :, 1].T
        arrays[f"{i}.down"] = stacked["mlp"]["down"][i].T
    return {name: torch.tensor(np.array(a), dtype=dtype, requires_grad=True) for name, a in arrays.items()}


def split_attention(layer: dict, model: Model) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns Q [N H, D], K and V [K H, D] from qkv [D, K, G + 2, H], or from q [D, K, G, H] and kv [D, 2, K, H]."""
    group = model.num_heads // model.num_kv_heads
    queries, keys, values = [], [], []
    for kv in range(model.num_kv_heads):
        if "qkv" in layer:
            of_group = [layer["qkv"][:, kv, j].T for j in range(group + 2)]
            key, value = of_group[group], of_group[group + 1]
        else:
            of_group = [layer["q"][:, kv, j].T for j in range(group)]
            key, value = layer["kv"][:, 0, kv].T, layer["kv"][:, 1, kv].T
        queries += of_group[:group]
        keys.append(key)
        values.append(value)
    return np.concatenate(queries), np.concatenate(keys), np.concatenate(values)


def decoder(
    weights: dict[str, torch.Tensor], tokens: torch.Tensor, positions: torch.Tensor, model: Model
) -> torch.Tensor:
    """Returns logits [B, T, V]."""
    x = weights["embed"][tokens.long()]
    angles = positions[:, :, None].to(x.dtype) * rope_frequencies(model).to(x.dtype)
    num_layers = sum(name.endswith(".q") for name in weights)
    for i in range(num_layers):
        layer = {name.split(".")[1]: w for name, w in weights.items() if name.startswith(f"{i}.")}
        x = x + attention(rms_norm(x, layer["attention_norm"], model.norm_eps), layer, angles, model)
        normed = rms_norm(x, layer["mlp_norm"], model.norm_eps)
        gate, up = normed @ layer["gate"].T, normed @ layer["up"].T
        x = x + (gate * torch.sigmoid(gate) * up) @ layer["down"].T
    head = weights.get("head", weights["embed"])
    return rms_norm(x, weights["final_norm"], model.norm_eps) @ head.T


def rms_norm(x: torch.Tensor, scale: torch.Tensor, eps: float) -> torch.Tensor:
    """Returns x / sqrt(mean(x^2) + eps) * scale over the last dim."""
    return x / torch.sqrt(x.square().mean(dim=-1, keepdim=True) + eps) * scale


def attention(x: torch.Tensor, layer: dict[str, torch.Tensor], angles: torch.Tensor, model: Model) -> torch.Tensor:
    """Returns causal grouped-query attention of x [B, T, D], head by head; query head n reads kv head n // G."""
    h = model.head_dim
    q, k, v = x @ layer["q"].T, x @ layer["k"].T, x @ layer["v"].T
    seq_len = x.shape[1]
    future = torch.ones(seq_len, seq_len, dtype=torch.bool).triu(diagonal=1)
    outs = []
    for n in range(model.num_heads):
        kv = n // (model.num_heads // model.num_kv_heads)
        q_head = rotate(q[:, :, n * h : (n + 1) * h], angles)
        k_head = rotate(k[:, :, kv * h : (kv + 1) * h], angles)
        scores = (q_head @ k_head.transpose(1, 2) / math.sqrt(h)).masked_fill(future, -math.inf)
        outs.append(torch.softmax(scores, dim=-1) @ v[:, :, kv * h : (kv + 1) * h])
    return torch.cat(outs, dim=-1) @ layer["out"].T


def rotate(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Returns x [B, T, H] with the pair (x[i], x[i + H/2]) turned by angles[..., i], seen as a complex number."""
    half = x.shape[-1] // 2
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], dim=-1)


def rope_frequencies(model: Model) -> torch.Tensor:
    """Returns fp64 [H/2] radians per position, with Llama 3's stretching of long wavelengths where asked."""
    frequencies = []
    for i in range(model.head_dim // 2):
        frequency = model.rope_theta ** (-2 * i / model.head_dim)
        if model.rope_llama3 is not None:
            factor, low, high, original_positions = model.rope_llama3
            turns = original_positions * frequency / (2 * math.pi)  # over the original context
            if turns < low:
                frequency = frequency / factor
            elif turns < high:
                smooth = (turns - low) / (high - low)
                frequency = (1 - smooth) * frequency / factor + smooth * frequency
        frequencies.append(frequency)
    return torch.tensor(frequencies, dtype=torch.float64)
