"""Cross entropy of a language model whose logits exist for a chunk of tokens at a time.

The logits of 2,048 tokens over 128,256 classes take 1 GiB in fp32, and a loss needs several copies of them. Here the
output layer itself returns the loss: it computes the logits chunk by chunk, keeps one number for each token, and
computes the logits again in the backward pass, which is one more product than the three of the layer.

`torch.nn.functional.linear_cross_entropy` has no such product, but holds the gradient of the layer from the forward
pass on, in fp32 on a CPU and summed in bf16 over many chunks on a GPU, and hides its memory and FLOPs from a plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from scantling.errors import UserError
from scantling.eval_mode import eval_mode
from scantling.tensor.layer import without_saving_hooks
from scantling.trainer.data.loader import IGNORED


def chunk_loss(model: Any, tokens: int) -> None:
    """Let the output layer of a model return the loss, inside `loss_labels`, from the logits of a few tokens at a time.

    Args:
        model: causal language model of transformers; changed in place.
        tokens: tokens of a chunk.

    Raises:
        UserError: the output layer is no linear layer, or the model changes its outputs.
    """
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise UserError(
            f"train.loss_chunk: the output layer of {type(model).__name__} is a {type(head).__name__}, and has to be a "
            "linear layer; leave the key out"
        )
    own: Any = head
    own.loss_chunk, own.loss_labels = tokens, None
    own.forward = MethodType(_loss_or_logits, head)
    if not head.weight.is_meta:
        check_same_loss(model)


@contextmanager
def loss_labels(model: Any, labels: Tensor) -> Iterator[bool]:
    """Context in which the model returns the sum of the loss instead of logits; yields False without `chunk_loss`.

    Args:
        model: any causal language model.
        labels: (...) classes, -100 for no target.
    """
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if head is None or getattr(head, "loss_chunk", None) is None:
        yield False
        return
    head.loss_labels = labels
    try:
        yield True
    finally:
        head.loss_labels = None


def chunked_cross_entropy(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, tokens: int) -> Tensor:
    """Return the sum of the cross entropy over the targets, in fp32.

    Args:
        hidden: (..., width) inputs of the output layer.
        weight: (classes, width).
        bias: (classes), or None.
        labels: (...) classes, -100 for no target.
        tokens: tokens whose logits exist at a time.
    """
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
    flat = hidden.reshape(-1, hidden.shape[-1]).to(dtype)
    loss: Tensor = _ChunkedLoss.apply(flat, weight, bias, labels.reshape(-1), tokens)  # type: ignore[no-untyped-call]
    return loss


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, tokens: int) -> Tensor:
        cast = weight.to(hidden.dtype)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        # (tokens): the logarithm of the sum that normalizes a row of logits
        norms = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        for part, own_labels, own_norms in _chunks(tokens, hidden, labels, norms):
            logits = _logits(part, cast, bias)
            torch.logsumexp(logits, -1, out=own_norms)
            chosen = logits.gather(1, own_labels.clamp(min=0)[:, None]).squeeze(1)
            total += torch.where(own_labels == IGNORED, 0.0, own_norms - chosen).sum()
            del logits  # else they live on while those of the next chunk are computed
        ctx.save_for_backward(hidden, weight, bias, labels, norms)
        ctx.tokens = tokens
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, norms = ctx.saved_tensors
        cast = weight.to(hidden.dtype)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(cast) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None else None
        parts = _chunks(ctx.tokens, hidden, labels, norms, grad_hidden)
        for part, own_labels, own_norms, own_grad in parts:
            # a plan counts products inside saving hooks, as those of a checkpoint, as recomputed
            with without_saving_hooks():
                logits = _logits(part, cast, bias)
            # d loss / d logits = softmax(logits) - 1 at the label
            grad_logits = logits.sub_(own_norms[:, None]).exp_()
            grad_logits.scatter_add_(1, own_labels.clamp(min=0)[:, None], -torch.ones_like(grad_logits[:, :1]))
            grad_logits.mul_(torch.where(own_labels == IGNORED, 0.0, grad)[:, None])
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0)
            grad_logits = grad_logits.to(hidden.dtype)
            torch.mm(grad_logits, cast, out=own_grad)
            if grad_weight is not None:
                grad_weight.addmm_(grad_logits.T, part)
            del logits, grad_logits
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
        )


def _chunks(tokens: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the parts of tensors with so many rows each."""
    yield from zip(*(torch.split(tensor, tokens) for tensor in tensors), strict=True)


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the logits in fp32, (tokens, classes)."""
    with torch.autocast(hidden.device.type, enabled=False):
        logits = (hidden @ weight.T).float()
    return logits if bias is None else logits.add_(bias)


def _loss_or_logits(head: Any, hidden: Tensor) -> Tensor:
    if head.loss_labels is None:
        return nn.functional.linear(hidden, head.weight, head.bias)
    return chunked_cross_entropy(hidden, head.weight, head.bias, head.loss_labels, head.loss_chunk)


@torch.no_grad()
def check_same_loss(model: Any) -> None:
    """Refuse a model whose logits are not the outputs of its output layer, such as one that limits them.

    Args:
        model: after `chunk_loss`, with its weights.

    Raises:
        UserError: the loss differs from that of the logits.
    """
    ids = torch.arange(1, 9, device=model.device)[None]
    with eval_mode(model), torch.autocast(ids.device.type, dtype=torch.bfloat16, enabled=_is_bf16(model)):
        logits = model(input_ids=ids).logits.float()
        with loss_labels(model, ids):
            found = model(input_ids=ids).logits
    wanted = nn.functional.cross_entropy(logits[0], ids[0], reduction="sum")
    if found.numel() > 1 or not torch.isclose(found.float(), wanted, rtol=1e-2 if _is_bf16(model) else 1e-4):
        raise UserError(
            f"train.loss_chunk: {type(model).__name__} changes the outputs of its output layer, or never calls it; "
            "leave the key out"
        )


def _is_bf16(model: Any) -> bool:
    return bool(model.get_output_embeddings().weight.dtype == torch.bfloat16)
