"""The commands. Each imports its dependencies when it runs, so that `scantling --help` does not wait for torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    name="scantling",
    help="Train large models for less: fewer parameters, less optimizer memory, fewer bytes sent, fewer bits.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Change one key of the recipe, such as train.steps=100. Repeatable."
    ),
]


def _complete(*values: str) -> Callable[[str], list[str]]:
    """Return a completion function for an option with a fixed set of values."""

    def matching(typed: str) -> list[str]:
        return [value for value in values if value.startswith(typed)]

    return matching


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
_devices = _complete("auto", "cpu", "cuda")
Device = Annotated[
    str | None, typer.Option(help="auto, cpu or cuda. Default: what the recipe names.", autocompletion=_devices)
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
    recipe: Annotated[str, typer.Argument(help="A recipe, or with --resume the directory of a run.")],
    run_dir: Annotated[Path | None, typer.Option(help="Where the run goes. Default: runs/NAME.")] = None,
    settings: Settings = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the newest complete checkpoint.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the recipe and its data, print the plan, train nothing.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the run that is in the run directory.")] = False,
) -> int:
    """Train a model from a recipe. With several processes: torchrun --nproc-per-node N -m scantling train RECIPE."""
    from scantling.cli import commands

    return commands.train(recipe, run_dir, settings or [], resume=resume, dry_run=dry_run, force=force)


@app.command()
def compare(
    recipes: Annotated[list[str], typer.Argument(help="Two or more recipes, or directories of runs as they are.")],
    out: Annotated[Path, typer.Option(help="Where runs, compare.json and report.html go.")] = Path("runs/compare"),
    settings: Settings = None,
    force: Annotated[bool, typer.Option("--force", help="Replace runs that are there.")] = False,
) -> int:
    """Train several recipes one after another and print them side by side."""
    from scantling.cli import commands

    return commands.compare(recipes, out, settings or [], force=force)


@app.command()
def sweep(
    file: Annotated[str, typer.Argument(metavar="SWEEP", help="A sweep: a base recipe and axes.")],
    jobs: Annotated[int, typer.Option(min=1, help="Runs at once; they share the cores.")] = 1,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Only runs with this value, as in the table. Repeatable."),
    ] = None,
    settings: Settings = None,
    retry: Annotated[bool, typer.Option("--retry", help="Try runs again that failed.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check all recipes and their data, print the grid, run nothing.")
    ] = False,
) -> int:
    """Run a grid of recipes and write one table of its runs; call it again to continue."""
    from scantling.cli.console import LOADING, busy

    with busy(LOADING):
        from scantling.cli import sweeping
    return sweeping.sweep(file, settings or [], jobs=jobs, only=only or [], retry=retry, dry_run=dry_run)


@app.command()
def plan(
    recipe: Annotated[str, typer.Argument(help="A recipe, or the directory of a run.")],
    settings: Settings = None,
    world_size: Annotated[
        int | None, typer.Option(min=1, help="Number of processes. Default: 1, or that of the run.")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="cpu or cuda, which need not be here. Default: the recipe's, or the run's.", autocompletion=_devices
        ),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Predict the cost of a run before it starts: parameters, memory, bytes sent, FLOPs."""
    from scantling.cli import commands

    return commands.plan(recipe, settings or [], world_size=world_size, device=device, as_json=as_json)


@app.command("eval")
def evaluate(
    run: Annotated[Path, typer.Argument(help="The directory of a run.")],
    minimal_pairs: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", help="Score minimal pairs instead: JSONL, CSV, or a folder of them. Repeatable."),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Score so many minimal pairs, evenly spread, in place of all.")
    ] = None,
    lm_eval: Annotated[
        str | None,
        typer.Option(metavar="TASK,...", help="Run tasks of lm-evaluation-harness instead, by name or YAML file."),
    ] = None,
    device: Device = None,
    as_json: AsJson = False,
) -> int:
    """Evaluate the newest checkpoint of a run: on its held-out data, on minimal pairs, or on tasks of a harness."""
    from scantling.cli import evaluation

    return evaluation.evaluate(
        run, minimal_pairs=minimal_pairs or [], limit=limit, lm_eval=lm_eval, device=device, as_json=as_json
    )


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="The directory of a run.")],
    to: Annotated[
        tuple[str, Path], typer.Option("--to", metavar="FORMAT DIR", help="Format (hf) and folder to write.")
    ],
    dense: Annotated[
        bool, typer.Option("--dense", help="Write layers of cores as the dense layers that compute the same.")
    ] = False,
) -> int:
    """Write a folder in Hugging Face's format, and check that it gives the same logits.

    transformers loads it without Scantling, except TT layers without --dense and click models.
    """
    from scantling.cli import commands

    return commands.export(run, *to, dense=dense)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Directories of runs.")],
    out: Annotated[Path | None, typer.Option(help="The HTML file. Default: report.html in the first run.")] = None,
) -> int:
    """Write one self-contained HTML report about one or several runs."""
    from scantling.cli import commands

    return commands.report(runs, out)


@app.command()
def fit(
    runs: Annotated[str, typer.Argument(help="A table of runs: CSV, JSON or JSON lines, .gz or not.")],
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
            help="What the table calls N, D (or C, FLOPs), loss, …; 'post=post.*' of a sweep. Repeatable.",
        ),
    ] = None,
    where: Annotated[
        list[str] | None, typer.Option(metavar="COLUMN=VALUE", help="Only runs with this value. Repeatable.")
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(help="Hold A, B, E, alpha and beta: besiroglu, hoffmann, quartet, or fit for these runs' own."),
    ] = None,
    fix: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="Hold a constant. Repeatable.")] = None,
    tie: Annotated[
        list[str] | None, typer.Option(metavar="NAME=NAME", help="One constant follows another. Repeatable.")
    ] = None,
    free: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Fit a constant that is held otherwise, such as power. Repeatable."),
    ] = None,
    delta: Annotated[float, typer.Option(help="Where Huber's loss turns from square to straight.")] = 1e-3,
    samples: Annotated[int, typer.Option(min=0, help="Bootstraps for the intervals; 0 gives none.")] = 1000,
    out: Annotated[Path, typer.Option(help="Where the constants and the plot go.")] = Path("runs/fit"),
    as_json: AsJson = False,
) -> int:
    """Fit a scaling law to a table of runs: constants with intervals, hold-out error, a plot."""
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
    run: Annotated[Path, typer.Argument(help="The directory of a run.")],
    weights: Annotated[str, typer.Option(help="Format of the weights: int2 to int16, fp6_e3m2, mxfp4_e2m1, …")],
    method: Annotated[
        str, typer.Option(help="rtn (to the nearest) or gptq.", autocompletion=_complete("rtn", "gptq"))
    ] = "rtn",
    group_size: Annotated[
        int | None, typer.Option(min=1, help="Inputs that share a scale. Default: all of an output.")
    ] = None,
    clip: Annotated[
        str,
        typer.Option(
            help="absmax, or mse: the end of the format with the least error.",
            autocompletion=_complete("absmax", "mse"),
        ),
    ] = "absmax",
    embeddings: Annotated[
        bool, typer.Option("--embeddings", help="Quantise embeddings and the output layer, too.")
    ] = False,
    calibration: Annotated[int, typer.Option(min=1, help="Training sequences to calibrate on.")] = 128,
    out: Annotated[Path | None, typer.Option(help="The folder to write. Default: quantized-… in the run.")] = None,
    dequantized: Annotated[
        bool, typer.Option("--dequantized", help="Write what transformers loads, not packed.")
    ] = False,
    device: Device = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Also print a table with the errors of each weight.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Quantize the weights of a run's newest checkpoint, measure the loss, and write them packed."""
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
    timeout: Annotated[float, typer.Option(help="Seconds after which a process that is silent is an error.")] = 60.0,
    as_json: AsJson = False,
) -> int:
    """Report the environment of a run: versions, hardware and, under torchrun, the links between processes."""
    from scantling.cli import commands

    return commands.doctor(device, timeout, as_json=as_json)


@app.command()
def schema() -> int:
    """Print the JSON schema of a recipe, for editors."""
    import json

    from scantling.trainer.recipe import Recipe

    typer.echo(json.dumps(Recipe.model_json_schema(), indent=2))
    return 0
