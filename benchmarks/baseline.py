"""Measure the overhead of our training loop and of HF Trainer over a bare PyTorch loop.

Reports step time, tokens/s and peak memory.

    python benchmarks/baseline.py --presets llama-1m llama-10m --threads 1           # CPU, steadier on one thread
    python benchmarks/baseline.py --presets llama-130m --device cuda --compute bf16 --compile --blocks

Three loops train the same model from the same weights on the same batches, with the same AdamW, clipping and schedule:
`bare` (the control: 40 lines of PyTorch below), `ours` (with its recipe and metrics) and `trainer` (HF Trainer without
saving and reporting). By default, all loops run in one process and take turns step by step. The control runs twice. A
loop's turn ends when it asks for its next batch, so a disturbance of the machine hits all loops equally. The time of a
step is from the start of the turn to the request for the next batch.

`--blocks` runs each loop alone in its own process, several rounds in rotation. This is the right choice for a GPU and
gives the peak memory. On a CPU, the memory is measured this way too.

The result is the median ratio to the control with its 95 % bootstrap interval. It is refused if the control's own step
time varies by more than 15 % (interquartile range over median).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from dated import dated, write

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # the pools of waiting loops must not spin

import numpy as np
import torch

from scantling.distributed.context import DistContext
from scantling.trainer.data.loader import Batch, BatchSource
from scantling.trainer.data.sampler import Sampler
from scantling.trainer.planning.resolve import ResolvedRun
from scantling.trainer.recipe import check_recipe
from scantling.trainer.recipe.schema import Recipe
from scantling.trainer.tasks import get_task
from scantling.trainer.training.build import build_loop, build_run_model
from scantling.trainer.training.checkpoint import Checkpointer
from scantling.trainer.training.meters import EnergyMeter, MemoryMeter
from scantling.trainer.training.schedule import lr_factor
from scantling.trainer.training.sinks import JsonlSink

LOOPS = ("bare", "ours", "trainer")
AGAIN = "bare-again"
"""The control, run a second time. The distance of its ratio from 1 is the resolution of this machine."""
WARMUP = 5
BUILD = threading.Lock()
"""Lock under which models are built one at a time, because they share the process's global random generator."""


class Turns:
    """Scheduler that runs one thread at a time, each once per round in random order; `next` ends a turn."""

    def __init__(self, names: Sequence[str]) -> None:
        self.times: dict[str, list[float]] = {name: [] for name in names}
        self._members, self._round = list(names), list(names)
        self._active = self._round.pop(0)
        self._random = random.Random(0)
        self._condition = threading.Condition(threading.RLock())
        self._began: dict[str, float] = {}

    def next(self, name: str) -> None:
        now = time.perf_counter()
        if name in self._began:
            self.times[name].append(now - self._began[name])
            self._pass_on()
        with self._condition:
            self._condition.wait_for(lambda: self._active == name)
        self._began[name] = time.perf_counter()

    def leave(self, name: str) -> None:
        with self._condition:
            self._members.remove(name)
            self._round = [other for other in self._round if other != name]
            if self._active == name:
                self._pass_on()

    def _pass_on(self) -> None:
        with self._condition:
            if not self._round:
                self._round = self._random.sample(self._members, len(self._members))
            self._active = self._round.pop(0) if self._round else ""
            self._condition.notify_all()


class Setup:
    """Recipe, data and device that all loops share."""

    def __init__(self, options: argparse.Namespace, preset: str) -> None:
        self.steps = options.steps + WARMUP
        self.compile = options.compile
        self.recipe: Recipe = check_recipe(
            {
                "name": "baseline",
                "model": {"preset": preset},
                "data": {"corpus": "python-stdlib", "seq_len": options.seq_len, "max_bytes": 4_000_000, "heldout": 0.0},
                "optim": {"name": "adamw", "lr": 1e-3, "weight_decay": 0.1},
                "precision": {"compute": options.compute},
                "train": {
                    "steps": self.steps,
                    "batch_size": options.batch_size,
                    "device": options.device,
                    "compile": options.compile,
                },
            }
        )
        self.device = torch.device(options.device)
        self.context = DistContext(0, 1, self.device)
        self.task = get_task("causal-lm")
        self.data = self.task.prepare(self.recipe.data, seed=0, progress=None)
        self.run = ResolvedRun(self.recipe, self.task, 1, self.device.type, self.data)

    def source(self) -> BatchSource:
        sampler = Sampler(len(self.data.train), batch_size=self.recipe.batch_size, seed=0)
        return BatchSource(
            self.data.train,
            self.data.collate,
            sampler,
            micro_batch_size=self.recipe.batch_size,
            rank=0,
            world_size=1,
            workers=0,
            pin_memory=False,
        )

    def batches(self, turn: Callable[[], None]) -> Iterator[Batch]:
        source = self.source()
        for _ in range(self.steps):
            turn()
            yield source.next_step()[0]
        turn()

    def model(self) -> Any:
        with BUILD:
            return build_run_model(self.run).to(self.device)

    def lr(self, step: int) -> float:
        return lr_factor(step, steps=self.steps, schedule="cosine", warmup=0.05, min_ratio=0.1)


def adamw(model: Any) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-3)


def bare(setup: Setup, turn: Callable[[], None]) -> list[float]:
    """Run the control: a hand-written loop that reads the loss at every step."""
    model = setup.model()
    model.train()
    if setup.compile:
        model.compile()
    optimizer = adamw(model)
    amp = torch.autocast(setup.device.type, torch.bfloat16, enabled=setup.recipe.precision.compute == "bf16")
    losses = []
    for step, batch in enumerate(setup.batches(turn), start=1):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * setup.lr(step)
        ids, labels = batch.inputs["input_ids"].to(setup.device), batch.labels.to(setup.device)
        with amp:
            logits = model(input_ids=ids).logits
            loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    return losses


def ours(setup: Setup, turn: Callable[[], None]) -> list[float]:
    """Run the library's loop as `scantling train` does, with its metrics file and a checkpoint after the last turn."""
    with tempfile.TemporaryDirectory() as folder:
        memory, energy = MemoryMeter(setup.device), EnergyMeter(setup.device)
        checkpointer = Checkpointer(Path(folder) / "checkpoints", setup.context)
        with BUILD:
            loop = build_loop(setup.run, setup.context, checkpointer, memory=memory, energy=energy)
        loop.sink = JsonlSink(Path(folder) / "metrics.jsonl")
        take = loop.batches.next_step

        def next_step() -> list[Batch]:
            turn()
            return take()

        loop.batches.next_step = next_step  # type: ignore[method-assign]
        save = loop.save

        def last_turn_then_save() -> Path:
            turn()
            return save()

        loop.save = last_turn_then_save  # type: ignore[method-assign]
        loop.run()
        loop.sink.close()
        lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["loss"] for line in lines]


def trainer(setup: Setup, turn: Callable[[], None]) -> list[float]:
    """Run HF Trainer with the same optimizer, schedule and batches, without evaluation, saving or reporting."""
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    model = setup.model()
    losses: list[float] = []

    class Stream(torch.utils.data.IterableDataset[dict[str, torch.Tensor]]):
        def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
            for batch in setup.batches(turn):
                yield {"input_ids": batch.inputs["input_ids"], "labels": batch.labels}

    class Losses(TrainerCallback):  # type: ignore[misc]
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if logs and "loss" in logs:
                losses.append(float(logs["loss"]))

    class Shifted(Trainer):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            logits = model(input_ids=inputs["input_ids"]).logits
            return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), inputs["labels"].flatten())

        def get_train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(Stream(), batch_size=None)

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=setup.steps,
            per_device_train_batch_size=setup.recipe.batch_size,
            max_grad_norm=1.0,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=setup.device.type == "cpu",
            bf16=setup.recipe.precision.compute == "bf16",
            torch_compile=setup.compile,
            logging_nan_inf_filter=False,
        )
        optimizer = adamw(model)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: setup.lr(done + 1))
        with BUILD:  # HF Trainer seeds the process's random generator when it is constructed
            run = Shifted(
                model=model,
                args=arguments,
                train_dataset=Stream(),
                callbacks=[Losses()],
                optimizers=(optimizer, schedule),
            )
        run.remove_callback(PrinterCallback)
        run.train()
    return losses


RUNNERS: dict[str, Callable[[Setup, Callable[[], None]], list[float]]] = {
    "bare": bare,
    "ours": ours,
    "trainer": trainer,
}


def run_in_turns(options: argparse.Namespace, preset: str) -> dict[str, Any]:
    setup = Setup(options, preset)
    names = (*LOOPS, AGAIN)
    turns = Turns(names)
    losses: dict[str, list[float]] = {}
    failures: list[BaseException] = []

    def body(name: str) -> None:
        try:
            losses[name] = RUNNERS[name.removesuffix("-again")](setup, lambda: turns.next(name))
        except BaseException as error:  # a failing thread must not leave the others waiting
            failures.append(error)
        finally:
            turns.leave(name)

    threads = [threading.Thread(target=body, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    times = {name: turns.times[name][WARMUP : setup.steps] for name in names}
    return {"times": times, "losses": losses, "tokens_per_step": setup.recipe.batch_size * setup.recipe.data.seq_len}


def run_alone(options: argparse.Namespace, preset: str, name: str) -> dict[str, Any]:
    """Run one loop in this process; return its step times and its peak memory above the memory before the model."""
    setup = Setup(options, preset)
    memory = MemoryMeter(setup.device)
    marks: list[float] = []

    def turn() -> None:
        if setup.device.type == "cuda":
            torch.cuda.synchronize()
        marks.append(time.perf_counter())

    losses = RUNNERS[name](setup, turn)
    times = np.diff(marks)[WARMUP : setup.steps].tolist()
    peak = memory.peak_bytes()
    return {"times": times, "losses": losses, "peak_bytes": peak, "added_bytes": peak - memory.base_bytes}


def alone_in_process(arguments: list[str], preset: str, name: str, steps: int | None = None) -> dict[str, Any]:
    command = [sys.executable, __file__, *arguments, "--only", preset, name]
    command += [] if steps is None else ["--steps", str(steps)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stdout}{done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def summarize(times: dict[str, list[float]], tokens: int) -> dict[str, Any]:
    control = np.array(times["bare"])
    spread = float(np.subtract(*np.percentile(control, [75, 25])) / np.median(control))
    generator = np.random.default_rng(0)
    rows: dict[str, Any] = {}
    for name, own in times.items():
        ratios = np.array(own[: len(control)]) / control[: len(own)]
        draws = np.median(ratios[generator.integers(0, len(ratios), (2000, len(ratios)))], axis=1)
        low, high = np.percentile(draws, [2.5, 97.5])
        rows[name] = {
            "step_s_median": float(np.median(own)),
            "tokens_per_s_median": tokens / float(np.median(own)),
            "ratio_to_bare": float(np.median(ratios)),
            "ratio_95": [float(low), float(high)],
        }
    return {"control_spread": spread, "accepted": spread <= 0.15, "loops": rows}


def measure(options: argparse.Namespace, arguments: list[str], preset: str) -> dict[str, Any]:
    tokens = options.batch_size * options.seq_len
    if options.blocks:
        rounds = [{n: alone_in_process(arguments, preset, n) for n in LOOPS} for _ in range(options.rounds)]
        times = {n: [t for r in rounds for t in r[n]["times"]] for n in LOOPS}
        losses = {n: rounds[0][n]["losses"] for n in LOOPS}
        memory = {n: {k: rounds[0][n][k] for k in ("peak_bytes", "added_bytes")} for n in LOOPS}
    else:
        run = run_in_turns(options, preset)
        times, losses = run["times"], run["losses"]
        alone = {n: alone_in_process(arguments, preset, n, steps=6) for n in LOOPS}
        memory = {n: {k: alone[n][k] for k in ("peak_bytes", "added_bytes")} for n in LOOPS}
    worst = max(abs(a - b) / b for n in LOOPS for a, b in zip(losses[n], losses["bare"], strict=False))
    result = summarize(times, tokens)
    for name in LOOPS:
        result["loops"][name] |= memory[name]
    return {"preset": preset, **result, "largest_loss_difference": worst, "raw_step_s": times, "raw_losses": losses}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", default=["llama-1m", "llama-10m"])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--compute", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--threads", type=int, default=None, help="threads of PyTorch; fewer are steadier on a CPU")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--blocks", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--only", nargs=2, metavar=("PRESET", "LOOP"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    if options.only:
        print(json.dumps(run_alone(options, *options.only)))
        return 0
    arguments = sys.argv[1:]
    report = dated(__file__, results=[])
    for preset in options.presets:
        result = measure(options, arguments, preset)
        report["results"].append(result)
        out = write(report, f"baseline-{options.device}", options.out)
        verdict = "" if result["accepted"] else "  REFUSED: the control varies too much"
        print(f"{preset}: control spread {result['control_spread']:.1%}{verdict}")
        for name, row in result["loops"].items():
            low, high = row["ratio_95"]
            memory = f"  memory added {row['added_bytes'] / 2**20:.0f} MiB" if "added_bytes" in row else ""
            print(f"  {name:10} {row['ratio_to_bare']:.3f}x bare [{low:.3f}, {high:.3f}]{memory}")
        print(f"  largest relative loss difference to bare {result['largest_loss_difference']:.1e}")
    print(out)
    return 0 if all(result["accepted"] for result in report["results"]) else 1


if __name__ == "__main__":
    sys.exit(main())
