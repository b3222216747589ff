"""`scantling quantize`: quantize the weights of a trained run to low precision."""

from __future__ import annotations

from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scantling.cli.console import LOADING, busy, make_console, print_json, print_labeled
from scantling.torchrun_env import require_single_process

if TYPE_CHECKING:
    from rich.table import Table

    from scantling.trainer.training.quantize import Prediction, QuantizedRun


def quantize(
    run: Path,
    weights: str,
    method: str,
    *,
    group_size: int | None,
    clip: str,
    embeddings: bool,
    calibration: int,
    out: Path | None,
    dequantized: bool,
    device: str | None,
    verbose: bool,
    as_json: bool,
) -> int:
    with busy(LOADING):
        from scantling.precision.weights import check_method
        from scantling.trainer.models.build import quiet
        from scantling.trainer.training.quantize import quantize_run

    way = check_method(method)
    console = make_console()
    require_single_process("quantize")
    given: dict[str, Any] = {"format": weights}
    if group_size is not None:
        given["group_size"] = group_size
    if clip != "absmax":
        given["clip"] = clip
    ways = {
        f"g{group_size}": group_size is not None,
        clip: clip != "absmax",
        "embeddings": embeddings,
        "plain": dequantized,
    }
    name = "-".join(["quantized", weights, *(way for way, is_taken in ways.items() if is_taken), method])
    folder = out or run / name
    with quiet(), busy("quantizing"):
        done = quantize_run(
            run,
            given,
            folder,
            method=way,
            embeddings=embeddings,
            sequences=calibration,
            dequantized=dequantized,
            device=device,
        )
    if as_json:
        print_json(summary(done))
        return 0
    for label, text in _lines(done, "transformers" if dequantized else "sc.load"):
        print_labeled(console, label, text)
    if verbose:
        console.print(_table(done))
    return 0


def summary(done: QuantizedRun) -> dict[str, Any]:
    """Return the result as JSON values."""
    return {
        "folder": str(done.folder),
        "step": done.step,
        "weights": done.quantizer,
        "trained_bits": done.trained,
        "method": done.method,
        "before": done.before,
        "after": done.after,
        "degradation": done.after["eval_loss"] - done.before["eval_loss"],
        "predicted": [
            {
                "law": each.law,
                "source": each.source,
                "degradation": each.degradation,
                "fitted_on": each.fitted,
                "outside": each.outside,
                "unknown": each.unknown,
            }
            for each in done.predictions
        ],
        "parameters_without_embeddings": done.parameters,
        "tokens": done.tokens,
        "bytes": {
            "written": done.saved.written,
            "as_trained": done.saved.plain,
            "bf16": 2 * done.saved.num_elements,
            "in_memory": done.memory,
        },
        "layers": {
            name: {
                "format": weight.packed.format,
                "method": weight.method,
                "shape": weight.packed.shape,
                "bytes": weight.packed.nbytes,
                "weight_error": weight.weight_error,
                "output_error": weight.output_error,
            }
            for name, weight in done.weights.items()
        },
    }


def _table(done: QuantizedRun) -> Table:
    from rich.table import Table
    from rich.text import Text

    from scantling.trainer.reporting.format import format_bytes, format_percent

    table = Table(title=Text(f"{done.quantizer}, {done.method}, step {done.step}"), title_justify="left")
    places = zip(*(name.split(".")[:-1] for name in done.weights), strict=False)
    shared = "".join(f"{same[0]}." for same in takewhile(lambda each: len(set(each)) == 1, places))
    table.add_column(Text(f"{shared}…"), overflow="fold")
    for header in ("shape", "packed", "weight error", "output error"):
        table.add_column(header, justify="right")
    for name, weight in done.weights.items():
        errors = (format_percent(each, 2) for each in (weight.weight_error, weight.output_error))
        rows, columns = weight.packed.shape
        shown = name.removeprefix(shared).removesuffix(".weight") + (" (rtn)" if weight.method != done.method else "")
        table.add_row(Text(shown), f"{rows} × {columns}", format_bytes(weight.packed.nbytes), *errors)
    return table


def _lines(done: QuantizedRun, reader: str) -> list[tuple[str, str]]:
    """Return the result as lines, each a label and a text."""
    from scantling.trainer.reporting.format import format_bytes, format_difference, format_ratio

    before, after = done.before["eval_loss"], done.after["eval_loss"]
    saved, half = done.saved, 2 * done.saved.num_elements
    others = ((f"as trained {format_bytes(saved.plain)}", saved.plain), (f"in bf16 {format_bytes(half)}", half))
    compared = ", ".join(f"{text} ({format_ratio(saved.written, size)})" for text, size in others)
    nearest = sum(weight.method != done.method for weight in done.weights.values())
    stored = "sc.load unpacks the weights to" if reader == "sc.load" else "the weights are stored in"
    rounded = f", {nearest} of them to the nearest" if nearest else ""
    return [
        ("loss", f"{before:.4f} held out before, {after:.4f} after: {format_difference(after, before)} nats"),
        *(("predicted", _predicted(each)) for each in done.predictions),
        ("on disk", f"{format_bytes(saved.written)}; {compared}"),
        (
            "in memory",
            f"{format_bytes(done.memory)}: {stored} {done.dtype}, so the model is no smaller there, nor faster",
        ),
        ("weights", f"{len(done.weights)} in {done.quantizer}, {done.method}, step {done.step}{rounded}"),
        ("folder", f"{done.folder}, which {reader} reads"),
    ]


def _predicted(law: Prediction) -> str:
    from scantling.trainer.reporting.format import format_number

    ranges = [f"{name} {format_number(low)} to {format_number(high)}" for name, (low, high) in law.fitted.items()]
    left = " and ".join(text.partition(" = ")[0] for text in law.outside)
    outside = f"; {left} of this run outside of that" if left else ""
    if law.unknown:
        outside += f"; it knows nothing of few bits of {' and '.join(law.unknown)} in training"
    added = "no loss, as training diverges," if law.degradation is None else f"{law.degradation:+.4f} nats"
    return f"{added} by the {law.law} law, fitted on {', '.join(ranges)}{outside}"
