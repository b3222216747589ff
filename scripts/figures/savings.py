"""The chart of the README: costs with and without Scantling, from raw files in `benchmarks/results`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from scripts.figures.drawing import Drawing

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
MIB, GB = 2**20, 1e9


class Pair(NamedTuple):
    """Two measurements of the same quantity."""

    title: str
    setting: str
    names: tuple[str, str]
    values: tuple[float, float]
    unit: str


def lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RESULTS / name).read_text().splitlines()]


def content(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / name).read_text())


def step_memory() -> Pair:
    """Return the peak memory of a step; freed blocks go back to the system in both runs."""
    peaks = {
        line["row"]: line["peak_above_base_bytes"] / MIB
        for line in lines("six-encoder.jsonl")
        if line.get("measure") == "memory" and line["batch"] == 1 and line["gives_back"]
    }
    return Pair(
        "Memory of a training step",
        "67M-parameter transformer, batch 1, CPU",
        ("dense layers", "TT layers"),
        (peaks["dense"], peaks["cores"]),
        "MiB",
    )


def optimizer_state() -> Pair:
    state = {
        line["optimizer"]: (line.get("state_bytes") or 0) / GB
        for line in content("optim-bytes-2026-11-21.json")["state"]
        if line["shapes"] == "Llama-3-8B" and line["weights"] == "fp32"
    }
    return Pair(
        "Optimizer state",
        "shapes of Llama-3-8B, fp32 weights",
        ("AdamW", "CAME, int8"),
        (state["torch AdamW"], state["CAME int8"]),
        "GB",
    )


def sent_bytes() -> Pair:
    """Return the bytes per step that the interface of the replica that sends most counted."""
    methods = content("network-2-100mbit-llama-10m-8k-batch32-2026-12-01.json")["methods"]

    def megabytes(method: str) -> float:
        return max(rank["sent_bytes"] for ranks in methods[method] for rank in ranks) / 1e6

    return Pair(
        "Sent per step",
        "15M parameters, vocabulary of 8,192, two replicas",
        ("DDP, fp16", "15 local steps"),
        (megabytes("ddp fp16"), megabytes("ours muon h15")),
        "MB",
    )


def weights_on_disk() -> Pair:
    run = content("quantize-demo-gptq-2026-11-27.json")
    loss = f"loss {run['before']['eval_loss']:.4f} to {run['after']['eval_loss']:.4f}"
    return Pair(
        "Weights on disk",
        f"3.5M parameters, {loss}",
        ("fp32", "int4, GPTQ"),
        (run["bytes"]["as_trained"] / MIB, run["bytes"]["written"] / MIB),
        "MiB",
    )


def digits(value: float, count: int = 3) -> str:
    """Return a value from 20 on as a whole number, a smaller one with `count` significant digits."""
    return f"{value:,.0f}" if value >= 20 else f"{value:.{count}g}"


def savings() -> str:
    pairs = [step_memory(), optimizer_state(), sent_bytes(), weights_on_disk()]
    drawing = Drawing(540, 78 * len(pairs) + 14, "Memory, traffic and size on disk, with and without Scantling")
    left, longest = 120, 300
    for number, pair in enumerate(pairs):
        top = 78 * number + 14
        drawing.text(10, top + 14, pair.title, "bold")
        drawing.text(530, top + 14, pair.setting, "muted", "end")
        for row, (name, value) in enumerate(zip(pair.names, pair.values, strict=True)):
            y, width = top + 24 + 22 * row, longest * value / pair.values[0]
            drawing.text(10, y + 14, name)
            drawing.rect(left, y, width, 18, "accent" if row else "plain")
            factor = f"  ({digits(pair.values[0] / value, 2)} times less)" if row else ""
            drawing.text(left + width + 8, y + 14, f"{digits(value)} {pair.unit}{factor}")
    return drawing.svg()


def draw_figures() -> dict[str, str]:
    return {"savings.svg": savings()}
