"""Tests of rank reduction in the Trainer of transformers."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import Trainer, TrainingArguments

import scantling as sc
from scantling.errors import UserError
from scantling.tensor.layer import TTLayer
from tests.hf.test_hf_trainer import Sequences, StopAtThree, model
from tests.processes import run


def trainer(
    folder: Path, steps: int = 9, accumulation: int = 4, pair: Any = None, **options: Any
) -> tuple[Trainer, sc.RankAdapter]:
    made = sc.tensorize(model(), rank=6)
    adapter = sc.RankAdapter(made, **{"size_target": 0.5, "steps": 6, "interval": 1, **options})
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        save_steps=3,
        logging_steps=1,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=accumulation,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    callback = sc.hf.RankCallback(adapter)
    pair = pair or sc.hf.came(lr=3e-3, debias=True, betas=(0.9, 0.95, 0.995))
    return Trainer(
        made, arguments, train_dataset=Sequences(), callbacks=[callback], optimizer_cls_and_kwargs=pair
    ), adapter


def cores(of: torch.nn.Module) -> int:
    return sum(core.numel() for layer in of.modules() if isinstance(layer, TTLayer) for core in layer.cores)


def test_pruned_model_is_saved_and_loads_exactly(tmp_path: Path) -> None:
    made, adapter = trainer(tmp_path)
    first = cores(made.model)
    made.train()
    assert cores(made.model) == pytest.approx(0.5 * first, rel=0.02)
    assert adapter.num_parameters() == cores(made.model)
    assert not any("rank_gates" in name for name, _ in made.model.named_parameters())
    sizes = [record["tensor_size"] for record in made.state.log_history if "tensor_size" in record]
    assert len(sizes) >= 8
    assert sizes[0] > sizes[-1] == pytest.approx(0.5, rel=0.02)
    made.save_model(str(tmp_path / "small"))
    loaded = sc.load(tmp_path / "small").eval()
    ids = torch.arange(12).view(1, 12)
    assert torch.equal(loaded(input_ids=ids).logits, made.model.eval()(input_ids=ids).logits)


def test_penalty_is_added_once_per_update(tmp_path: Path) -> None:
    """Four micro-batches, one price: the gates' gradient is that of the data plus that of the price, once."""
    made, adapter = trainer(tmp_path, steps=1, schedule="paper", gamma=7.0)
    control = next(layer.rank_gates[0] for layer in adapter.layers.values() if layer.rank_gates is not None)
    seen: list[torch.Tensor] = []

    class Look(type(made.callback_handler.callbacks[0])):  # type: ignore[misc]
        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            seen.append(control.grad.clone())

    callbacks = made.callback_handler.callbacks
    place = next(index for index, one in enumerate(callbacks) if isinstance(one, sc.hf.RankCallback))
    callbacks[place : place + 1] = [Look(), callbacks[place], Look()]
    made.train()
    fresh, again = trainer(tmp_path / "again", steps=1, schedule="paper", gamma=7.0)
    again.loss(torch.zeros(())).backward()
    wanted = next(layer.rank_gates[0] for layer in again.layers.values() if layer.rank_gates is not None).grad
    assert fresh is not made
    torch.testing.assert_close(seen[1] - seen[0], wanted)


def train_in_parts(folder: Path) -> None:
    """Train two micro-batches on each of two processes; every process writes its result."""
    made, adapter = trainer(folder, accumulation=2)
    made.train()
    values = {name: value.detach() for name, value in made.model.named_parameters()}
    torch.save({"ranks": adapter.ranks(), "values": values}, folder / f"of-{dist.get_rank()}.pt")


@pytest.mark.dist
def test_two_processes_match_one(tmp_path: Path) -> None:
    run(2, train_in_parts, tmp_path)
    alone, adapter = trainer(tmp_path / "alone")
    alone.train()
    first, second = (torch.load(tmp_path / f"of-{rank}.pt") for rank in range(2))
    assert first["ranks"] == second["ranks"] == adapter.ranks()
    for name, value in alone.model.named_parameters():
        assert torch.equal(first["values"][name], second["values"][name])
        torch.testing.assert_close(first["values"][name], value, rtol=1e-3, atol=1e-4)


def train_with_local_steps(folder: Path) -> None:
    made, adapter = trainer(folder, accumulation=2)
    callback = sc.hf.attach(made, local_steps=2)
    made.train()
    assert callback.exchange is not None
    gates = [group for group in callback.exchange.param_groups if "rank_gates" in group["param_names"][0]]
    assert [group["dense"] for group in gates] == ["int8"]
    assert cores(made.model) == adapter.num_parameters()
    values = {name: value.detach() for name, value in made.model.named_parameters()}
    torch.save({"ranks": adapter.ranks(), "values": values}, folder / f"of-{dist.get_rank()}.pt")


@pytest.mark.dist
def test_ranks_change_together_after_local_steps(tmp_path: Path) -> None:
    before = cores(trainer(tmp_path / "before")[0].model)
    run(2, train_with_local_steps, tmp_path)
    first, second = (torch.load(tmp_path / f"of-{rank}.pt") for rank in range(2))
    assert first["ranks"] == second["ranks"]
    assert first["values"].keys() == second["values"].keys()
    assert all(torch.equal(value, second["values"][name]) for name, value in first["values"].items())
    left = sum(value.numel() for name, value in first["values"].items() if ".cores." in name)
    assert left == pytest.approx(0.5 * before, rel=0.02)


PAIRS = {"came": None, "sign": sc.hf.sign(lr=3e-3), "adamw": (torch.optim.AdamW, {"lr": 3e-3})}


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_resume_is_bitwise(tmp_path: Path, pair: Any) -> None:
    straight, adapter = trainer(tmp_path / "straight", pair=pair)
    straight.train()
    first, _ = trainer(tmp_path / "parted", pair=pair)
    first.add_callback(StopAtThree())
    first.train()
    second, resumed = trainer(tmp_path / "parted", pair=pair)
    second.train(resume_from_checkpoint=True)
    assert resumed.step == adapter.step
    assert resumed.ranks() == adapter.ranks()
    for (name, one), other in zip(straight.model.named_parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one, other), name


def test_late_stage_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="late stage weights the task loss"):
        trainer(tmp_path, schedule="paper", early_steps=3)


def test_trainers_own_optimizer_adapts_ranks(tmp_path: Path) -> None:
    """Its optimizer is fused AdamW, which leaves no trace in version counters."""
    made, adapter = trainer(tmp_path)
    made.optimizer_cls_and_kwargs = None
    made.eval_dataset = made.train_dataset
    first = cores(made.model)
    losses = []
    for _ in range(2):
        losses.append(made.evaluate()["eval_loss"])
        if not adapter.step:
            made.train()
    assert losses[0] != losses[1]
    assert cores(made.model) == pytest.approx(0.5 * first, rel=0.02)


def test_same_trainer_continues_with_the_pruned_model(tmp_path: Path) -> None:
    made, _ = trainer(tmp_path)
    made.train()
    small = [core.detach().clone() for core in made.model.parameters()]
    made.train()
    assert [core.shape for core in made.model.parameters()] == [core.shape for core in small]
    assert not any(torch.equal(core, before) for core, before in zip(made.model.parameters(), small, strict=True))


def test_training_that_ends_early_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made, adapter = trainer(tmp_path, steps=3)
    made.train()
    assert "training ended after 3 of the 6 steps" in caplog.text
    assert adapter.is_attached


def test_restoring_callback_states_is_refused(tmp_path: Path) -> None:
    made, _ = trainer(tmp_path)
    made.args.restore_callback_states_from_checkpoint = True
    callback = next(each for each in made.callback_handler.callbacks if isinstance(each, sc.hf.RankCallback))
    with pytest.raises(UserError, match="restored in any case"):
        callback.on_init_end(made.args, made.state, made.control)


@pytest.mark.parametrize(
    ("options", "adds"), [({}, False), ({"beta": 0.1}, True), ({"schedule": "paper"}, True)], ids=str
)
def test_fp16_without_clipping_is_refused(tmp_path: Path, options: Any, adds: bool) -> None:
    made, _ = trainer(tmp_path, **options)
    made.args.fp16, made.args.max_grad_norm = True, 0.0
    callback = next(each for each in made.callback_handler.callbacks if isinstance(each, sc.hf.RankCallback))
    refused = pytest.raises(UserError, match="set max_grad_norm above 0") if adds else nullcontext()
    with refused:
        callback.on_train_begin(made.args, made.state, made.control)
