"""Tests of CAME in the Trainer of transformers whose model accelerate shards by FSDP2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import scantling as sc
from scantling.errors import UserError
from tests.hf.test_hf_trainer import Sequences, StopAtThree
from tests.processes import run

pytestmark = pytest.mark.dist

FSDP2 = {"fsdp": True, "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}}
started = PartialState.__init__


def start_as_gpu(self: PartialState, *args: Any, **options: Any) -> None:
    """Start like processes with a GPU each: accelerate shards no model on CPUs, although FSDP2 works there."""
    started(self, *args, **options)
    if self.distributed_type == DistributedType.MULTI_CPU:
        self.distributed_type = DistributedType.MULTI_GPU


def trainer(folder: Path, momentum: str, *, sharded: bool = True) -> Trainer:
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 64}
    model = LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=2, num_key_value_heads=2))
    options: dict[str, Any] = dict(FSDP2) if sharded else {}
    world = dist.get_world_size() if dist.is_initialized() else 1
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=6,
        save_steps=3,
        logging_steps=1,
        per_device_train_batch_size=4 // world,
        gradient_accumulation_steps=2,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        **options,
    )
    came = sc.hf.came(lr=3e-3, momentum=momentum, debias=True, betas=(0.9, 0.95, 0.995))  # type: ignore[arg-type]
    return Trainer(model=model, args=arguments, train_dataset=Sequences(), optimizer_cls_and_kwargs=came)


def losses(made: Trainer) -> list[float]:
    return [float(entry["loss"]) for entry in made.state.log_history if "loss" in entry]


def straight_and_resumed(folder: Path, momentum: str, expected: list[float]) -> None:
    PartialState.__init__ = start_as_gpu  # type: ignore[method-assign]
    straight = trainer(folder / "straight", momentum)
    straight.train()
    assert all(isinstance(param, DTensor) for param in straight.model.parameters())
    assert losses(straight) == pytest.approx(expected, rel=1e-4)
    first = trainer(folder / "parted", momentum)
    first.add_callback(StopAtThree())
    first.train()
    second = trainer(folder / "parted", momentum)
    second.train(resume_from_checkpoint=True)
    for (name, one), other in zip(straight.model.named_parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one.to_local(), other.to_local()), name  # type: ignore[attr-defined]
    ours, theirs = (made.optimizer.optimizer.state for made in (straight, second))  # type: ignore[union-attr]
    for one_state, other_state in zip(ours.values(), theirs.values(), strict=True):
        for key, value in one_state.items():
            other = other_state[key]
            local = [each.to_local() if isinstance(each, DTensor) else each for each in (value, other)]
            assert torch.equal(*local), key


@pytest.mark.parametrize("momentum", ["fp32", "int8", "int4"])
def test_sharded_trainer_equals_one_process_and_resumes_bitwise(momentum: str, tmp_path: Path) -> None:
    whole = trainer(tmp_path / "whole", momentum, sharded=False)
    whole.train()
    run(2, straight_and_resumed, tmp_path, momentum, losses(whole))


def exchange(folder: Path) -> None:
    PartialState.__init__ = start_as_gpu  # type: ignore[method-assign]
    made = trainer(folder, "fp32")
    with pytest.raises(UserError, match="FSDP"):
        sc.hf.attach(made, topk=8)


def test_exchange_under_fsdp_is_refused(tmp_path: Path) -> None:
    run(2, exchange, tmp_path)
