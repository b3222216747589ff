"""Command definitions. Each command imports its code when it runs, so that `scantling --help` does not load torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    name="scantling",
    help="Train large models with fewer parameters, less optimizer memory, fewer bytes sent and lower precision.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override one recipe key, such as train.steps=100. Repeatable."),
]


def _complete(*values: str) -> Callable[[str], list[str]]:
    """Return a completion function for an option with a fixed set of values."""

    def matching(typed: str) -> list[str]:
        return [value for value in values if value.startswith(typed)]

    return matching


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
_devices = _complete("auto", "cpu", "cuda")
Device = Annotated[
    str | None, typer.Option(help="auto, cpu or cuda. Default: the device of the recipe.", autocompletion=_devices)
]


def _version(value: bool) -> None:
    if value:
        from scantling import __version__

        typer.echo(f"scantling {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    from scantling.cli.console import make_console, show_warnings

    show_warnings(make_console(stderr=True))


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(help="A recipe file; with --resume, a run directory also works.")],
    run_dir: Annotated[Path | None, typer.Option(help="Directory to write the run to. Default: runs/NAME.")] = None,
    settings: Settings = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the newest complete checkpoint.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the recipe and its data and print the plan, without training.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing run in the run directory.")] = False,
) -> int:
    """Train a model from a recipe.

    With several processes: torchrun --nproc-per-node N -m scantling train RECIPE
    """
    from scantling.cli import commands

    return commands.train(recipe, run_dir, settings or [], resume=resume, dry_run=dry_run, force=force)


@app.command()
def compare(
    recipes: Annotated[list[str], typer.Argument(help="Two or more recipe files or directories of finished runs.")],
    out: Annotated[Path, typer.Option(help="Directory for the runs, compare.json and report.html.")] = Path(
        "runs/compare"
    ),
    settings: Settings = None,
    force: Annotated[bool, typer.Option("--force", help="Replace existing runs.")] = False,
) -> int:
    """Train recipes in turn and compare their results.

    Finished runs are compared without training them again.
    """
    from scantling.cli import commands

    return commands.compare(recipes, out, settings or [], force=force)


@app.command()
def sweep(
    file: Annotated[str, typer.Argument(metavar="SWEEP", help="A sweep file: a base recipe and the values to try.")],
    jobs: Annotated[int, typer.Option(min=1, help="Number of runs at the same time; they share the CPU cores.")] = 1,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE", help="Run only the grid points with this value, written as in the table. Repeatable."
        ),
    ] = None,
    settings: Settings = None,
    retry: Annotated[bool, typer.Option("--retry", help="Run failed runs again.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check all recipes and their data and print the grid, without training.")
    ] = False,
) -> int:
    """Train a grid of recipes and write one table of results.

    The same command continues an interrupted sweep.
    """
    from scantling.cli.console import LOADING, busy

    with busy(LOADING):
        from scantling.cli import sweeping
    return sweeping.sweep(file, settings or [], jobs=jobs, only=only or [], retry=retry, dry_run=dry_run)


@app.command()
def plan(
    recipe: Annotated[str, typer.Argument(help="A recipe file or a run directory.")],
    settings: Settings = None,
    world_size: Annotated[
        int | None, typer.Option(min=1, help="Number of processes. Default: 1, or the number that the run used.")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="cpu or cuda; this machine need not have it. Default: the device of the recipe or run.",
            autocompletion=_devices,
        ),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Predict parameters, memory, bytes sent and FLOPs of a run."""
    from scantling.cli import commands

    return commands.plan(recipe, settings or [], world_size=world_size, device=device, as_json=as_json)


@app.command("eval")
def evaluate(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    minimal_pairs: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE",
            help="Score minimal pairs instead of the held-out data: JSONL, CSV, or a folder of them. Repeatable.",
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Score only this many minimal pairs, evenly spaced.")] = None,
    lm_eval: Annotated[
        str | None,
        typer.Option(metavar="TASK,...", help="Run lm-evaluation-harness tasks instead, by name or YAML file."),
    ] = None,
    device: Device = None,
    as_json: AsJson = False,
) -> int:
    """Evaluate the newest checkpoint of a run.

    The default is the loss on its held-out data.
    """
    from scantling.cli import commands

    return commands.evaluate(
        run, minimal_pairs=minimal_pairs or [], limit=limit, lm_eval=lm_eval, device=device, as_json=as_json
    )


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    to: Annotated[tuple[str, Path], typer.Option("--to", metavar="FORMAT DIR", help="Format (hf) and output folder.")],
    dense: Annotated[bool, typer.Option("--dense", help="Convert TT layers to the equivalent dense layers.")] = False,
) -> int:
    """Export a run to a Hugging Face folder.

    The export is reloaded and its logits are compared. transformers loads the folder without Scantling, except click
    models, and TT layers without --dense.
    """
    from scantling.cli import commands

    return commands.export(run, *to, dense=dense)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="One or more run directories.")],
    out: Annotated[Path | None, typer.Option(help="HTML file to write. Default: report.html in the first run.")] = None,
) -> int:
    """Write one self-contained HTML report of one or more runs."""
    from scantling.cli import commands

    return commands.report(runs, out)


@app.command()
def fit(
    runs: Annotated[str, typer.Argument(help="Table of runs: CSV, JSON or JSON lines; may be compressed (.gz).")],
    law: Annotated[
        str,
        typer.Option(
            help="chinchilla, kumar, efficiency or ouyang.",
            autocompletion=_complete("chinchilla", "kumar", "efficiency", "ouyang"),
        ),
    ] = "chinchilla",
    column: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=COLUMN",
            help="Table column for N, D (or C, FLOPs), loss, ...; 'post=post.*' for quantized losses. Repeatable.",
        ),
    ] = None,
    where: Annotated[
        list[str] | None, typer.Option(metavar="COLUMN=VALUE", help="Use only rows with this value. Repeatable.")
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(
            help="Fix A, B, E, alpha and beta: besiroglu, hoffmann, quartet, or fit (fitted first on these runs)."
        ),
    ] = None,
    fix: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Fix a constant at a value. Repeatable.")
    ] = None,
    tie: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=NAME", help="Make the first constant equal to the second. Repeatable."),
    ] = None,
    free: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Fit a constant that is fixed by default, such as power. Repeatable."),
    ] = None,
    delta: Annotated[float, typer.Option(help="Huber loss threshold between quadratic and linear.")] = 1e-3,
    samples: Annotated[
        int, typer.Option(min=0, help="Bootstrap samples for the confidence intervals; 0 skips them.")
    ] = 1000,
    out: Annotated[Path, typer.Option(help="Directory for the constants and the plot.")] = Path("runs/fit"),
    as_json: AsJson = False,
) -> int:
    """Fit a scaling law to a table of runs.

    Prints the constants with confidence intervals and the hold-out error, and writes a plot.
    """
    from scantling.cli import fitting

    return fitting.fit(
        runs,
        law,
        columns=column or [],
        where=where or [],
        base=base,
        fixed=fix or [],
        tie=tie or [],
        free=free or [],
        delta=delta,
        samples=samples,
        out=out,
        as_json=as_json,
    )


@app.command()
def quantize(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    weights: Annotated[str, typer.Option(help="Weight format: int2 to int16, fp6_e3m2, mxfp4_e2m1, ...")],
    method: Annotated[
        str, typer.Option(help="rtn (round to nearest) or gptq.", autocompletion=_complete("rtn", "gptq"))
    ] = "rtn",
    group_size: Annotated[
        int | None, typer.Option(min=1, help="Number of inputs per scale. Default: one scale per output.")
    ] = None,
    clip: Annotated[
        str,
        typer.Option(
            help="Scale from the largest value (absmax) or with the least squared error (mse).",
            autocompletion=_complete("absmax", "mse"),
        ),
    ] = "absmax",
    embeddings: Annotated[
        bool, typer.Option("--embeddings", help="Also quantize the embeddings and the output layer.")
    ] = False,
    calibration: Annotated[int, typer.Option(min=1, help="Number of training sequences for calibration.")] = 128,
    out: Annotated[Path | None, typer.Option(help="Output folder. Default: quantized-... in the run.")] = None,
    dequantized: Annotated[
        bool,
        typer.Option("--dequantized", help="Write rounded weights that transformers loads, instead of packed ones."),
    ] = False,
    device: Device = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Also print a table of the errors of each weight.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Quantize the weights of a trained run and measure the loss.

    Uses the newest checkpoint and writes packed weights.
    """
    from scantling.cli import quantizing

    return quantizing.quantize(
        run,
        weights,
        method,
        group_size=group_size,
        clip=clip,
        embeddings=embeddings,
        calibration=calibration,
        out=out,
        dequantized=dequantized,
        device=device,
        verbose=verbose,
        as_json=as_json,
    )


@app.command()
def doctor(
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.", autocompletion=_devices)] = "auto",
    timeout: Annotated[float, typer.Option(help="Seconds to wait for another process before failing.")] = 60.0,
    as_json: AsJson = False,
) -> int:
    """Report versions, hardware and, under torchrun, network speed."""
    from scantling.cli import commands

    return commands.doctor(device, timeout, as_json=as_json)


@app.command()
def schema() -> int:
    """Print the JSON schema of recipes, for editors."""
    import json

    from scantling.trainer.recipe import Recipe

    typer.echo(json.dumps(Recipe.model_json_schema(), indent=2))
    return 0
