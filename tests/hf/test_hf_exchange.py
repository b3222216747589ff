"""Tests of a momentum exchange in the Trainer of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import SaveStrategy

import scantling as sc
from scantling.errors import UserError
from tests.hf.test_hf_trainer import Sequences, StopAtThree
from tests.processes import run

SIGN = sc.hf.sign(lr=3e-3, weight_decay=0.1)


def trainer(
    folder: Path, optimizer: Any = SIGN, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[Trainer, sc.hf.ExchangeCallback]:
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "vocab_size": 64}
    model = LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=2, num_key_value_heads=2)).to(dtype)
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=6,
        save_steps=3,
        logging_steps=1,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    made = Trainer(
        model=model,
        args=arguments,
        train_dataset=Sequences(),
        optimizer_cls_and_kwargs=optimizer,
    )
    return made, sc.hf.attach(made, **{"topk": 64, "dense": "sign", **options})


def straight_and_resumed(folder: Path) -> None:
    straight, callback = trainer(folder / "straight")
    straight.train()
    first, _ = trainer(folder / "parted")
    first.add_callback(StopAtThree())
    first.train()
    second, resumed = trainer(folder / "parted")
    second.train(resume_from_checkpoint=True)
    start = trainer(folder / "start")[0].model
    for (name, one), other in zip(straight.model.named_parameters(), second.model.named_parameters(), strict=True):
        assert torch.equal(one, other[1]), name
        assert not torch.equal(one, start.get_parameter(name)) or "norm" in name
    assert callback.exchange is not None
    assert resumed.exchange is not None
    local = [each.exchange.local_state_dict()["residuals"] for each in (callback, resumed)]
    assert all(torch.equal(local[0][name], local[1][name]) for name in local[0])
    if not dist.is_initialized():
        return
    flat = torch.cat([param.detach().flatten() for param in straight.model.parameters()])
    own = torch.cat([value.flatten() for value in local[0].values()])
    for values, alike in ((flat, True), (own, False)):
        found = [torch.empty_like(values) for _ in range(dist.get_world_size())]
        dist.all_gather(found, values)
        assert torch.equal(found[0], found[1]) is alike
    assert callback.exchange.wire_bytes > 0
    assert straight.state.log_history[-2]["wire_bytes"] == callback.exchange.wire_bytes


def test_resume_is_bitwise(tmp_path: Path) -> None:
    straight_and_resumed(tmp_path)


INNER = {"adamw": (torch.optim.AdamW, {"lr": 3e-3}), "muon": sc.hf.muon(lr=3e-3, embedding_lr=1e-2)}


def local_steps_straight_and_resumed(folder: Path, dtype: torch.dtype, inner: str) -> None:
    """Exchanges after steps 2, 3 (a checkpoint), 4, 6; each process has its own optimizer."""
    options = {"optimizer": INNER[inner], "local_steps": 2, "values": "sign", "outer_lr": 1.3, "dtype": dtype}
    straight, callback = trainer(folder / "straight", **options)
    straight.train()
    sent = [entry["wire_bytes"] for entry in straight.state.log_history if "loss" in entry]
    if dist.get_world_size() > 1:
        assert [bool(each) for each in sent] == [False, True, True, True, False, True]
        rare, _ = trainer(folder / "rare", **options)
        rare.args.logging_steps = 5
        rare.train()
        (mean,) = [entry["wire_bytes"] for entry in rare.state.log_history if "loss" in entry]
        assert mean == round(sum(sent[:5]) / 5)
    first, _ = trainer(folder / "parted", **options)
    first.add_callback(StopAtThree())
    first.train()
    second, resumed = trainer(folder / "parted", **options)
    second.train(resume_from_checkpoint=True)
    for (name, one), other in zip(straight.model.named_parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one, other), name
    moments = [first_moments(each.optimizer) for each in (straight, second)]
    assert len(moments[0]) == len(list(straight.model.parameters()))
    assert all(torch.equal(*pair) for pair in zip(*moments, strict=True))
    assert callback.outer is not None
    assert resumed.outer is not None
    assert callback.outer.steps == resumed.outer.steps == 6
    assert all(torch.equal(*pair) for pair in zip(callback.outer.anchors, resumed.outer.anchors, strict=True))
    if dist.get_world_size() == 1:
        return
    own = torch.cat([moment.flatten() for moment in moments[0]])
    flat = torch.cat([param.detach().flatten() for param in straight.model.parameters()])
    for values, alike in ((flat, True), (own, False)):
        found = [torch.empty_like(values) for _ in range(dist.get_world_size())]
        dist.all_gather(found, values)
        assert torch.equal(found[0], found[1]) is alike


def first_moments(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    names = ("exp_avg", "momentum_buffer")
    states = optimizer.state_dict()["state"].values()
    return [state[name] for state in states for name in names if name in state]


@pytest.mark.dist
@pytest.mark.parametrize(
    ("processes", "dtype", "inner"),
    [
        (1, torch.float32, "adamw"),
        (2, torch.float32, "adamw"),
        (2, torch.bfloat16, "adamw"),
        (2, torch.float32, "muon"),
    ],
)
def test_local_steps_resume_bitwise(processes: int, dtype: torch.dtype, inner: str, tmp_path: Path) -> None:
    run(processes, local_steps_straight_and_resumed, tmp_path, dtype, inner)


class SaveAtOne(TrainerCallback):
    """Asks for a checkpoint after the first step, and keeps the weights that it has and the logs."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_save = state.global_step == 1

    def on_save(self, args: Any, state: Any, control: Any, *, model: torch.nn.Module, **_: Any) -> None:
        self.saved = torch.cat([param.detach().flatten() for param in model.parameters()])

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.logs = getattr(self, "logs", None) or dict(logs)


def saved_by_a_later_callback(folder: Path) -> None:
    made, _ = trainer(folder, local_steps=5)
    made.args.save_strategy = "no"
    asks = SaveAtOne()
    made.add_callback(asks)
    made.train()
    found = [torch.empty_like(asks.saved) for _ in range(dist.get_world_size())]
    dist.all_gather(found, asks.saved)
    assert torch.equal(found[0], found[1])
    assert asks.logs["wire_bytes"] > 0


@pytest.mark.dist
def test_a_checkpoint_that_a_later_callback_asks_for_has_synchronized_weights(tmp_path: Path) -> None:
    run(2, saved_by_a_later_callback, tmp_path)


class Listen(TrainerCallback):
    """Notes what the processes send to each other from the second step to the end of the third."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 1:
            self.profile = torch.profiler.profile()
            self.profile.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 3:
            self.profile.stop()
            names = [event.key for event in self.profile.key_averages()]
            self.sent = [name for name in names if name.startswith(("gloo:", "c10d::"))]


def local_steps_without_an_exchange(folder: Path) -> None:
    made, _ = trainer(folder, local_steps=5)
    made.args.save_strategy, made.args.logging_steps = "no", 100
    listen = Listen()
    made.add_callback(listen)
    made.train()
    assert listen.profile.key_averages()
    assert listen.sent == []


@pytest.mark.dist
def test_nothing_is_sent_between_the_exchanges_of_local_steps(tmp_path: Path) -> None:
    """On a link across a continent each message would cost as much time as many steps."""
    run(2, local_steps_without_an_exchange, tmp_path)


def stopped_between_exchanges(folder: Path) -> None:
    made, callback = trainer(folder, local_steps=5)
    made.args.save_strategy = "no"
    made.add_callback(StopAtThree())
    made.train()
    assert callback.outer is not None
    assert callback.outer.is_synchronized
    flat = torch.cat([param.detach().flatten() for param in made.model.parameters()])
    found = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(found, flat)
    assert torch.equal(found[0], found[1])


@pytest.mark.dist
def test_training_that_stops_between_exchanges_ends_with_equal_weights(tmp_path: Path) -> None:
    run(2, stopped_between_exchanges, tmp_path)


def test_local_steps_send_all_elements_of_small_blocks(tmp_path: Path) -> None:
    made, attached = trainer(tmp_path)
    made.remove_callback(attached)
    callback = sc.hf.attach(made, local_steps=2, chunk=4)
    made.train()
    assert callback.exchange is not None
    assert callback.exchange.param_groups[0]["topk"] == 16


def test_outer_lr_needs_local_steps(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="outer_lr has an effect with local_steps alone"):
        trainer(tmp_path, outer_lr=0.5)
    with pytest.raises(UserError, match="sync_every must be an integer of at least 1"):
        trainer(tmp_path, local_steps=0)


def separate_folders(folder: Path) -> None:
    """Run each process with a private output folder, as on machines without a shared file system."""
    made, callback = trainer(folder / f"machine{dist.get_rank()}")
    with pytest.raises(UserError, match=r"do not share the output_dir .* save_on_each_node=True"):
        made.train()
    made.args.save_on_each_node = True
    made.train()
    assert callback.exchange is not None


@pytest.mark.dist
def test_machines_without_shared_folder_must_save_on_each_node(tmp_path: Path) -> None:
    run(2, separate_folders, tmp_path)


@pytest.mark.dist
def test_resume_is_bitwise_on_two_processes(tmp_path: Path) -> None:
    run(2, straight_and_resumed, tmp_path)


def train_twice(folder: Path) -> None:
    made, callback = trainer(folder)
    made.train()
    made.train()
    assert callback.exchange is not None
    assert callback.exchange.step == 6


@pytest.mark.dist
def test_trainer_trains_twice(tmp_path: Path) -> None:
    run(2, train_twice, tmp_path)


def test_compiled_model_does_not_average(tmp_path: Path) -> None:
    """The Trainer compiles the model that DistributedDataParallel has wrapped."""
    _, callback = trainer(tmp_path)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        wrapped = DistributedDataParallel(torch.nn.Linear(2, 2))
        callback._keep_gradients_local(torch.compile(wrapped))
        with pytest.raises(RuntimeError, match=r"register_comm_hook can only be called once|only be called once"):
            wrapped.register_comm_hook(None, noop_hook)
        callback._keep_gradients_local(wrapped)
    finally:
        dist.destroy_process_group()


def test_attach_refuses_processes_without_ddp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, callback = trainer(tmp_path)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    with pytest.raises(UserError, match="the Trainer trains a Linear on 2 processes without DistributedData"):
        callback._keep_gradients_local(torch.nn.Linear(2, 2))


def averaged_by_the_trainer(folder: Path) -> None:
    made, _ = trainer(folder)
    for optimizer in ({"optimizers": (sc.DeMo(made.model.parameters(), lr=1e-3), None)}, {}):
        given = optimizer or {"optimizer_cls_and_kwargs": (sc.DeMo, {"lr": 1e-3})}
        plain = Trainer(model=made.model, args=made.args, train_dataset=Sequences(), **given)
        with pytest.raises(UserError, match=r"in DistributedDataParallel, which averages.* use sc\.hf\.attach"):
            plain.train()


@pytest.mark.dist
def test_demo_without_attach_refuses_averaged_gradients(tmp_path: Path) -> None:
    run(2, averaged_by_the_trainer, tmp_path)


def test_attach_refuses_optimizers_that_exchange(tmp_path: Path) -> None:
    made, _ = trainer(tmp_path)
    options: dict[str, Any] = {"model": made.model, "args": made.args, "train_dataset": Sequences()}
    given = Trainer(**options, optimizers=(sc.DeMo(made.model.parameters(), lr=1e-3), None))
    with pytest.raises(UserError, match=r"optimizer is DeMo, which also exchanges"):
        sc.hf.attach(given)
    built = Trainer(**options, optimizer_cls_and_kwargs=(sc.DeMo, {"lr": 1e-3}))
    sc.hf.attach(built)
    with pytest.raises(UserError, match=r"optimizer is DeMo, which also exchanges"):
        built.train()


@pytest.mark.parametrize("beta1", [0.9, 0.0])
@pytest.mark.parametrize("name", ["adamw", "came"])
def test_optimizer_with_momentum_warns(
    tmp_path: Path, name: str, beta1: float, caplog: pytest.LogCaptureFixture
) -> None:
    made, _ = trainer(tmp_path)
    args = TrainingArguments(str(tmp_path), max_steps=2, use_cpu=True, report_to="none", adam_beta1=beta1)
    came = {"optimizer_cls_and_kwargs": sc.hf.came(lr=1e-3, betas=(beta1, 0.95, 0.995))}
    options: dict[str, Any] = {} if name == "adamw" else came
    other = Trainer(model=made.model, args=args, train_dataset=Sequences(), **options)
    sc.hf.attach(other, topk=8)
    other.train()
    assert caplog.text.count("has its own momentum") == (beta1 > 0)


def test_checkpoint_after_an_epoch_has_the_common_weights(tmp_path: Path) -> None:
    """The flags of an epoch's end are set after those of its last step."""
    made, callback = trainer(tmp_path, (torch.optim.AdamW, {"lr": 3e-3}), local_steps=5, topk=8)
    made.args.save_strategy, made.args.max_steps, made.args.num_train_epochs = SaveStrategy.EPOCH, -1, 2
    seen: list[tuple[int, bool]] = []

    class Watch(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            assert callback.outer is not None
            equal = map(torch.equal, callback.outer.anchors, callback.outer.exchange.residuals.params)
            seen.append((state.global_step, all(equal)))

    made.add_callback(Watch())
    made.train()
    assert seen
    assert seen[0][0] % 5
    assert all(is_common for _, is_common in seen)


def test_resume_without_residuals_raises(tmp_path: Path) -> None:
    first, _ = trainer(tmp_path)
    first.add_callback(StopAtThree())
    first.train()
    (tmp_path / "checkpoint-3" / "exchange-rank0.pt").unlink()
    second, _ = trainer(tmp_path)
    with pytest.raises(UserError, match=r"exchange-rank0\.pt is missing"):
        second.train(resume_from_checkpoint=True)


def stop_at_three(folder: Path, options: dict[str, Any]) -> None:
    first, callback = trainer(folder, **options)
    first.add_callback(StopAtThree())
    first.train()
    assert callback.exchange is not None
    residuals = callback.exchange.local_state_dict()["residuals"]
    torch.save(residuals, folder / f"residuals-{dist.get_rank()}.pt")


def resume_at_three(folder: Path, options: dict[str, Any]) -> None:
    """The residuals before step 4 are the mean of those saved, and the training goes on to the end."""
    second, callback = trainer(folder, **options)
    second.train(resume_from_checkpoint=True)
    assert second.state.global_step == 6
    assert callback.exchange is not None
    saved = [torch.load(path) for path in sorted(folder.glob("residuals-*.pt"))]
    callback._load_state(callback._read_state(folder / "checkpoint-3"))
    for name, value in callback.exchange.local_state_dict()["residuals"].items():
        torch.testing.assert_close(value, sum(state[name] for state in saved) / len(saved))
    if callback.outer is not None:
        assert callback.outer.steps == 3
    flat = torch.cat([param.detach().flatten() for param in second.model.parameters()])
    found = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(found, flat)
    assert all(torch.equal(found[0], each) for each in found)


@pytest.mark.dist
@pytest.mark.parametrize("before", [1, 2])
@pytest.mark.parametrize("options", [{}, {"local_steps": 2}], ids=["momentum", "local steps"])
def test_resume_on_another_number_of_processes(tmp_path: Path, before: int, options: dict[str, Any]) -> None:
    run(before, stop_at_three, tmp_path, options)
    run(3 - before, resume_at_three, tmp_path, options)


def test_attach_refuses_unsupported_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, _ = trainer(tmp_path)
    with pytest.raises(UserError, match="topk must be at most"):
        sc.hf.attach(made, topk=17, chunk=4)
    with pytest.raises(UserError, match="attach once"):
        sc.hf.attach(made)
    made.args.enable_jit_checkpoint = True
    with pytest.raises(UserError, match="enable_jit_checkpoint saves without calling callbacks"):
        sc.hf.attach(made)
    made.args.enable_jit_checkpoint = False
    with pytest.raises(UserError, match="overlap sends gradients before the Trainer clips them"):
        sc.hf.attach(made, overlap=True)
    monkeypatch.setattr(made, "is_fsdp_enabled", True)
    with pytest.raises(UserError, match="with FSDP the Trainer averages gradients"):
        sc.hf.attach(made)
    with pytest.raises(UserError, match="momentum must be from 0"):
        sc.hf.sign(lr=1e-3, momentum=2.0)
    with pytest.raises(UserError, match="momentum should be >= 0"):
        sc.hf.muon(lr=1e-3, momentum=-1.0)
