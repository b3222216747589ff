"""Contenders of `finetune_gpu.py`: optimizers that train the same model, each with its authors' options for memory.

| group | contenders | package |
|---|---|---|
| scantling | CAME as in recipes/finetune-8b-24gb.yaml, and with int8 momentum | |
| full | AdamW with fp32 weights under bf16 autocast, and with bf16 weights | torch |
| full | AdamW with 8-bit and 4-bit state, weights rounded stochastically | torchao |
| full | FlashAdamW with and without the 8 bits that extend bf16 weights | flashoptim |
| full | AdamW with 8-bit state in CPU memory, as in torchtune's recipes for one GPU | bitsandbytes |
| low-rank | GaLore of rank width/4, APOLLO of rank width/16, APOLLO-Mini | galore-torch, apollo-torch, bitsandbytes |
| low-rank | LoRA of rank 16 on all layers but embeddings, the other weights frozen | peft |

"Released" contenders step each parameter in the backward pass and free its gradient: with the package's own function
(flashoptim), with one optimizer per parameter as the authors do (GaLore, APOLLO), or with the same hook (torchao,
bitsandbytes). All get the complete gradient of the batch there, because the blocks take the micro-batches in parts.

GaLore computes a singular value decomposition of each gradient in the first step, which takes minutes at this size.
Without `exact_svd`, an orthogonal basis of random combinations of the gradient's rows or columns replaces it: the
memory of the state is identical, and that of the decomposition is not needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from galore import PerParameter
from torch import Tensor, nn
from torch.optim import Optimizer

RECIPE = Path(__file__).parents[1] / "recipes" / "finetune-8b-24gb.yaml"
LR, LORA_LR = 1e-5, 2e-4
GROUPS = ("scantling", "full", "low-rank")


class Built(NamedTuple):
    """A model to call and its optimizer.

    Attributes:
        model: takes `input_ids`.
        optimizer: holds the state.
        is_released: True if the backward pass takes the step.
    """

    model: nn.Module
    optimizer: Optimizer
    is_released: bool


Build = Callable[[Any, "Options"], Built]


@dataclass(frozen=True)
class Options:
    """Settings of a run that contenders read.

    Attributes:
        width: hidden size of the model, from which ranks are derived.
        on_gpu: False on a CPU, where some packages lack their 8-bit steps.
        exact_svd: True if GaLore uses singular value decompositions.
    """

    width: int
    on_gpu: bool
    exact_svd: bool = False


@dataclass(frozen=True)
class Contender:
    """An optimizer with the weights that it trains.

    Attributes:
        group: one of `GROUPS`.
        build: changes the model and makes the optimizer; raises ImportError without its package.
        dtype: of the weights.
        note: limits that the numbers do not show.
    """

    group: str
    build: Build
    dtype: torch.dtype = torch.bfloat16
    note: str = ""


def _came(momentum: str | None = None) -> Build:
    def build(model: Any, options: Options) -> Built:
        import scantling as sc
        from scantling.trainer.recipe import load_recipe

        recipe = load_recipe(RECIPE)
        settings = recipe.optimizer_options | ({} if momentum is None else {"momentum": momentum})
        optimizer = sc.CAME(sc.param_groups(model, weight_decay=0.0), lr=recipe.optim.lr, **settings)
        sc.optim.release_gradients(model, optimizer)
        return Built(model, optimizer, is_released=True)

    return build


def _adamw(model: Any, options: Options) -> Built:
    return Built(model, torch.optim.AdamW(model.parameters(), lr=LR, fused=True), is_released=False)


def _torchao(name: str, *, is_released: bool) -> Build:
    def build(model: Any, options: Options) -> Built:
        import torchao.optim

        def make(params: Any) -> Optimizer:
            optimizer: Optimizer = getattr(torchao.optim, name)(params, lr=LR, bf16_stochastic_round=True)
            return optimizer

        params = [*model.parameters()]
        return Built(model, PerParameter([{"params": params}], make) if is_released else make(params), is_released)

    return build


def _flashoptim(master_weight_bits: Any) -> Build:
    def build(model: Any, options: Options) -> Built:
        from flashoptim import FlashAdamW, enable_gradient_release

        settings: dict[str, Any] = {"master_weight_bits": master_weight_bits}
        if not options.on_gpu:  # its kernels need a GPU
            settings = {"master_weight_bits": None, "quantize": False, "fused": False}
        optimizer = FlashAdamW(model.parameters(), lr=LR, **settings)
        enable_gradient_release(model, optimizer)
        return Built(model, optimizer, is_released=True)

    return build


def _paged(model: Any, options: Options) -> Built:
    import bitsandbytes

    kind = bitsandbytes.optim.PagedAdamW8bit if options.on_gpu else bitsandbytes.optim.AdamW8bit
    groups = [{"params": [*model.parameters()]}]
    return Built(model, PerParameter(groups, lambda own: kind(own, lr=LR)), is_released=True)


def _galore(*, is_8bit: bool) -> Build:
    def build(model: Any, options: Options) -> Built:
        import galore_torch
        from galore_torch.galore_projector import GaLoreProjector

        if not options.exact_svd:
            GaLoreProjector.get_orthogonal_matrix = _random_basis
        # the 8-bit step calls functions of CUDA
        with_8bit = is_8bit and options.on_gpu
        kind = galore_torch.GaLoreAdamW8bit if with_8bit else galore_torch.GaLoreAdamW
        rest = {} if with_8bit else {"no_deprecation_warning": True}
        groups = _split(model, rank=options.width // 4, update_proj_gap=200, scale=0.25, proj_type="std")
        return Built(model, PerParameter(groups, lambda own: kind(own, lr=LR, **rest)), is_released=True)

    return build


def _random_basis(projector: Any, grad: Tensor, rank: int, type: str) -> Tensor:
    """Return orthonormal rows (rank, columns) for type "right", columns (rows, rank) for "left"."""
    matrix = grad.float() if type == "left" else grad.float().T
    combined = matrix @ torch.randn(matrix.shape[1], rank, device=matrix.device)
    basis = torch.linalg.qr(combined).Q.to(grad.dtype)
    return basis if type == "left" else basis.T.contiguous()


def _apollo(*, is_mini: bool) -> Build:
    def build(model: Any, options: Options) -> Built:
        from apollo_torch import APOLLOAdamW

        own: dict[str, Any] = {"rank": options.width // 16, "scale_type": "channel", "scale": 1}
        if is_mini:
            own = {"rank": 1, "scale_type": "tensor", "scale": 128}
        groups = _split(model, **own, proj="random", update_proj_gap=200, proj_type="std")
        # `scale_front` and the other arguments keep the defaults of the package
        return Built(model, PerParameter(groups, lambda each: APOLLOAdamW(each, lr=LR)), is_released=True)

    return build


def _lora(model: Any, options: Options) -> Built:
    from peft import LoraConfig, get_peft_model

    rank = 16 if options.on_gpu else 4
    wrapped: Any = get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear"))
    params = [param for param in wrapped.parameters() if param.requires_grad]
    return Built(wrapped, torch.optim.AdamW(params, lr=LORA_LR, fused=True), is_released=False)


def _split(model: Any, **settings: Any) -> list[dict[str, Any]]:
    """Return groups of parameters: embeddings, head and vectors, and the layers' matrices with some settings."""
    low = [param for name, param in model.named_parameters() if ".layers." in name and param.ndim == 2]
    known = {id(param) for param in low}
    return [
        {"params": [param for param in model.parameters() if id(param) not in known]},
        {"params": low, **settings},
    ]


_NEAREST = "weights are rounded to the nearest bf16"
CONTENDERS = {
    "Scantling, CAME int4": Contender("scantling", _came()),
    "Scantling, CAME int8": Contender("scantling", _came("int8")),
    "AdamW, fp32 weights": Contender("full", _adamw, torch.float32),
    "AdamW, bf16 weights": Contender("full", _adamw, note=_NEAREST),
    "torchao AdamW8bit": Contender("full", _torchao("AdamW8bit", is_released=False)),
    "torchao AdamW8bit, released": Contender("full", _torchao("AdamW8bit", is_released=True)),
    "torchao AdamW4bit, released": Contender("full", _torchao("AdamW4bit", is_released=True)),
    "FlashAdamW, released": Contender("full", _flashoptim(24)),
    "FlashAdamW without extended weights, released": Contender("full", _flashoptim(None), note=_NEAREST),
    "bitsandbytes PagedAdamW8bit, released": Contender(
        "full", _paged, note=f"the state is in CPU memory, which the peak leaves out; {_NEAREST}"
    ),
    "APOLLO-Mini, released": Contender("low-rank", _apollo(is_mini=True), note=_NEAREST),
    "APOLLO, released": Contender("low-rank", _apollo(is_mini=False), note=_NEAREST),
    "GaLore AdamW8bit, released": Contender("low-rank", _galore(is_8bit=True), note=_NEAREST),
    "GaLore AdamW, released": Contender("low-rank", _galore(is_8bit=False), note=_NEAREST),
    "LoRA, AdamW": Contender("low-rank", _lora, note="trains the adapters only"),
}
