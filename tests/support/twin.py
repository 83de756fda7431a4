"""A second implementation of the recipe, in plain PyTorch, written from the definitions: the trajectory oracle.

Its model is that of transformers. Owns nothing of hlat_jax and imports nothing of it. One microbatch after the other;
where PyTorch ships the definition itself (cross-entropy, AdamW) it is used as it stands.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import torch
from torch.nn import functional


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


def train(model: torch.nn.Module, batches: list[Batch], recipe: Recipe) -> np.ndarray:
    """Returns (loss, gradient norm before clipping, weight norm before the update, learning rate) of each step."""
    weights = list(model.parameters())
    decayed = [w for w in weights if recipe.decay == "all" or w.ndim >= 2]
    spared = [w for w in weights if recipe.decay != "all" and w.ndim < 2]
    groups = [{"params": decayed, "weight_decay": recipe.weight_decay}, {"params": spared, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=0.0, betas=(recipe.beta1, recipe.beta2), eps=recipe.eps
    )
    log = []
    for index, batch in enumerate(batches):
        optimizer.zero_grad()
        loss = accumulate_gradients(model, batch, recipe)
        grad_norm, param_norm = exact_norm([w.grad for w in weights]), exact_norm(weights)
        coefficient = min(1.0, recipe.clip_norm / (grad_norm + 1e-6)) if recipe.clip_norm else 1.0
        for weight in weights:
            weight.grad.mul_(coefficient)
        lr = learning_rate(index, recipe)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        log.append((loss, grad_norm, param_norm, lr))
    return np.array(log, np.float64)


def accumulate_gradients(model: torch.nn.Module, batch: Batch, recipe: Recipe) -> float:
    """Returns the loss of the whole batch; leaves its gradient in `.grad`. Microbatch m of M has rows m, m + M, ..."""
    total_weight = float(batch.weights.sum(dtype=np.float64))
    loss = 0.0
    for m in range(recipe.num_microbatches):
        rows = slice(m, None, recipe.num_microbatches)
        tokens, positions = (torch.tensor(field[rows]).long() for field in (batch.tokens, batch.positions))
        logits = model(tokens, position_ids=positions).logits.flatten(0, 1)
        targets, counted = torch.tensor(batch.targets[rows]).long().flatten(), torch.tensor(batch.weights[rows])
        losses = functional.cross_entropy(logits, targets, reduction="none")
        losses = losses + recipe.z_loss_weight * torch.logsumexp(logits, dim=-1) ** 2
        share = (losses * counted.flatten()).sum() / total_weight
        share.backward()
        loss += share.item()
    return loss


def learning_rate(index: int, recipe: Recipe) -> float:
    """Returns HLAT's rate of update `index`, from 0: linear from 0, then a cosine to zero clipped at the floor."""
    if index < recipe.warmup_steps:
        return recipe.peak_lr * index / recipe.warmup_steps
    done = (index - recipe.warmup_steps) / (recipe.horizon_steps - recipe.warmup_steps)
    return recipe.peak_lr * max(recipe.min_lr_ratio, 0.5 * (1 + math.cos(math.pi * done)))


def exact_norm(tensors: list[torch.Tensor]) -> float:
    """Returns the L2 norm over all elements, summed in fp64: fp32 `vector_norm` on CPU is off by up to 1.4e-3."""
    return math.sqrt(sum(t.detach().double().square().sum().item() for t in tensors))
