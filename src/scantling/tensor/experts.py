"""TTExperts: the fused experts of a mixture-of-experts layer, one tensor train per expert and projection.

In transformers 5 the experts of a layer are one module with 3-D parameters, `gate_up_proj` (or `up_proj`) and
`down_proj`, and a forward pass over (tokens, chosen experts, their weights):

    y_t = sum over the chosen e of  w_{t,e} down_e(gate(up_e(x_t)))

TTExperts replaces such a module. It keeps everything else that the module held (biases, activation, gate function) and
routes in the same way. If no token chooses an expert in a step, its cores get no gradient in that step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from scantling.numerics.torch_private import non_persistent_buffers, own_buffers, own_modules, own_parameters
from scantling.tensor.linear import TTLinear

DOWN_PROJ = "down_proj"
_UP_PROJS = ("gate_up_proj", "up_proj")
_EXPERT_ATTRIBUTES = ("num_experts", "has_gate", "has_bias", "is_transposed")


def is_fused_experts(module: nn.Module) -> bool:
    """True for a module of fused experts in the form of transformers."""
    if not all(hasattr(module, name) for name in _EXPERT_ATTRIBUTES):
        return False
    weights = [own_parameters(module).get(name) for name in (up_name(module), DOWN_PROJ)]
    return all(weight is not None and weight.ndim == 3 for weight in weights)


def up_name(module: nn.Module) -> str:
    """Return the name of the first projection, which expands the hidden states."""
    return next((name for name in _UP_PROJS if own_parameters(module).get(name) is not None), _UP_PROJS[0])


def projections(experts: nn.Module) -> dict[str, str]:
    """Return the names of the weights of both projections, by those of the lists in `TTExperts`."""
    return {"up": up_name(experts), "down": DOWN_PROJ}


def expert_linears(experts: nn.Module, name: str) -> Iterator[nn.Linear]:
    """Yield one projection of each expert as a linear layer without bias that shares its memory."""
    for weight in experts.get_parameter(name):
        matrix = weight.t() if experts.is_transposed else weight
        # On the meta device: its weight is replaced by a view.
        linear = nn.Linear(matrix.shape[1], matrix.shape[0], bias=False, device="meta")
        linear.weight = nn.Parameter(matrix.detach(), requires_grad=weight.requires_grad)
        yield linear.train(experts.training)


def projection_linears(experts: nn.Module) -> dict[str, list[nn.Linear]]:
    """Return `expert_linears` of both projections."""
    return {part: [*expert_linears(experts, name)] for part, name in projections(experts).items()}


class TTExperts(nn.Module):
    """Experts as tensor trains.

    Args:
        experts: module to replace; it is not changed.
        up: (in, gate and up) TT layer of each expert, without bias.
        down: (inner, out) TT layer of each expert, without bias.

    Attributes:
        up, down: `nn.ModuleList` of `TTLinear`.
        dense_class: class of `experts`.
    """

    up: nn.ModuleList
    down: nn.ModuleList
    num_experts: int
    has_gate: bool
    has_bias: bool
    is_transposed: bool
    act_fn: Callable[[Tensor], Tensor]
    post_expert_norm: Callable[[Tensor], Tensor]

    def __init__(self, experts: nn.Module, up: list[TTLinear], down: list[TTLinear]) -> None:
        super().__init__()
        self.dense_class = type(experts)
        self.up_name = up_name(experts)
        _share_members(experts, self, without=(self.up_name, DOWN_PROJ))
        self.up, self.down = nn.ModuleList(up), nn.ModuleList(down)
        self.train(experts.training)

    def forward(self, hidden: Tensor, expert_idx: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of the selected experts.

        Args:
            hidden: (tokens, width).
            expert_idx: (tokens, k); indices from `num_experts` on are ignored.
            weights: (tokens, k).

        Returns:
            (tokens, width).
        """
        result = torch.zeros_like(hidden)
        # Only selected experts are computed; reading their indices synchronizes a GPU.
        for expert in torch.unique(expert_idx).tolist():
            if expert >= self.num_experts:
                continue
            token_idx, slot = torch.where(expert_idx == expert)
            # All tokens of this expert at once: (tokens of the expert, ...).
            inner = self._add_bias(self.up[expert](hidden[token_idx]), self.up_name, expert)
            out = self._add_bias(self.down[expert](self._apply_gate(inner)), DOWN_PROJ, expert)
            if getattr(self, "has_post_expert_norm", False):
                out = self.post_expert_norm(out)
            result = result.index_add(0, token_idx, (out * weights[token_idx, slot, None]).to(result.dtype))
        return result

    def to_dense(self) -> nn.Module:
        """Return a module of the replaced class; it shares everything except the projections with this one."""
        # The constructor needs the model's configuration and allocates weights.
        experts: nn.Module = self.dense_class.__new__(self.dense_class)
        nn.Module.__init__(experts)
        _share_members(self, experts, without=("up", "down"))
        for name, parts in ((self.up_name, self.up), (DOWN_PROJ, self.down)):
            layers = [part for part in parts if isinstance(part, TTLinear)]
            matrices = [layer.dense_weight().detach() for layer in layers]  # each (out, in)
            weight = torch.stack([matrix.t() if self.is_transposed else matrix for matrix in matrices])
            experts.register_parameter(name, nn.Parameter(weight, requires_grad=layers[0].is_trainable))
        del experts.dense_class, experts.up_name
        return experts.train(self.training)

    @property
    def experts_per_token(self) -> int | None:
        """Number of experts per token, from the model's configuration; None if unknown."""
        config = getattr(self, "config", None)
        counts = (getattr(config, name, None) for name in ("num_experts_per_tok", "top_k_experts"))
        return next((count for count in counts if isinstance(count, int)), None)

    def num_parameters(self) -> int:
        """Return the number of parameters in the cores of all experts."""
        return sum(part.num_parameters() for part in (*self.up, *self.down) if isinstance(part, TTLinear))

    def _add_bias(self, values: Tensor, name: str, expert: int) -> Tensor:
        return values + self.get_parameter(f"{name}_bias")[expert] if self.has_bias else values

    def _apply_gate(self, values: Tensor) -> Tensor:
        gate: Callable[[Any, Tensor], Tensor] | None = getattr(self.dense_class, "_apply_gate", None)
        return gate(self, values) if self.has_gate and gate is not None else self.act_fn(values)


_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))


def _share_members(source: nn.Module, target: nn.Module, without: tuple[str, ...]) -> None:
    """Share attributes, parameters, buffers and submodules of one module with another, with exceptions."""
    for name, value in vars(source).items():
        if name not in _MODULE_ATTRIBUTES:
            target.__dict__[name] = value
    for name, parameter in own_parameters(source).items():
        if name not in without:
            target.register_parameter(name, parameter)
    for name, buffer in own_buffers(source).items():
        target.register_buffer(name, buffer, persistent=name not in non_persistent_buffers(source))
    for name, module in own_modules(source).items():
        if name not in without:
            target.add_module(name, module)
