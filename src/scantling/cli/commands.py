"""Commands after argument parsing: train, compare, plan, eval, export, report and doctor."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from scantling.cli import INTERRUPTED
from scantling.cli.console import LOADING, ConsoleSink, busy, make_console, print_json
from scantling.errors import EXIT_STOPPED, RunError, UserError
from scantling.files import read_json_object
from scantling.torchrun_env import rank_from_env, require_single_process, world_size_from_env
from scantling.trainer.reporting.format import format_bytes, format_last_steps, format_number, format_percent


def train(
    recipe: str, run_dir: Path | None, settings: Sequence[str], *, resume: bool, dry_run: bool, force: bool
) -> int:
    console = make_console()
    sink = ConsoleSink(console)
    sink.phase(LOADING)
    try:
        return _train(console, sink, recipe, run_dir, settings, resume=resume, dry_run=dry_run, force=force)
    finally:
        sink.close()


def _train(
    console: Console,
    sink: ConsoleSink,
    recipe: str,
    run_dir: Path | None,
    settings: Sequence[str],
    *,
    resume: bool,
    dry_run: bool,
    force: bool,
) -> int:
    if dry_run:
        return _dry_run(console, sink, recipe, run_dir, settings, resume=resume, force=force)
    from scantling.comm.ddp import allreduce_wire_bytes
    from scantling.trainer.data.progress import RichProgress
    from scantling.trainer.training.run import train as run_training

    result = run_training(
        recipe,
        run_dir=run_dir,
        resume=resume,
        force=force,
        settings=settings,
        sinks=[sink],
        progress=RichProgress(console, sink.hide_phase),
    )
    metrics = result.metrics
    averaged = format_last_steps(metrics.get("train_loss_steps", 0))
    losses = {
        f"train loss (mean of the {averaged})": metrics.get("train_loss"),
        "loss of the last step": metrics.get("last_step_loss"),
        "held-out loss": metrics.get("eval_loss"),
    }
    listed = ", ".join(f"{label} {value:.4f}" for label, value in losses.items() if value is not None)
    console.print(f"{result.status} at step {result.step}: {listed or 'nothing recorded'}", markup=False)
    sent = metrics.get("wire_bytes")
    if sent:
        processes = world_size_from_env()
        dense = allreduce_wire_bytes(metrics["gradient_bytes"], processes)
        compared = f", instead of {format_bytes(dense)} for all gradients" if dense > sent else ""
        ratio = f" ({dense / sent:.0f} times less)" if dense > 2 * sent else ""
        who = f"each of {processes} processes" if processes > 1 else "this replica"
        text = f"{who} sent {format_bytes(sent)} per step{compared}{ratio}"
        console.print(text, markup=False)
    console.print(f"report      {result.run_dir / 'report.html'}", markup=False)
    console.print(f"checkpoints {result.run_dir / 'checkpoints'}", markup=False)
    if result.status == "stopped":
        console.print(f"continue with: scantling train {result.run_dir} --resume", markup=False)
        return EXIT_STOPPED
    return 0


def _dry_run(
    console: Console,
    sink: ConsoleSink,
    recipe: str,
    run_dir: Path | None,
    settings: Sequence[str],
    *,
    resume: bool,
    force: bool,
) -> int:
    """Check a recipe, its data and the memory, and print the plan."""
    from scantling.trainer.planning.plan import plan_run, planned_device
    from scantling.trainer.planning.resolve import resolve_run
    from scantling.trainer.training.run import check_run, load_run_recipe

    sink.phase("planning")
    checked, folder = load_run_recipe(recipe, run_dir, resume=resume, settings=settings, overrides={})
    run = resolve_run(checked, world_size=world_size_from_env(), device=planned_device(checked))
    planned = plan_run(run)
    sink.phase(None)
    console.print(planned.table())
    sink.phase("checking the data")
    fit = check_run(run, folder, planned, resume=resume, force=force)
    sink.phase(None)
    console.print(str(fit), markup=False)
    memory = ", but it needs more memory" if fit.fits is False else ""
    console.print(f"{recipe}: the recipe is valid and its data was found{memory}; nothing was trained", markup=False)
    return 0


def compare(recipes: Sequence[str], out: Path, settings: Sequence[str], *, force: bool) -> int:
    """Train each recipe in its own process, so that its peak memory is its own; compare finished runs unchanged."""
    from scantling.trainer.recipe import load_recipe
    from scantling.trainer.reporting.compare import compare_table, write_compare
    from scantling.trainer.reporting.html import write_report
    from scantling.trainer.reporting.runs import distinct_names, read_run, rename_duplicates

    if len(recipes) < 2:
        raise UserError(f"compare needs two or more recipes or runs; given {len(recipes)}")
    require_single_process(
        "compare", "starts its own processes; train each recipe under torchrun, then compare the runs"
    )
    existing = {recipe: read_run(recipe) for recipe in recipes if Path(recipe).is_dir()}
    untrained = [recipe for recipe in recipes if recipe not in existing]
    names = [load_recipe(recipe, settings).name or Path(recipe).stem for recipe in untrained]
    names = distinct_names(names, [Path(recipe).with_suffix("") for recipe in untrained])
    new_folders = [out / name.replace("/", "-") for name in names]
    for recipe, folder in zip(untrained, new_folders, strict=True):
        if any(folder.resolve() == run.path.resolve() for run in existing.values()):
            raise UserError(f"{recipe} would replace {folder}, one of the runs to compare; choose another --out")
    for recipe, folder in zip(untrained, new_folders, strict=True):
        command = [sys.executable, "-m", "scantling", "train", recipe, "--run-dir", str(folder)]
        command += [part for setting in settings for part in ("--set", setting)] + (["--force"] if force else [])
        before = _finished(folder)
        code = _wait(command)
        if code in (EXIT_STOPPED, INTERRUPTED):
            return code
        if code and _finished(folder) == before:  # a finished run fails if its output was lost
            raise (UserError if code == 2 else RunError)(f"{recipe} ended with exit code {code}; see its message above")
    trained = iter([read_run(folder) for folder in new_folders])
    runs = rename_duplicates([existing.get(recipe) or next(trained) for recipe in recipes])
    console = make_console()
    written = write_compare(runs, out)
    page = write_report(runs, out / "report.html")
    console.print(compare_table(runs))
    console.print(f"table       {written}", markup=False)
    console.print(f"report      {page}", markup=False)
    for run in runs:
        console.print(f"checkpoints {run.path / 'checkpoints'}", markup=False)
    return 0


def _finished(folder: Path) -> tuple[int, int] | None:
    """Return an identifier of the result in a folder, if its run is finished; otherwise None."""
    path = folder / "result.json"
    try:
        return (path.stat().st_ino, path.stat().st_mtime_ns) if read_json_object(path)["status"] == "done" else None
    except (OSError, UserError, KeyError):
        return None


def _wait(command: Sequence[str]) -> int:
    """Run a process on the same terminal and return its exit code. Forward SIGTERM; both processes get Ctrl-C."""
    process = subprocess.Popen(command)
    before = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    try:
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:
                continue
    finally:
        signal.signal(signal.SIGTERM, before)


def plan(recipe: str, settings: Sequence[str], *, world_size: int | None, device: str | None, as_json: bool) -> int:
    from scantling.trainer.recipe import load_recipe

    checked = load_recipe(recipe, settings)
    with busy(LOADING):
        from scantling.trainer.planning.fit import check_fit
        from scantling.trainer.planning.plan import plan_run, planned_device
        from scantling.trainer.planning.resolve import resolve_run
        from scantling.trainer.training.run_dir import RunDir
    processes, kind = RunDir(Path(recipe)).read_world() if Path(recipe).is_dir() else (1, "auto")
    with busy("planning"):
        kind = planned_device(checked, device or kind)
        run = resolve_run(checked, world_size=world_size or processes, device=kind)
        made = plan_run(run)
        fit = check_fit(run, made)
    if as_json:
        print_json({**made.to_dict(), "machine": fit.to_dict()})
    else:
        console = make_console()
        console.print(made.table())
        console.print(str(fit), markup=False)
    return 0


def evaluate(
    run: Path,
    *,
    minimal_pairs: Sequence[str],
    limit: int | None,
    lm_eval: str | None,
    device: str | None,
    as_json: bool,
) -> int:
    if limit is not None and not minimal_pairs:
        raise UserError(f"--limit {limit} needs --minimal-pairs FILE")
    if minimal_pairs and lm_eval is not None:
        raise UserError("--minimal-pairs and --lm-eval cannot be combined; give one of them")
    if minimal_pairs:
        with busy(LOADING):
            from scantling.trainer.training.minimal_pairs import evaluate_pairs
        with busy("evaluating"):
            metrics = evaluate_pairs(run, minimal_pairs, limit=limit, device=device)
        table = _pairs_table(run, metrics)
    elif lm_eval is not None:
        from scantling.trainer.training.lm_harness import evaluate_tasks

        names = [name.strip() for name in lm_eval.split(",") if name.strip()]
        metrics = evaluate_tasks(run, names, device=device)
        table = _tasks_table(run, metrics)
    else:
        with busy(LOADING):
            from scantling.trainer.training.trained_run import evaluate_run
        with busy("evaluating"):
            metrics = evaluate_run(run, device=device)
        table = Table(title=Text(f"{run}, held-out data"), show_header=False)
        for name, value in metrics.items():
            table.add_row(name.replace("_", " "), _format_value(value))
    if rank_from_env():
        return 0
    if as_json:
        print_json(metrics)
    else:
        make_console().print(table)
    return 0


def _pairs_table(run: Path, metrics: Mapping[str, Any]) -> Table:
    table = Table(title=Text(f"{run}, minimal pairs at step {metrics['step']}"), title_justify="left")
    table.add_column("phenomenon")
    for header in ("accuracy", "95 % interval", "pairs"):
        table.add_column(header, justify="right")
    phenomena = metrics["phenomena"]
    for name, row in phenomena.items():
        table.add_row(Text(name), *_cells(row), end_section=name == list(phenomena)[-1])
    table.add_row("all", *_cells(metrics))
    return table


def _cells(row: Mapping[str, Any]) -> list[str]:
    low, high = (format_percent(end) for end in row["interval"])
    return [format_percent(row["accuracy"]), f"{low} to {high}", format_number(row["count"])]


def _tasks_table(run: Path, metrics: Mapping[str, Mapping[str, Any]]) -> Table:
    table = Table(title=Text(f"{run}, lm-evaluation-harness"), title_justify="left")
    for header in ("task", "metric", "value"):
        table.add_column(header)
    for task, values in metrics.items():
        for name, value in values.items():
            if name != "alias" and isinstance(value, int | float):
                table.add_row(Text(task), Text(name), _format_value(value))
    return table


def _format_value(value: object) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def export(run: Path, form: str, folder: Path, *, dense: bool = False) -> int:
    with busy(LOADING):
        from scantling.trainer.training.trained_run import export_hf

    require_single_process("export")
    if form != "hf":
        raise UserError(f"--to takes a format and a folder, such as --to hf DIR; the only format is hf, given '{form}'")
    with busy("exporting"):
        difference = export_hf(run, folder, dense=dense)
    make_console().print(
        f"wrote {folder}; largest logit difference after from_pretrained: {difference:.1e}", markup=False
    )
    return 0


def report(runs: Sequence[Path], out: Path | None) -> int:
    from scantling.trainer.reporting.html import write_report
    from scantling.trainer.reporting.runs import read_run, rename_duplicates

    page = write_report(rename_duplicates([read_run(run) for run in runs]), out or runs[0] / "report.html")
    make_console().print(f"report      {page}", markup=False)
    return 0


def doctor(device: str, timeout: float, *, as_json: bool) -> int:
    """Report versions and hardware of all processes; under torchrun, also measure the network between them."""
    from scantling.comm.layout import dense_crossover_mbit
    from scantling.distributed.context import init_distributed
    from scantling.trainer.training.doctor import interfaces, measure_allreduce, measure_pairs, settings
    from scantling.trainer.training.run_dir import environment

    with init_distributed(device, timeout_s=timeout) as context:
        machines = context.all_gather_object({**environment(), "interfaces": interfaces(), "settings": settings()})
        pairs = measure_pairs(context) if context.world_size > 1 else []
        allreduce = measure_allreduce(context) if context.world_size > 1 else None
        if not context.is_rank0:
            return 0
    if as_json:
        summary = {"processes": machines, "pairs": [vars(pair) for pair in pairs], "allreduce_4mib_s": allreduce}
        print_json(summary)
        return 0
    console = make_console()
    console.print(_process_table(machines))
    first = machines[0]["versions"]
    differing = {name for each in machines for name, value in each["versions"].items() if value != first[name]}
    if differing:
        console.print(f"versions differ between processes: {', '.join(sorted(differing))}", markup=False)
    if not pairs:
        console.print(
            "one process; to measure the network: torchrun --nproc-per-node N -m scantling doctor", markup=False
        )
        return 0
    links = Table(title=Text("between processes"), title_justify="left")
    for header in ("from", "to", "latency", "bandwidth"):
        links.add_column(header, justify="right")
    for pair in sorted(pairs, key=lambda each: (each.source, each.target)):
        latency, rate = f"{1e3 * pair.latency_s:.2f} ms", f"{pair.bytes_a_s * 8 / 1e6:,.0f} Mbit/s"
        links.add_row(str(pair.source), str(pair.target), latency, rate)
    console.print(links)
    assert allreduce is not None
    console.print(f"all-reduce of 4 MiB: {1e3 * allreduce:.1f} ms", markup=False)
    if context.device.type == "cpu":
        limit, slowest = dense_crossover_mbit(context.world_size), min(pair.bytes_a_s for pair in pairs) * 8 / 1e6
        choice = "exchange: dense is faster" if slowest > limit else "exchange: auto is faster"
        console.print(f"with comm.name: demo, {choice} here (dense: above about {limit:,.0f} Mbit/s)", markup=False)
    return 0


def _process_table(machines: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title=Text("processes"), title_justify="left")
    for header in ("rank", "machine", "versions", "interfaces"):
        table.add_column(header)
    for rank, machine in enumerate(machines):
        hardware, versions = machine["hardware"], machine["versions"]
        gpus = ", ".join(hardware["gpus"]) or "no GPU"
        ports = (
            f"{each['name']} {each['state']}"
            + (f" {each['address']}" if each["address"] else "")
            + (f" {each['mbit']} Mbit/s" if each["mbit"] else "")
            for each in machine["interfaces"]
        )
        known = [f"{name} {value}" for name, value in versions.items() if value]
        known += [f"{name}={value}" for name, value in machine["settings"].items()]
        memory = format_bytes(hardware["memory_bytes"])
        about = f"{hardware['cpu']}\n{hardware['cpu_count']} cores, {memory}\n{gpus}"
        table.add_row(str(rank), Text(about), Text("\n".join(known)), Text("\n".join(ports)))
    return table
