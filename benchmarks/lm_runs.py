"""Train one model of `lm_accuracy.py`, in steps that the host only launches.

Windows, learning rates, losses and the step count are tensors on the device. On a GPU, a CUDA graph holds the whole
step: the first steps run without it, compile kernels and allocate the optimizer's state, and are steps of the run.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lm_models import FORMS, Ops, Projections, Shape, build_groups, build_model, count_parameters
from resumable import Line, Spec, spec_key
from small_models import rate_factors, run_facts, text
from torch import Tensor

from scantling.tensor.layer import keep_merged

WARM_UP_SHARE = 0.05
CAPTURE_AFTER = 3
"""Steps without a graph."""
CHUNK = 50
"""Steps between two looks of the host at a run."""


def read_tokens(path: Path) -> dict[str, Tensor]:
    """Return the token ids of both texts; int16 holds all of them."""
    with np.load(path) as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in ("train", "valid")}


def write_tokens(path: Path, vocabulary: int) -> None:
    """Tokenize the novels with a BPE trained on them, and write the ids of both texts to one compressed file."""
    from scantling.trainer.data.prepare import prepare
    from scantling.trainer.recipe.schema import DataSection

    source = {**text("novels"), "max_bytes": None, "tokenizer": {"bpe": vocabulary}}
    prepared = prepare(DataSection(**source), seed=0)
    assert prepared.heldout is not None
    path.parent.mkdir(parents=True, exist_ok=True)
    stores = {"train": prepared.train, "valid": prepared.heldout}
    np.savez_compressed(path, **{name: store.tokens[:].astype(np.int16) for name, store in stores.items()})
    print(f"{path}: {path.stat().st_size / 2**20:.1f} MiB, {prepared.info}")


def window_starts(num_tokens: int, length: int, count: int, seed: int) -> Tensor:
    """Return the starts of windows of length + 1 tokens in random order, each epoch with another offset: (count)."""
    generator = torch.Generator().manual_seed(seed)
    parts, total = [], 0
    while total < count:
        offset = int(torch.randint(length, (), generator=generator))
        windows = (num_tokens - 1 - offset) // length
        parts.append(offset + length * torch.randperm(windows, generator=generator))
        total += windows
    return torch.cat(parts)[:count]


class Run:
    """One training run, which the host only launches.

    Args:
        spec: specification.
        tokens: result of `read_tokens`, on the device.
        stream: stream of all its work; None on a CPU.
        ops: elementwise parts of the decoder.
    """

    def __init__(self, spec: Spec, tokens: dict[str, Tensor], stream: torch.cuda.Stream | None, ops: Ops) -> None:
        self.spec, self.tokens, self.began = spec, tokens, time.time()
        self._stream, self._launched, self._marks = stream, 0, list[Any]()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._captures = stream is not None
        device = tokens["train"].device
        shape, steps, form = Shape(**spec["shape"]), spec["steps"], FORMS[spec["form"]]
        self._shape = shape
        with self._on_stream():
            torch.manual_seed(spec["seed"])
            dtype = torch.bfloat16 if stream else torch.float32
            self.model, self._adapter = build_model(form, shape, spec["fewer"], dtype)
            self.model.ops = ops
            self.counts = count_parameters(self.model)
            self.model.to(device)
            rates = {"layers": spec["lr"], "gates": spec["gate_scale"] * spec["lr"], "rest": spec["rest_lr"]}
            groups = build_groups(self.model, rates)
            self._projections: Projections | None = None
            if form.projected:
                (matrices,) = (group for group in groups if group["role"] == "matrix")
                names, params = zip(*matrices["params"], strict=True)
                self._projections = Projections(list(params), shape.width // 4)
                matrices["params"] = list(zip(names, self._projections.small, strict=True))
            peaks = torch.tensor([group["lr"] for group in groups])
            self._peaks, self.rates = peaks.to(device), peaks.to(device, copy=True)
            for index, group in enumerate(groups):
                group["lr"] = self.rates[index]  # a view
            self._optimizer = torch.optim.AdamW(
                groups, betas=(0.9, 0.95), weight_decay=0.0, fused=True, capturable=stream is not None
            )
            starts = window_starts(len(tokens["train"]), shape.length, steps * spec["batch"], spec["seed"])
            self._starts = starts.view(steps, spec["batch"]).to(device)
            self._factors = torch.tensor(rate_factors(steps, WARM_UP_SHARE), device=device)
            self._window = torch.arange(shape.length + 1, device=device)
            self.losses = torch.zeros(steps, device=device)
            self._done = torch.zeros(1, dtype=torch.long, device=device)

    def _on_stream(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _loss(self, ids: Tensor) -> Tensor:
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=self._stream is not None):
            return self.model(ids)

    def backward(self) -> Tensor:
        """Compute the gradients of the current batch; return its loss."""
        starts = self._starts.index_select(0, self._done).view(-1, 1)
        self.model.zero_grad(set_to_none=True)
        loss = self._loss(self.tokens["train"][starts + self._window].long())
        loss.backward()
        return loss.detach()

    def step(self) -> None:
        """Run one training step, without a word to the host."""
        loss = self.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        torch.mul(self._peaks, self._factors.index_select(0, self._done), out=self.rates)
        if self._projections is not None:
            self._projections.project()
        self._optimizer.step()
        if self._projections is not None:
            self._projections.expand()
        self.losses.index_copy_(0, self._done, loss.view(1))
        self._done.add_(1)

    def advance(self, limit: int = CHUNK) -> None:
        """Launch some steps."""
        with self._on_stream():
            for _ in range(min(limit, self.spec["steps"] - self._launched)):
                if self._projections is not None and self._launched % Projections.GAP == 0:
                    if self._launched == 0:
                        self.backward()
                    self._projections.refresh()
                if self._captures and self._launched == CAPTURE_AFTER:
                    self._capture()
                if self._graph is None:
                    self.step()
                else:
                    self._graph.replay()
                self._launched += 1
            if self._stream is not None:
                self._marks.append(torch.cuda.Event())
                self._marks[-1].record()

    def _capture(self) -> None:
        """Capture the step, or go on without a graph if it cannot be captured."""
        # Unlike torch.cuda.graph, this does not wait for the runs on other streams. A garbage collection could free
        # the graph of another run, which is forbidden during a capture.
        graph = torch.cuda.CUDAGraph()
        gc.collect()
        gc.disable()
        try:
            graph.capture_begin(capture_error_mode="thread_local")
            self.step()
            graph.capture_end()
            self._graph = graph
        except RuntimeError as error:
            print(f"no graph for {self.spec}: {error}", flush=True)
            self._captures = False
            with contextlib.suppress(RuntimeError):
                graph.capture_end()
        finally:
            gc.enable()

    @property
    def all_launched(self) -> bool:
        return self._launched == self.spec["steps"]

    @property
    def in_flight(self) -> int:
        """Number of calls of `advance` whose steps have not ended."""
        self._marks = [mark for mark in self._marks if not mark.query()]
        return len(self._marks)

    def finish(self, steps: int) -> None:
        """Run some steps and wait for them."""
        self.advance(steps)
        while self.in_flight:
            time.sleep(0)

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return the mean loss of the held-out text with the gates folded into the cores."""
        length = self._shape.length
        with self._on_stream(), keep_merged(self.model):
            if self._adapter is not None:
                self._adapter.detach()
            self.model.ops = Ops()
            ids = self.tokens["valid"].unfold(0, length + 1, length)[: self.spec["eval_windows"]]
            total = sum(self._loss(part.long()) * len(part) for part in ids.split(self.spec["batch"]))
            return float(total / len(ids))

    def line(self) -> Line:
        """Return the result line of a run that has ended."""
        loss = self.evaluate()
        losses = self.losses.cpu().numpy()
        spec, tokens = self.spec, self.spec["steps"] * self.spec["batch"] * self._shape.length
        return {
            "key": spec_key(spec),
            **spec,
            "eval_loss": loss if np.isfinite(loss) else None,
            "curve": [round(float(np.mean(part)), 4) for part in np.array_split(losses, min(100, len(losses)))],
            "tokens": tokens,
            "epochs": round(tokens / len(self.tokens["train"]), 3),
            "graph": self._graph is not None,
            **self.counts,
            **describe_run(self.began),
        }


def describe_run(began: float) -> dict[str, Any]:
    """Return the time that a run took, and its machine."""
    return {**_process_facts(), "seconds": round(time.time() - began, 1)}


@cache
def _process_facts() -> dict[str, Any]:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {**run_facts(time.time()), "device": device, "command": sys.argv[1:]}
