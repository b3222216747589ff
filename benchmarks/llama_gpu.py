"""Compare the loss of a Llama at equal wall-clock time on one GPU: tuned dense against small layers with CAME.

    python benchmarks/llama_gpu.py                     a Llama of 130 million parameters on the Python sources here
    python benchmarks/llama_gpu.py --device cpu        a tiny model for a few steps, only to try the script

The text is the bytes of the Python sources of this machine, and every fiftieth file is held out. Each contender trains
for the same seconds, which begin after compilation and capture: the whole step is one CUDA graph. The learning rate
depends on the elapsed time: it rises for a twentieth of it, then falls linearly to 0. The cores of layers have a third
of it. Computation is in bf16 (autocast), weights are in fp32. Dense layers have fused AdamW and a clipped gradient
norm.
"""

from __future__ import annotations

import argparse
import gc
import sys
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from dated import dated, write
from optim_gpu import capture_graph
from torch import Tensor, nn

import scantling as sc

MAX_BYTES = 400 << 20
HELD_OUT_FILES = 50
"""One of so many files is held out."""
WARM_UP_SHARE = 0.05
SHAPES: dict[str, dict[str, Any]] = {
    "130m": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12},
    "tiny": {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 2},
}


@dataclass(frozen=True)
class Contender:
    """A model and its learning rate.

    Attributes:
        lr: peak of the learning rate.
        layers: arguments of `sc.tensorize`, with ranks as fractions of the width; empty for dense layers.
    """

    lr: float
    layers: dict[str, Any] = field(default_factory=dict)


CONTENDERS = {
    "dense, AdamW": Contender(1e-3),
    "CoLA at a quarter of the width, CAME": Contender(2e-3, {"rank": 0.25, "format": "cola"}),
    "TT at a quarter of the width, CAME": Contender(2e-3, {"rank": 0.25, "format": "tt"}),
    "low rank at a quarter of the width, CAME": Contender(2e-3, {"rank": 0.25, "format": "low-rank"}),
}


def read_sources(limit: int) -> dict[str, Tensor]:
    """Return the bytes of the Python sources of this machine as training and held-out text."""
    paths = {Path(sysconfig.get_paths()[name]) for name in ("stdlib", "purelib")}
    files = sorted({file for path in paths for file in path.rglob("*.py")})
    parts: dict[str, list[bytes]] = {"train": [], "valid": []}
    size = 0
    for number, file in enumerate(files):
        text = file.read_bytes()
        parts["train" if number % HELD_OUT_FILES else "valid"].append(text)
        size += len(text)
        if size > limit:
            break
    return {name: torch.from_numpy(np.frombuffer(b"".join(own), np.uint8).copy()) for name, own in parts.items()}


class Run:
    """Training run of a contender, whose steps the host only launches."""

    def __init__(self, contender: Contender, text: dict[str, Tensor], options: argparse.Namespace) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        shape = SHAPES["tiny" if options.device == "cpu" else "130m"]
        self._contender, self._text, self._device = contender, text, options.device
        self._batch, self._length = (2, 32) if options.device == "cpu" else (options.batch, 1024)
        torch.manual_seed(0)
        config = LlamaConfig(**shape, vocab_size=256, max_position_embeddings=self._length, tie_word_embeddings=True)
        self.model: Any = LlamaForCausalLM(config)
        groups: Any = self.model.parameters()
        if contender.layers:
            rank = round(contender.layers["rank"] * shape["hidden_size"])
            sc.tensorize(self.model, {"*_proj": rank}, format=contender.layers["format"])
        self.model.to(options.device).train()
        capturable = options.device == "cuda"
        if contender.layers:
            groups = sc.param_groups(self.model, core_lr=contender.lr / 3)
            settings = {"betas": (0.9, 0.95, 0.995), "debias": True, "momentum": "int8", "capturable": capturable}
            self._optimizer: torch.optim.Optimizer = sc.CAME(groups, lr=contender.lr, **settings)
        else:
            settings = {"betas": (0.9, 0.95), "fused": True, "capturable": capturable}
            self._optimizer = torch.optim.AdamW(groups, lr=torch.tensor(contender.lr), **settings)
        self._peaks = [float(group["lr"]) for group in self._optimizer.param_groups]
        for group in self._optimizer.param_groups:
            group["lr"] = torch.full((), 0.0, device=options.device)
        self._window = torch.arange(self._length + 1, device=options.device)
        self._starts = torch.zeros(self._batch, 1, dtype=torch.long, device=options.device)
        self.loss = torch.zeros((), device=options.device)
        if options.device == "cuda":
            self.model.compile()

    def _ids(self, text: Tensor, starts: Tensor) -> Tensor:
        return text[starts + self._window].long()

    def step(self) -> None:
        """Run one step on the windows at the current starts."""
        ids = self._ids(self._text["train"], self._starts)
        self.model.zero_grad(set_to_none=True)
        loss = self._loss(ids)
        loss.backward()
        if not self._contender.layers:
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self.loss.copy_(loss.detach())

    def _loss(self, ids: Tensor) -> Tensor:
        with torch.autocast(self._device, torch.bfloat16):
            logits = self.model(input_ids=ids[:, :-1], use_cache=False).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())

    def train(self, seconds: float) -> dict[str, Any]:
        """Train for some seconds; return the losses."""
        most = len(self._text["train"]) - self._length - 1
        generator = torch.Generator().manual_seed(0)

        def prepare(share: float) -> None:
            starts = torch.randint(most, (self._batch, 1), generator=generator)
            self._starts.copy_(starts.pin_memory() if self._device == "cuda" else starts, non_blocking=True)
            factor = min(share / WARM_UP_SHARE, (1.0 - share) / (1.0 - WARM_UP_SHARE))
            for group, peak in zip(self._optimizer.param_groups, self._peaks, strict=True):
                group["lr"].fill_(peak * max(0.0, factor))

        launch: Callable[[], None] = self.step
        for _ in range(3):  # compiles kernels and allocates the state, at a rate of 0
            prepare(0.0)
            self.step()
        if self._device == "cuda":
            launch = capture_graph(self.step)
        curve: list[tuple[int, float]] = []
        steps, began = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - began) < seconds:
            prepare(elapsed / seconds)
            launch()
            steps += 1
            if steps % 20 == 0:
                curve.append((steps, float(self.loss)))  # waits, so that the host is never far ahead
        return {"steps": steps, "tokens": steps * self._batch * self._length, "curve": curve}

    @torch.no_grad()
    def evaluate(self, windows: int) -> float:
        """Return the mean loss of the held-out text in nats per byte."""
        text, losses = self._text["valid"], []
        starts = torch.linspace(0, len(text) - self._length - 2, windows).long().to(self._device)
        for part in starts.view(-1, 1).split(self._batch):
            losses.append(self._loss(self._ids(text, part)))
        return float(torch.stack(losses).mean())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu only tries the script")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each contender, without compilation")
    parser.add_argument("--batch", type=int, default=64, help="sequences of 1,024 bytes")
    parser.add_argument("--only", nargs="+", choices=CONTENDERS)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    is_dry = options.device == "cpu"
    text = {name: own.to(options.device) for name, own in read_sources(1 << 20 if is_dry else MAX_BYTES).items()}
    print(f"{len(text['train']):,} bytes to train, {len(text['valid']):,} held out")
    results: dict[str, Any] = {}
    for name in options.only or CONTENDERS:
        run = Run(CONTENDERS[name], text, options)
        numbers = sum(param.numel() for param in run.model.parameters())
        found = run.train(0.5 if is_dry else options.seconds)
        results[name] = {"num_parameters": numbers, "valid_loss": run.evaluate(4 if is_dry else 512), **found}
        row = results[name]
        print(f"{name:42} {numbers:>12,} parameters {row['steps']:6} steps   {row['valid_loss']:.4f} nats", flush=True)
        print(write(dated(__file__, seconds=options.seconds, results=results), "llama-gpu", options.out))
        del run
        gc.collect()
    return 0


if __name__ == "__main__":
    sys.exit(main())
