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

    checked_method = check_method(method)
    console = make_console()
    require_single_process("quantize")
    given: dict[str, Any] = {"format": weights}
    if group_size is not None:
        given["group_size"] = group_size
    if clip != "absmax":
        given["clip"] = clip
    suffixes = {
        f"g{group_size}": group_size is not None,
        clip: clip != "absmax",
        "embeddings": embeddings,
        "plain": dequantized,
    }
    name = "-".join(["quantized", weights, *(suffix for suffix, is_set in suffixes.items() if is_set), method])
    folder = out or run / name
    with quiet(), busy("quantizing"):
        result = quantize_run(
            run,
            given,
            folder,
            method=checked_method,
            embeddings=embeddings,
            sequences=calibration,
            dequantized=dequantized,
            device=device,
        )
    if as_json:
        print_json(summary(result))
        return 0
    for label, text in _lines(result, "transformers" if dequantized else "sc.load"):
        print_labeled(console, label, text)
    if verbose:
        console.print(_table(result))
    return 0


def summary(result: QuantizedRun) -> dict[str, Any]:
    """Return the result of a quantization as JSON values."""
    return {
        "folder": str(result.folder),
        "step": result.step,
        "weights": result.quantizer,
        "trained_bits": result.trained,
        "method": result.method,
        "before": result.before,
        "after": result.after,
        "degradation": result.after["eval_loss"] - result.before["eval_loss"],
        "predicted": [
            {
                "law": each.law,
                "source": each.source,
                "degradation": each.degradation,
                "fitted_on": each.fitted,
                "outside": each.outside,
                "unknown": each.unknown,
            }
            for each in result.predictions
        ],
        "parameters_without_embeddings": result.parameters,
        "tokens": result.tokens,
        "bytes": {
            "written": result.saved.written,
            "as_trained": result.saved.plain,
            "bf16": 2 * result.saved.num_elements,
            "in_memory": result.memory,
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
            for name, weight in result.weights.items()
        },
    }


def _table(result: QuantizedRun) -> Table:
    from rich.table import Table
    from rich.text import Text

    from scantling.trainer.reporting.format import format_bytes, format_percent

    table = Table(title=Text(f"{result.quantizer}, {result.method}, step {result.step}"), title_justify="left")
    parents = zip(*(name.split(".")[:-1] for name in result.weights), strict=False)
    shared = "".join(f"{parts[0]}." for parts in takewhile(lambda parts: len(set(parts)) == 1, parents))
    table.add_column(Text(f"{shared}..."), overflow="fold")
    for header in ("shape", "packed", "weight error", "output error"):
        table.add_column(header, justify="right")
    for name, weight in result.weights.items():
        errors = (format_percent(each, 2) for each in (weight.weight_error, weight.output_error))
        rows, columns = weight.packed.shape
        label = name.removeprefix(shared).removesuffix(".weight") + (" (rtn)" if weight.method != result.method else "")
        table.add_row(Text(label), f"{rows} × {columns}", format_bytes(weight.packed.nbytes), *errors)
    return table


def _lines(result: QuantizedRun, reader: str) -> list[tuple[str, str]]:
    """Return the lines of a result, each a label and a text."""
    from scantling.trainer.reporting.format import format_bytes, format_difference, format_ratio

    before, after = result.before["eval_loss"], result.after["eval_loss"]
    saved, half = result.saved, 2 * result.saved.num_elements
    sizes = ((f"as trained {format_bytes(saved.plain)}", saved.plain), (f"in bf16 {format_bytes(half)}", half))
    compared = ", ".join(f"{text} ({format_ratio(saved.written, size)})" for text, size in sizes)
    nearest = sum(weight.method != result.method for weight in result.weights.values())
    stored = "sc.load unpacks the weights to" if reader == "sc.load" else "the weights are stored in"
    rounded = f", {nearest} of them rounded to nearest" if nearest else ""
    return [
        ("loss", f"{before:.4f} before, {after:.4f} after on held-out data: {format_difference(after, before)} nats"),
        *(("predicted", _describe_prediction(each)) for each in result.predictions),
        ("on disk", f"{format_bytes(saved.written)}; {compared}"),
        (
            "in memory",
            f"{format_bytes(result.memory)}: {stored} {result.dtype}; the model in memory is not smaller or faster",
        ),
        ("weights", f"{len(result.weights)} in {result.quantizer}, {result.method}, step {result.step}{rounded}"),
        ("folder", f"{result.folder} (load it with {reader})"),
    ]


def _describe_prediction(law: Prediction) -> str:
    from scantling.trainer.reporting.format import format_number

    ranges = [f"{name} {format_number(low)} to {format_number(high)}" for name, (low, high) in law.fitted.items()]
    outside = " and ".join(text.partition(" = ")[0] for text in law.outside)
    notes = f"; {outside} of this run outside that range" if outside else ""
    if law.unknown:
        notes += f"; it does not model low-precision training of {' and '.join(law.unknown)}"
    change = "divergence" if law.degradation is None else f"{law.degradation:+.4f} nats"
    return f"{change} by the {law.law} law, fitted on {', '.join(ranges)}{notes}"
