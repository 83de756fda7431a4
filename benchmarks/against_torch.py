"""The models of `benchmarks/against.py` in PyTorch, with the same weights: peak bytes, FLOPs, and steps to time.

Attention is `scaled_dot_product_attention`, as PyTorch's users write it, which keeps no probabilities.
"""

import contextlib
import unittest.mock

import jax
import numpy as np
import torch
import torch._functorch.config
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.select_algorithm import extern_kernels
from torch.nn import functional as F
from torch.utils import flop_counter
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
# name -> activation memory budget, None without torch.compile; 1.0 is the default
CONTENDERS = {"PyTorch eager": None, "torch.compile": 1.0, "torch.compile, budget 0.5": 0.5}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
for suffix in ("", "_backward"):  # torch 2.13 does not count the kernel for CPUs
    formula = flop_counter.flop_registry[getattr(aten, f"_scaled_dot_product_flash_attention{suffix}")]
    flop_counter.flop_registry.setdefault(
        getattr(aten, f"_scaled_dot_product_flash_attention_for_cpu{suffix}"), formula
    )


def norm(scale, x):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * scale


def layer_norm(scale, x):
    return norm(scale, x - x.mean(-1, keepdim=True))


def rotated(x_BTNH):
    angles = torch.arange(x_BTNH.shape[1])[:, None] * 1e4 ** -torch.linspace(0, 1, x_BTNH.shape[3] // 2)
    sin, cos = (fn(angles)[:, None].to(x_BTNH.device) for fn in (torch.sin, torch.cos))
    left, right = x_BTNH.chunk(2, -1)
    return torch.cat([left * cos - right * sin, left * sin + right * cos], -1)


def block(p, x_BTD, *, heads, name):
    is_llama, is_causal = name.startswith("llama"), name.startswith(("llama", "gpt"))
    normalize = norm if is_llama else layer_norm
    q, k, v = (normalize(p["norm1"], x_BTD) @ p["qkv"]).unflatten(-1, (3, heads, -1)).unbind(2)
    if is_llama:
        q, k = rotated(q), rotated(k)
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    mixed_BNTH = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    x_BTD = x_BTD + mixed_BNTH.transpose(1, 2).flatten(2) @ p["out"]
    hidden = normalize(p["norm2"], x_BTD)
    up = hidden @ p["up"]
    return x_BTD + (F.silu(hidden @ p["gate"]) * up if is_llama else F.gelu(up, approximate="tanh")) @ p["down"]


def transformer_loss(params, batch, *, heads, name):
    inputs, targets = batch
    x_BTD = (inputs @ params["patches"] if name.startswith("vit") else params["tokens"][inputs]) + params["positions"]
    for p in params["layers"]:
        x_BTD = block(p, x_BTD, heads=heads, name=name)
    if name.startswith("vit"):
        x_BTD = x_BTD.mean(1)
    logits = layer_norm(params["norm"], x_BTD) @ params["head"]
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def unet_loss(params, batch):
    """Returns the loss of the U-Net in `tests/passes/foreign/equinox_styles.py`."""

    def convolutions(p, x):
        for layer, (scale, shift) in zip(("first", "second"), p["norms"], strict=True):
            x = F.silu(F.group_norm(F.conv2d(x, *p[layer], padding=1), 4, scale, shift))
        return x

    x, skipped = batch["noisy"], []
    for p in params["down"]:
        x = convolutions(p, x)
        skipped.append(x)
        x = F.max_pool2d(x, 2)
    x = convolutions(params["bottom"], x)
    for widen, p in zip(params["widen"], params["up"], strict=True):
        x = convolutions(p, torch.cat([skipped.pop(), F.conv_transpose2d(x, *widen, stride=2)], 1))
    return F.mse_loss(F.conv2d(x, *params["last"]), batch["clean"])


def transformer_params(params):
    """Returns the parameters of JAX with a dict for each layer, in which stacked arrays are cut."""
    layers = params["layers"]
    count = len(layers["norm1"])
    return as_torch(params | {"layers": [{key: x[i] for key, x in layers.items()} for i in range(count)]}, True)


def unet_params(model):
    def layer(p):
        return [p.weight, p.bias.reshape(-1)]

    def wider(p):  # Equinox has [out, in] and the kernel as it is read, PyTorch [in, out] and its mirror image
        return [p.weight.transpose(1, 0, 2, 3)[:, :, ::-1, ::-1], p.bias.reshape(-1)]

    def convolutions(p):
        return {"first": layer(p.first), "second": layer(p.second), "norms": [layer(norm) for norm in p.norms]}

    parts = {"down": [*map(convolutions, model.down)], "bottom": convolutions(model.bottom)}
    parts |= {"widen": [*map(wider, model.widen)], "up": [*map(convolutions, model.up)], "last": layer(model.last)}
    return as_torch(parts, True)


def as_torch(tree, is_trained=False):
    """Returns a tree of NumPy's or JAX's arrays as one of tensors."""

    def tensor(x):
        copied = torch.tensor(np.ascontiguousarray(x), device=DEVICE)
        return copied.requires_grad_(is_trained) if copied.is_floating_point() else copied.long()

    return jax.tree.map(tensor, tree)


class Contender:
    """The step of a loss, its value and gradients: under `torch.compile` with this budget, or eager if it is None.

    The first batch must be the largest. Dims in front of a batch are dynamic, so that another size compiles nothing.
    """

    def __init__(self, loss, params, budget):
        self._params, self._leaves = params, jax.tree.leaves(params)
        self._graph_flops, self._budget = [], budget
        self._loss = loss if budget is None else torch.compile(lambda *args: loss(*args), backend=self._compiled)
        torch._dynamo.reset()

    def _compiled(self, graph, inputs):
        def counted(part, examples, **options):
            self._graph_flops.append(sum(map(node_flops, part.graph.nodes)))
            return compile_fx_inner(part, examples, **options)

        return compile_fx(graph, inputs, inner_compile=counted)

    def __call__(self, batch):
        """Returns (loss, gradients)."""
        for leaf in jax.tree.leaves(batch):
            if self._budget is not None:
                torch._dynamo.mark_dynamic(leaf, 0)
        # graphs from the cache would not be counted
        chosen = {"activation_memory_budget": self._budget or 1.0, "enable_autograd_cache": False}
        with torch._functorch.config.patch(chosen):
            value = self._loss(self._params, batch)
            return value, torch.autograd.grad(value, self._leaves)

    def peak_bytes(self, batch):
        """Returns the most bytes of a step above parameters and batch. On a CPU large products are not computed."""
        if DEVICE == "cuda":
            self(batch)
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            self(batch)
            return torch.cuda.max_memory_allocated() - before
        with products_not_computed(is_eager=self._budget is None):
            if self._budget is not None:
                self(batch)  # compiles
            with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
                self(batch)
        events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
        held = np.cumsum([event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())])
        return int(held.max())

    def flops(self, batch):
        """Returns the FLOPs of products and convolutions, of the compiled graphs if there are any."""
        if self._budget is not None:
            return sum(self._graph_flops)
        with products_not_computed(is_eager=True), flop_counter.FlopCounterMode(display=False) as counter:
            self(batch)
        return counter.get_total_flops()


def node_flops(node):
    """Returns the FLOPs of a node of a graph; sizes that are dynamic count as in the batch that was compiled."""
    packet = getattr(node.target, "overloadpacket", None)
    if packet not in flop_counter.flop_registry:
        return 0
    args, kwargs = jax.tree.map(
        lambda x: x.meta["val"] if isinstance(x, torch.fx.Node) else x,
        (list(node.args), dict(node.kwargs)),
    )
    flops = flop_counter.flop_registry[packet](*args, **kwargs, out_val=node.meta["val"])
    return flops.node.hint if isinstance(flops, torch.SymInt) else flops


class _EmptyProducts(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (aten.mm.default, aten.bmm.default):
            return args[0].new_empty((*args[0].shape[:-1], args[1].shape[-1]))
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def products_not_computed(*, is_eager):
    """Leaves out the work of matrix products on a CPU, but not their allocations, so that a large model takes seconds.

    Compiled code writes products into buffers that it allocates itself.
    """
    with contextlib.ExitStack() as stack:
        if is_eager and DEVICE == "cpu":
            stack.enter_context(_EmptyProducts())
        for name in ("mm", "bmm", "addmm", "baddbmm") if DEVICE == "cpu" else ():
            stack.enter_context(unittest.mock.patch.object(extern_kernels, name, lambda *args, out, **kwargs: out))
        yield
