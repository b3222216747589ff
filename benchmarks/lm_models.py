"""Build the small Llama of `lm_accuracy.py`, dense or with smaller layers, so that a CUDA graph can hold a whole step.

The decoder computes what `LlamaForCausalLM` of transformers computes, with the same parameter names. Its forward pass
reads no value on the host, casts no activation twice, and keeps the residual stream in the dtype of the products. The
elementwise parts are separate functions (`Ops`), so that `fused_ops` compiles four small functions once for all models
instead of every model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, replace
from functools import cache
from typing import Any

import torch
from formats import replace_linears
from torch import Tensor, nn
from torch.nn import functional as F

import scantling as sc
from scantling.tensor.layer import TTLayer

HEADS = 4
EPS = 1e-6
INIT_STD = 0.02


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder; embedding and output layer share their weight."""

    vocabulary: int = 8192
    width: int = 256
    intermediate: int = 768
    layers: int = 4
    length: int = 256

    @property
    def layer_parameters(self) -> int:
        """Parameters of all linear layers of the blocks."""
        return self.layers * (4 * self.width + 3 * self.intermediate) * self.width

    @property
    def num_parameters(self) -> int:
        return self.layer_parameters + (self.vocabulary + 2 * self.layers + 1) * self.width


def narrower(shape: Shape, num_parameters: int) -> Shape:
    """Return the shape with a smaller width whose dense model has about this number of parameters in all.

    The intermediate size is about three times the width. Both are multiples of 8, which fast products need.
    """

    def fit(width: int) -> Shape:
        fixed = replace(shape, width=width, intermediate=0)
        rest = (num_parameters - fixed.num_parameters) / (3 * shape.layers * width)
        return replace(fixed, intermediate=max(8, 8 * round(rest / 8)))

    return min(map(fit, range(8, shape.width, 8)), key=lambda one: abs(one.intermediate - 3 * one.width))


def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return x + delta, and its RMS norm, both in the dtype of x."""
    x = x if delta is None else x + delta
    wide = x.float()
    return x, (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * weight).to(x.dtype)


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return queries and keys, (batch, heads, length, size), with rotary positions."""

    def one(x: Tensor) -> Tensor:
        wide = x.float()
        first, second = wide.chunk(2, dim=-1)
        return (wide * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)

    return one(q), one(k)


def gate(a: Tensor, b: Tensor) -> Tensor:
    return F.silu(a) * b


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy in fp32; logits are (tokens, vocabulary)."""
    return F.cross_entropy(logits.float(), targets)


@dataclass(frozen=True)
class Ops:
    """Elementwise parts of the decoder."""

    add_norm: Callable[..., tuple[Tensor, Tensor]] = add_norm
    rotate: Callable[..., tuple[Tensor, Tensor]] = rotate
    gate: Callable[..., Tensor] = gate
    token_loss: Callable[..., Tensor] = token_loss


@cache
def fused_ops() -> Ops:
    """Return the parts compiled, for the first width with its sizes and for all others without.

    A part that cannot be compiled runs as it is, with a warning.
    """
    torch._dynamo.config.suppress_errors = True
    return Ops(*map(torch.compile, astuple(Ops())))


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            self.add_module(name, nn.Linear(shape.width, shape.width, bias=False))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, ops: Ops) -> Tensor:
        q, k, v = (
            proj(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = ops.rotate(q, k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (batch, heads, length, size)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.width, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.width, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.width, bias=False)

    def forward(self, x: Tensor, ops: Ops) -> Tensor:
        return self.down_proj(ops.gate(self.gate_proj(x), self.up_proj(x)))


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.width)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.width)
        self.mlp = FeedForward(shape)


class Decoder(nn.Module):
    """Llama with tied embeddings.

    Args:
        shape: sizes.
        dtype: dtype of activations.

    Attributes:
        ops: elementwise parts; `fused_ops()` on a GPU.
    """

    def __init__(self, shape: Shape, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.dtype, self.ops = dtype, Ops()
        # names as in transformers: model.embed_tokens, model.layers.0, model.norm
        self.model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(shape.vocabulary, shape.width),
                "layers": nn.ModuleList(Block(shape) for _ in range(shape.layers)),
                "norm": nn.RMSNorm(shape.width),
            }
        )
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=INIT_STD)
            if isinstance(module, nn.Linear):  # PyTorch's default; 0.02 is too small for a width below 1,000
                nn.init.normal_(module.weight, std=(3 * module.in_features) ** -0.5)
        size = shape.width // HEADS
        angles = torch.arange(shape.length)[:, None] / 10000.0 ** (torch.arange(0, size, 2) / size)
        angles = torch.cat([angles, angles], dim=1)  # (length, size)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def logits(self, ids: Tensor) -> Tensor:
        """Return the logits of the next token, (tokens, vocabulary)."""
        # `view`: the compiler fixes the sizes of parameters, and would compile again for every width
        table, ops = self.model["embed_tokens"], self.ops
        x, delta = table(ids).to(self.dtype), None
        for block in self.model["layers"]:
            # the first norm adds nothing; compiling another function for it would take longer than it saves
            norm = add_norm if delta is None else ops.add_norm
            x, normed = norm(x, delta, block.input_layernorm.weight.view(-1))
            delta = block.self_attn(normed, self.cos, self.sin, ops)
            x, normed = ops.add_norm(x, delta, block.post_attention_layernorm.weight.view(-1))
            delta = block.mlp(normed, ops)
        _, normed = ops.add_norm(x, delta, self.model["norm"].weight.view(-1))
        return F.linear(normed.flatten(0, 1), table.weight)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the mean loss of windows of length + 1 tokens; every token but the first is predicted."""
        return self.ops.token_loss(self.logits(ids[:, :-1]), ids[:, 1:].reshape(-1))


@dataclass(frozen=True)
class Form:
    """Weight format of the linear layers, and how they are trained.

    Attributes:
        layers: `dense`, `narrow` (dense, with as many parameters in all as the TT model), or a format of `formats.py`.
        gates: True to train a gate for each rank, which is folded into the cores at the end.
        projected: True for GaLore.
        gain: False to keep the gain of TT layers at 1.
    """

    layers: str
    gates: bool = False
    projected: bool = False
    gain: bool = True


FORMS = {
    "dense": Form("dense"),
    "tt gates": Form("tt", gates=True),
    "low rank": Form("low rank"),
    "cola": Form("cola"),
    "dense narrow": Form("narrow"),
    "tt": Form("tt"),
    "tt without gain": Form("tt", gain=False),
    "tt silu": Form("tt silu"),
    "tt silu gates": Form("tt silu", gates=True),
    "low rank gates": Form("low rank", gates=True),
    "cola gates": Form("cola", gates=True),
    "galore": Form("dense", projected=True),
}


@cache
def tt_parameters(shape: Shape, fewer: float) -> int:
    """Return the number of parameters of the TT model with this many times fewer parameters in its layers."""
    with torch.random.fork_rng(devices=[]):
        return count_parameters(replace_linears(Decoder(shape), "tt", 1.0 / fewer))["num_parameters"]


def build_model(form: Form, shape: Shape, fewer: float, dtype: torch.dtype) -> tuple[Decoder, sc.RankAdapter | None]:
    """Return a model on the CPU, and the adapter that attached its gates.

    Args:
        form: format of the layers.
        shape: shape of the dense model.
        fewer: how many times fewer parameters the layers have than dense ones.
        dtype: dtype of activations.
    """
    if form.layers in ("dense", "narrow"):
        own = shape if form.layers == "dense" else narrower(shape, tt_parameters(shape, fewer))
        return Decoder(own, dtype), None
    model = Decoder(shape, dtype)
    replace_linears(model, form.layers, 1.0 / fewer)
    for module in model.modules():
        if isinstance(module, TTLayer):
            module.log_gain.requires_grad_(form.gain)
    # a size target of 1 prunes nothing: the adapter only attaches the gates
    return model, sc.RankAdapter(model, size_target=1.0) if form.gates else None


def count_parameters(model: Decoder) -> dict[str, int]:
    """Return the parameters in the linear layers of the blocks, and in all; gates, which are folded, do not count."""
    layers = sum(
        module.num_parameters() if isinstance(module, TTLayer) else module.weight.numel()
        for module in model.model["layers"].modules()
        if isinstance(module, TTLayer | nn.Linear)
    )
    gates = sum(gate.numel() for module in model.modules() for gate in getattr(module, "rank_gates", None) or ())
    return {"layer_parameters": layers, "num_parameters": sum(p.numel() for p in model.parameters()) - gates}


def step_flops(model: Decoder, num_tokens: int, length: int) -> float:
    """Return the floating-point operations of the products in a training step, three times those of a forward pass."""
    width = model.model["embed_tokens"].embedding_dim
    macs = num_tokens * width * model.model["embed_tokens"].num_embeddings
    for module in model.model["layers"].modules():
        if isinstance(module, TTLayer):
            macs += module.plan(num_tokens).macs
        elif isinstance(module, nn.Linear):
            macs += num_tokens * module.weight.numel()
    # scores and values, half of them masked
    macs += len(model.model["layers"]) * num_tokens * length * width
    return 6.0 * macs


def build_groups(model: nn.Module, rates: Mapping[str, float]) -> list[dict[str, Any]]:
    """Return parameter groups with their peak rates.

    Args:
        model: the model.
        rates: `layers` for matrices and cores, `gates`, and `rest` for embeddings and norms.
    """
    groups = sc.param_groups(model, control_lr=rates["gates"])
    gains = [pair for group in groups for pair in group["params"] if pair[0].endswith("log_gain")]
    for group in groups:
        group["params"] = [pair for pair in group["params"] if not pair[0].endswith("log_gain")]
        group.setdefault("lr", rates["layers" if group["role"] == "matrix" else "rest"])
    if gains:
        groups.append({"params": gains, "lr": rates["layers"], "weight_decay": 0.0, "role": "vector"})
    return [group for group in groups if group["params"]]


class Projections:
    """GaLore: AdamW steps the projections of the gradients of matrices on their leading singular vectors.

    Each matrix has a small parameter that is 0 before each step and holds AdamW's step after it; the matrix moves by
    its expansion. Every `GAP` steps, the singular vectors are computed again, from the last gradient. The original
    takes them from the gradient of the current step; moments are kept in both.

    Args:
        matrices: the projected parameters.
        rank: rank of the projections.

    Attributes:
        small: the parameters to give to AdamW.

    Source: GaLore, arXiv 2403.03507, algorithm 2, with the authors' scale of 0.25.
    """

    GAP, SCALE = 200, 0.25

    def __init__(self, matrices: list[nn.Parameter], rank: int) -> None:
        self._matrices, self.small, self._bases = matrices, [], []
        for matrix in matrices:
            rows, cols = matrix.shape
            own = min(rank, rows, cols)
            self._bases.append(matrix.new_zeros(min(rows, cols), own))
            self.small.append(nn.Parameter(matrix.new_zeros((own, cols) if rows <= cols else (rows, own))))

    @torch.no_grad()
    def refresh(self) -> None:
        """Set the bases to the leading singular vectors of the gradients, on the smaller side."""
        for matrix, basis in zip(self._matrices, self._bases, strict=True):
            assert matrix.grad is not None
            grad = matrix.grad if matrix.shape[0] <= matrix.shape[1] else matrix.grad.t()
            # eigenvalues are in ascending order
            basis.copy_(torch.linalg.eigh(grad.double() @ grad.double().t()).eigenvectors[:, -basis.shape[1] :])

    @torch.no_grad()
    def project(self) -> None:
        """Set the gradients of the small parameters."""
        for matrix, basis, small in zip(self._matrices, self._bases, self.small, strict=True):
            assert matrix.grad is not None
            small.grad = basis.t() @ matrix.grad if matrix.shape[0] <= matrix.shape[1] else matrix.grad @ basis

    @torch.no_grad()
    def expand(self) -> None:
        """Move the matrices by the steps of the small parameters."""
        for matrix, basis, small in zip(self._matrices, self._bases, self.small, strict=True):
            step = basis @ small if matrix.shape[0] <= matrix.shape[1] else small @ basis.t()
            matrix.add_(step, alpha=self.SCALE)
            small.zero_()
