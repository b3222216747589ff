"""Tests of CAME inside the Trainer of transformers."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import scantling as sc
from scantling.errors import UserError

RATES = ("core_lr", "embedding_core_lr", "control_lr", "embedding_lr")

OPTIONS: dict[str, dict[str, Any]] = {
    "fp32": {"debias": True},
    "int8-bf16": {"debias": True, "momentum": "int8", "rounding": "stochastic"},
}
EXAMPLES = 24


class Sequences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < EXAMPLES:
            raise IndexError(index)
        ids = torch.arange(index, index + 16) % 61
        return {"input_ids": ids, "labels": ids}


def model(dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    return LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=2, num_key_value_heads=2)).to(dtype)


def trainer(
    folder: Path, pair: Any, dtype: torch.dtype = torch.float32, net: torch.nn.Module | None = None, **arguments: Any
) -> Trainer:
    settings = {
        "output_dir": str(folder),
        "max_steps": 6,
        "save_steps": 3,
        "logging_steps": 1,
        "per_device_train_batch_size": 4,
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "learning_rate": 123.0,  # has no effect
        "lr_scheduler_type": "linear",
        **arguments,
    }
    return Trainer(
        model=net or model(dtype),
        args=TrainingArguments(**settings),
        train_dataset=Sequences(),
        optimizer_cls_and_kwargs=pair,
    )


class StopAtThree(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step == 3


def states(made: Trainer) -> list[dict[str, torch.Tensor]]:
    assert made.optimizer is not None
    return [made.optimizer.state[p] for group in made.optimizer.param_groups for p in group["params"]]


@pytest.mark.parametrize("case", OPTIONS)
def test_resume_is_bitwise(tmp_path: Path, case: str) -> None:
    dtype = torch.bfloat16 if "bf16" in case else torch.float32
    pair = sc.hf.came(lr=1e-2, weight_decay=0.1, **OPTIONS[case])
    straight = trainer(tmp_path / "straight", pair, dtype)
    straight.train()
    parted = trainer(tmp_path / "parted", pair, dtype)
    parted.train(resume_from_checkpoint=str(tmp_path / "straight" / "checkpoint-3"))
    start = model(dtype).state_dict()
    end = straight.model.state_dict()
    assert not any(torch.equal(end[name], start[name]) for name in end)
    for name, tensor in parted.model.state_dict().items():
        assert torch.equal(tensor, end[name]), name
    for one, other in zip(states(straight), states(parted), strict=True):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert value.dtype == other[key].dtype
            assert torch.equal(value, other[key]), key


def test_low_precision_model_resumes_bitwise_and_saves_master_weights(tmp_path: Path) -> None:
    def rounded() -> torch.nn.Module:
        return sc.quantize_training(model(), weights="int4", activations="int8", kv_cache="int4")

    pair = sc.hf.came(lr=1e-2, **OPTIONS["fp32"])
    straight = trainer(tmp_path / "straight", pair, net=rounded())
    straight.train()
    whole = trainer(tmp_path / "whole", pair)
    whole.train()
    losses = [[entry["loss"] for entry in made.state.log_history if "loss" in entry] for made in (straight, whole)]
    assert all(one != other for one, other in zip(*losses, strict=True))
    parted = trainer(tmp_path / "parted", pair, net=rounded())
    parted.train(resume_from_checkpoint=str(tmp_path / "straight" / "checkpoint-3"))
    end = straight.model.state_dict()
    for name, tensor in parted.model.state_dict().items():
        assert torch.equal(tensor, end[name]), name
    saved = LlamaForCausalLM.from_pretrained(str(tmp_path / "straight" / "checkpoint-6")).state_dict()
    assert saved.keys() == model().state_dict().keys()
    for name, tensor in saved.items():
        assert torch.equal(tensor, end[name]), name


def test_stopped_run_equals_uninterrupted_run(tmp_path: Path) -> None:
    """Train three steps of six, then resume in a new Trainer; the schedule covers six steps."""
    pair = sc.hf.came(lr=1e-2, **OPTIONS["fp32"])
    straight = trainer(tmp_path / "straight", pair)
    straight.train()

    first = trainer(tmp_path / "parted", pair)
    first.add_callback(StopAtThree())
    first.train()
    assert first.state.global_step == 3
    second = trainer(tmp_path / "parted", pair)
    second.train(resume_from_checkpoint=True)
    for name, tensor in second.model.state_dict().items():
        assert torch.equal(tensor, straight.model.state_dict()[name]), name


def test_schedule_applies_to_every_group(tmp_path: Path) -> None:
    made = trainer(tmp_path, sc.hf.came(lr=0.06), save_strategy="no")
    made.train()
    rates = [record["learning_rate"] for record in made.state.log_history if "learning_rate" in record]
    assert rates == pytest.approx([0.06, 0.05, 0.04, 0.03, 0.02, 0.01])
    assert made.optimizer is not None
    assert {group["lr"] for group in made.optimizer.param_groups} == {0.0}


def test_groups_equal_param_groups(tmp_path: Path) -> None:
    made = trainer(tmp_path, sc.hf.came(lr=1e-3, weight_decay=0.1), weight_decay=0.7)
    optimizer: Any = made.create_optimizer()
    assert isinstance(optimizer, sc.CAME)
    wanted = sc.param_groups(made.model, weight_decay=0.1)
    keys = ("role", "matrix_dims", "weight_decay")
    assert [[group[key] for key in keys] for group in optimizer.param_groups] == [[g[k] for k in keys] for g in wanted]
    assert [group["param_names"] for group in optimizer.param_groups] == [[n for n, _ in g["params"]] for g in wanted]
    decayed = {name: group["weight_decay"] for group in optimizer.param_groups for name in group["param_names"]}
    assert {rate for name, rate in decayed.items() if "norm" in name} == {0.0}
    assert {rate for name, rate in decayed.items() if "norm" not in name} == {0.1}


@pytest.mark.parametrize("case", OPTIONS)
def test_prepare_keeps_state_dtypes(case: str) -> None:
    """Accelerate passes an empty and a full state through `load_state_dict`."""
    from accelerate import Accelerator

    net = model(torch.bfloat16 if "bf16" in case else torch.float32)
    factory, keywords = sc.hf.came(lr=1e-3, **OPTIONS[case])
    optimizer = factory()(net, **keywords)
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(net, optimizer)
    ids = torch.arange(16)[None]
    net(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    before = [
        {key: value.clone() for key, value in optimizer.state[p].items()} for p in net.parameters() if p.requires_grad
    ]
    accelerator.free_memory()
    _, wrapped = accelerator.prepare(net, optimizer)
    for parameter, old in zip(net.parameters(), before, strict=True):
        new = wrapped.state[parameter]
        assert {key: value.dtype for key, value in new.items()} == {key: value.dtype for key, value in old.items()}
        assert all(torch.equal(new[key], value) for key, value in old.items())
    assert {value.dtype for old in before for value in old.values()} >= {torch.float32}


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"lr": -1.0}, "lr must be a number at least 0"),
        ({"weight_decay": -0.1}, "weight_decay must be a number at least 0"),
        ({"core_lr": -0.1}, "core_lr must be at least 0"),
        ({"embedding_core_lr": -0.1}, "embedding_core_lr must be at least 0"),
        ({"embedding_lr": -0.1}, "embedding_lr must be at least 0"),
        ({"betas": (0.9, 0.999)}, "betas must be 3 numbers"),
        ({"momentum": "int7"}, "momentum must be one of"),
        ({"rounding": "up"}, "rounding must be one of"),
        ({"debias": 1}, "debias must be True or False"),
    ],
)
def test_invalid_values_raise_immediately(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        sc.hf.came(**{"lr": 1e-3, **keywords})


def test_core_lr_follows_the_schedule(tmp_path: Path) -> None:
    made = trainer(tmp_path, sc.hf.came(lr=0.06, core_lr=0.02), save_strategy="no")
    sc.tensorize(made.model, 4)
    optimizer: Any = made.create_optimizer()
    rates = {name: group["lr"] for group in optimizer.param_groups for name in group["param_names"]}
    layers = {name for name in rates if ".cores." in name and "embed" not in name}
    assert {name for name, rate in rates.items() if rate == 0.02} == layers
    assert set(rates.values()) == {0.02, 0.06}
    made.train()
    assert {group["initial_lr"] for group in optimizer.param_groups} == {0.02, 0.06}


def test_embedding_lr_for_t5(tmp_path: Path) -> None:
    sizes = {"d_model": 32, "d_ff": 64, "d_kv": 16, "num_heads": 2, "num_layers": 1, "vocab_size": 64}
    torch.manual_seed(0)
    net = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0))
    pair = sc.hf.came(lr=1e-3, embedding_lr=1e-2, debias=True)
    made = trainer(tmp_path, pair, net=net, max_steps=20, save_strategy="no")
    optimizer: Any = made.create_optimizer()
    rates = {name: group["lr"] for group in optimizer.param_groups for name in group["param_names"]}
    assert rates["shared.weight"] == 1e-2
    assert set(rates.values()) == {1e-2, 1e-3}
    made.train()
    losses = [entry["loss"] for entry in made.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0] - 0.5


def test_arguments_equal_those_of_came() -> None:
    """Names and defaults are equal, except that `lr` is required and some parameters have their own rates."""
    ours, theirs = (inspect.signature(each).parameters for each in (sc.hf.came, sc.CAME))
    assert {name: p.default for name, p in ours.items() if name not in ("lr", *RATES)} == {
        name: p.default for name, p in theirs.items() if name not in ("params", "lr")
    }
    assert ours["lr"].default is inspect.Parameter.empty
