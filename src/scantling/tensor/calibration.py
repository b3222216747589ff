"""Calibration data of a conversion: Gram matrices of the inputs of linear layers, from one pass over some batches.

The Gram matrix of a layer is G = X^T X / tokens, (in, in), for the inputs X of all tokens. It is all that the error of
the layer's output depends on: ‖X (W − W')‖² / tokens = tr((W − W')^T G (W − W')).

The effect of a layer's error on the output z of the whole model is estimated from gradients: for independent normal u,
E (u^T dz/dy e)² = ‖dz/dy e‖², and for an error e of the layer's output y without a preferred direction it is
‖e‖² ‖u^T dz/dy‖² / out.

Cost: one forward pass per batch, one product of (in, tokens) and (tokens, in) for each distinct input, and one matrix
in fp32 for each layer; for the effects also one backward pass per batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from scantling.errors import UserError
from scantling.eval_mode import eval_mode
from scantling.numerics.device import without_autocast
from scantling.numerics.torch_private import tree_leaves, version_counter
from scantling.tensor.experts import TTExperts, is_fused_experts, projection_linears
from scantling.tensor.find_layers import Candidate

_OUTPUTS = ("logits", "last_hidden_state")
"""Names that transformers gives to the main output of a model."""


@dataclass
class Calibration:
    """Statistics of one pass over the calibration batches.

    Attributes:
        grams: Gram matrices by layer; for each projection (`""` in a linear layer) one per expert, or None if no token
            reached it.
        effects: by layer, the squared relative error of the model's output per squared relative error of the layer's
            output; empty unless asked for.
        batch: first batch, on the device of the model.
        output: output of the dense model for the first batch.
    """

    grams: dict[nn.Module, dict[str, list[Tensor | None]]]
    effects: dict[nn.Module, float]
    batch: Any
    output: Tensor

    def output_error(self, model: nn.Module) -> float:
        """Return the relative error of a converted model's output for the first batch."""
        with torch.no_grad():
            difference = _run(model, self.batch) - self.output
        return float(difference.norm() / self.output.norm().clamp(min=torch.finfo(self.output.dtype).tiny))


def calibrate(
    model: nn.Module, candidates: Sequence[Candidate], batches: Iterable[Any], *, with_effects: bool = False
) -> Calibration:
    """Run a model over calibration batches and return the Gram matrices of the inputs of its layers.

    Args:
        model: dense model; it runs in evaluation mode.
        candidates: linear layers and experts whose inputs are recorded.
        batches: mappings of keyword arguments, sequences of arguments, or tensors.
        with_effects: True to measure the effects of layers on the output of the model, by a backward pass per batch.

    Raises:
        UserError: if there are no batches, they hold texts, they reach none of the layers, or inputs hold NaN or Inf;
            if the output of the model has no gradients, which `with_effects` needs; in `torch.inference_mode()`.
    """
    if isinstance(batches, Mapping | Tensor | str) or not isinstance(batches, Iterable):
        raise UserError(
            f"given calibration of type {type(batches).__name__}; it must be an iterable of batches, such as a "
            "DataLoader or a list of dicts"
        )
    if torch.is_inference_mode_enabled():
        raise UserError("calibration does not work in torch.inference_mode(); use torch.no_grad()")
    recorder = _Recorder()
    parts = {candidate.module: _watched_layers(candidate.module) for candidate in candidates}
    first: tuple[Any, Tensor] | None = None
    try:
        for module, layers in parts.items():
            recorder.watch(module, layers, with_effects=with_effects)
        for batch in batches:
            moved = _to_device(batch, model)
            recorder.mask = _mask(moved, model)
            with torch.set_grad_enabled(with_effects):
                output = _run(model, moved)
                if with_effects:
                    recorder.add_effects(output)
            first = first or (moved, output.detach())
    finally:
        recorder.remove()
    if first is None:
        raise UserError("calibration is empty; give at least one batch")
    grams = {
        module: {part: [recorder.gram(layer) for layer in layers] for part, layers in by_part.items()}
        for module, by_part in parts.items()
    }
    _check(candidates, grams)
    return Calibration(grams, recorder.effects(), *first)


def _check(candidates: Sequence[Candidate], grams: Mapping[nn.Module, Mapping[str, Sequence[Tensor | None]]]) -> None:
    reached = False
    for candidate in candidates:
        for gram in (gram for part in grams[candidate.module].values() for gram in part):
            reached |= gram is not None
            if gram is not None and not bool(torch.isfinite(gram).all()):
                raise UserError(f"calibration: the inputs of {candidate.name} hold NaN or Inf")
    if candidates and not reached:
        raise UserError(
            f"calibration reaches none of the {len(candidates)} layers to convert, such as {candidates[0].name}; give "
            "batches that run through them"
        )


def _watched_layers(module: nn.Module) -> Mapping[str, Sequence[nn.Module]]:
    """Return the linear layers whose inputs are recorded for a candidate, by projection."""
    return projection_linears(module) if is_fused_experts(module) else {"": [module]}


class _Recorder:
    """Sums of x^T x of the inputs of layers, recorded by hooks."""

    def __init__(self) -> None:
        self.mask: Tensor | None = None  # of the current batch: (rows, length), True for tokens that count
        self._sums: dict[nn.Module, Tensor] = {}
        self._tokens: dict[nn.Module, int] = {}
        self._last: tuple[Tensor, int, Tensor, int] | None = None
        self._handles: list[Any] = []
        self._outputs: list[tuple[nn.Module, Tensor]] = []  # of the current batch
        self._powers: dict[nn.Module, list[Tensor]] = defaultdict(list)  # mean of ‖y‖² over tokens, by call
        self._squared_gradients: dict[nn.Module, list[Tensor]] = defaultdict(list)
        self._passes = 0  # backward passes
        self._generator = torch.Generator().manual_seed(0)  # does not change the user's random numbers

    def watch(
        self, module: nn.Module, layers: Mapping[str, Sequence[nn.Module]], *, with_effects: bool = False
    ) -> None:
        """Record the inputs of a linear layer, or those of the projections of all experts of a module.

        Args:
            module: the linear layer or the experts.
            layers: linear layers of the module, by projection.
            with_effects: True to record the outputs of the module for `add_effects`.
        """
        if with_effects:
            self._handles.append(module.register_forward_hook(self._record_output))
        if "" in layers:
            self._handles.append(module.register_forward_pre_hook(self._record, with_kwargs=True))
            return
        # The forward pass of fused experts calls no layers: repeat it with one layer per expert and projection.
        copy = TTExperts(module, cast(Any, layers["up"]), cast(Any, layers["down"]))
        for layer in (*layers["up"], *layers["down"]):
            self._handles.append(layer.register_forward_pre_hook(self._record, with_kwargs=True))

        @torch.no_grad()
        def repeat(_: nn.Module, args: tuple[Any, ...]) -> None:
            copy(*args)

        self._handles.append(module.register_forward_pre_hook(repeat))

    def add_effects(self, output: Tensor) -> None:
        """Run the backward pass of a random direction of the model's output."""
        self._passes += 1
        if not self._outputs:
            return
        if not output.requires_grad:
            raise UserError(
                "calibration: size_target needs gradients of the model's output, which does not depend on the layers "
                "to convert, or whose forward pass runs under torch.no_grad()"
            )
        direction = torch.randn(output.shape, generator=self._generator).to(output)
        outputs = [y for _, y in self._outputs]
        gradients = torch.autograd.grad((output * direction).sum() / output.detach().norm(), outputs, allow_unused=True)
        for (module, y), gradient in zip(self._outputs, gradients, strict=True):
            if gradient is not None:
                bias = getattr(module, "bias", None)
                linear = y.detach().float() if bias is None else (y - bias).detach().float()
                self._powers[module].append(linear.square().sum(-1).mean())
                self._squared_gradients[module].append(gradient.float().square().sum() / y.shape[-1])
        self._outputs = []

    def effects(self) -> dict[nn.Module, float]:
        """Return the effects of all modules with gradients."""
        found = {}
        for module, powers in self._powers.items():
            squared_gradient = torch.stack(self._squared_gradients[module]).sum() / self._passes
            found[module] = float(torch.stack(powers).mean() * squared_gradient)
        return found

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._last = None

    def gram(self, layer: nn.Module) -> Tensor | None:
        """Return the Gram matrix of a layer's inputs, (in, in); None if it had none."""
        tokens = self._tokens.get(layer, 0)
        return self._sums[layer] / tokens if tokens else None

    def _record(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x: Tensor = args[0] if args else kwargs["input"]
        gram, tokens = self._product(x.detach())
        if layer in self._sums:
            self._sums[layer] += gram
        else:
            self._sums[layer] = gram.clone()
        self._tokens[layer] = self._tokens.get(layer, 0) + tokens

    def _record_output(self, module: nn.Module, _: Any, output: Tensor) -> Tensor:
        y = output if output.requires_grad else output.requires_grad_()
        self._outputs.append((module, y))
        return y.clone()  # the model may change its copy in place

    def _product(self, x: Tensor) -> tuple[Tensor, int]:
        """Return x^T x, in fp32 or wider, and the number of tokens; computed once for layers that share an input."""
        if self._last is not None and self._last[0] is x and self._last[1] == version_counter(x):
            return self._last[2:]
        # Padding does not count.
        is_masked = self.mask is not None and x.shape[:-1] == self.mask.shape
        tokens = x[self.mask] if is_masked else x.reshape(-1, x.shape[-1])
        with without_autocast(x.device):
            tokens = tokens.to(torch.promote_types(x.dtype, torch.float32))
            self._last = x, version_counter(x), tokens.t() @ tokens, tokens.shape[0]
        return self._last[2:]


def _to_device(batch: Any, model: nn.Module) -> Any:
    """Return a batch with its tensors on the device of the model.

    Raises:
        UserError: if it holds texts.
    """
    device = next(model.parameters()).device
    if isinstance(batch, str) or (isinstance(batch, tuple | list) and any(isinstance(each, str) for each in batch)):
        raise UserError("calibration: a batch holds texts; give token ids, as the model takes them")

    def move(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return (value.clone() if value.is_inference() else value).to(device)

    if isinstance(batch, Mapping):
        return {key: move(value) for key, value in batch.items()}
    return tuple(map(move, batch)) if isinstance(batch, tuple | list) else move(batch)


def _mask(batch: Any, model: nn.Module) -> Tensor | None:
    """Return the mask of tokens that are not padding; None if unknown."""
    # The mask of an encoder would not fit the tokens of its decoder.
    if not isinstance(batch, Mapping) or getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return None
    mask = batch.get("attention_mask")
    return mask.bool() if isinstance(mask, Tensor) and mask.ndim == 2 else None


def _run(model: nn.Module, batch: Any) -> Tensor:
    """Return the main output of a model for a batch, without padding: in fp32 or wider."""
    with eval_mode(model):
        if isinstance(batch, Mapping):
            outputs = model(**batch)
        else:
            outputs = model(*batch) if isinstance(batch, tuple) else model(batch)
    named = (getattr(outputs, name, None) for name in _OUTPUTS)
    output = next((each for each in (*named, *tree_leaves(outputs)) if _is_float(each)), None)
    if output is None:
        raise UserError(f"calibration: the model returns no floating-point tensor, but a {type(outputs).__name__}")
    mask = _mask(batch, model)
    output = output if mask is None or output.shape[:2] != mask.shape else output[mask]
    found: Tensor = output.to(torch.promote_types(output.dtype, torch.float32))
    return found


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
