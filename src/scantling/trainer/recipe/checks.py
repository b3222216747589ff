"""Semantic checks of a recipe, beyond types: exactly one source, known names, consistent settings.

The checks read the raw mapping, so that their faults are reported together with structural faults. A check reads only
keys whose type is right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import combinations, islice
from typing import Any

from pydantic import BaseModel

from scantling.comm.config import SELECTION_OPTIONS
from scantling.errors import Fault, UserError, did_you_mean, shorten
from scantling.trainer.recipe.parsing import get_section
from scantling.trainer.recipe.schema import (
    BUDGET_OPTIONS,
    CLICK_SOURCES,
    DIGITS,
    IMAGE_SOURCES,
    SOURCES,
    TASKS,
    Clicks,
    CommSection,
    DataSection,
    Fields,
    OptimSection,
    ParallelSection,
    PrecisionSection,
    TensorSection,
    TrainSection,
    adapt_steps,
    chosen_by_budget,
    given_limits,
    method_name,
)

Content = Mapping[str, Any]
MOST_FAULTS = 100
"""Most faults that one check reports."""
KEYS_OF_TASKS = {
    "bucket": ("classification", "seq2seq"),
    "clicks": ("clicks",),
    "criteo": ("clicks",),
    "document_mask": ("causal-lm",),
    "image_channels": ("image-classification",),
    "image_flip": ("image-classification",),
    "image_shift": ("image-classification",),
    "image_size": ("image-classification",),
    "images": ("image-classification",),
    "mask_probability": ("masked-lm", "seq2seq"),
    "pad_to_multiple_of": ("classification", "seq2seq"),
    "span_length": ("seq2seq",),
    "target_len": ("seq2seq",),
}
"""Keys of the data section that apply only to some tasks."""


def semantic_faults(content: Content, known: set[str]) -> list[Fault]:
    """Return all semantic faults, except those at, above or below a path in `known`, which is reported already."""
    faults: list[Fault] = []
    for check in CHECKS:
        try:
            # a huge list of columns could yield one fault per column
            for fault in islice(check(content), MOST_FAULTS):
                related = any(_covers(path, fault.path) or _covers(fault.path, path) for path in known)
                # a fault of a whole section says more than one in a key of it, so keep it
                if not related or fault.path.count(".") == 0:
                    faults.append(fault)
        except Exception:
            if not known:
                raise
            # a check met a value of the wrong type, which is reported already
    return faults


def _covers(path: str, other: str) -> bool:
    return path == other or other.startswith(path + ".")


def _given_value(section: Content, names: tuple[str, ...]) -> list[str]:
    return [name for name in names if section.get(name) is not None]


def _changed(section: Content, model: type[BaseModel], key: str) -> bool:
    """Return True if a key is given and differs from its default (a resolved recipe spells out every default)."""
    return key in section and section[key] != model.model_fields[key].get_default(call_default_factory=True)


def _check_name(content: Content) -> Iterator[Fault]:
    name = content.get("name")
    if isinstance(name, str) and (name in (".", "..") or "/" in name or not name.isprintable()):
        yield Fault("name", "is used as a folder's name, without '/'", repr(name))


def _check_model(content: Content) -> Iterator[Fault]:
    from scantling.trainer.models.presets import PRESETS

    model = get_section(content, "model")
    if not model:
        return
    preset = model.get("preset")
    given = _given_value(model, ("preset", "hf"))
    if len(given) != 1:
        problem = "give exactly one of preset and hf"
        yield Fault("model", problem, " and ".join(given) if given else "neither")
    if isinstance(preset, str) and preset not in PRESETS:
        allowed = ", ".join(PRESETS)
        yield Fault("model.preset", f"must be one of {allowed}", repr(preset), did_you_mean(preset, PRESETS))
    if model.get("pretrained") and "hf" not in given:
        yield Fault("model.pretrained", "a preset has no pretrained weights; give a model folder in model.hf", "true")


def _changed_fields(data: Content) -> bool:
    fields = data.get("fields")
    return isinstance(fields, Mapping) and any(
        _changed(fields, Fields, key) for key in fields if key in Fields.model_fields
    )


def _check_data(content: Content) -> Iterator[Fault]:
    data = get_section(content, "data")
    if not data:
        return
    given = _given_value(data, SOURCES)
    if len(given) != 1:
        yield Fault("data", f"give exactly one source of {', '.join(SOURCES)}", ", ".join(given) if given else "none")
        return
    source = given[0]
    if source in ("text", "corpus", "bin", "images") and _changed_fields(data):
        yield Fault("data.fields", f"has no meaning for the source '{source}', which has no columns")
    if source != "text" and data.get("document_separator"):
        yield Fault("data.document_separator", f"has no meaning for the source '{source}'; it splits text files")
    if source != "hf":
        for key in ("hf_config", "hf_split"):
            if _changed(data, DataSection, key):
                yield Fault(f"data.{key}", f"has no meaning for the source '{source}'")
    if source != "bin" and _changed(data, DataSection, "bin_dtype"):
        yield Fault("data.bin_dtype", f"has no meaning for the source '{source}'")
    if source == "corpus" and data.get("validation"):
        yield Fault("data.validation", "a built-in corpus is split by document; use data.heldout")
    if data.get("images") == DIGITS and data.get("validation"):
        yield Fault("data.validation", "built-in images are split one by one; use data.heldout")
    if source == "bin" and data.get("max_bytes"):
        yield Fault("data.max_bytes", "has no meaning for the source 'bin', which holds tokens")
    if data.get("validation") and _changed(data, DataSection, "heldout") and data["heldout"] != 0:
        yield Fault("data.heldout", "has no effect when data.validation names held-out data; give one of them")
    if data.get("heldout") == 0 and not data.get("validation"):
        for key in _given_value(get_section(content, "train"), ("eval_every", "eval_samples")):
            yield Fault(f"train.{key}", "has no effect without held-out data; raise data.heldout, or leave it out")


def _check_task(content: Content) -> Iterator[Fault]:
    from scantling.trainer.models.presets import PRESETS

    model, data = get_section(content, "model"), get_section(content, "data")
    preset = PRESETS.get(str(model.get("preset")))
    task = model.get("task") or (preset.task if preset else None)
    if task is None and _given_value(data, ("clicks", "criteo")):
        task = "clicks"
    if task is None and _given_value(data, ("images",)):
        task = "image-classification"
    fields = data.get("fields")
    label = fields.get("label") if isinstance(fields, Mapping) else None
    if task == "classification":
        if _given_value(data, ("corpus", "text", "bin")):
            source = _given_value(data, ("corpus", "text", "bin"))[0]
            yield Fault("data", f"classification needs labels, which '{source}' has not; use jsonl, csv, parquet or hf")
        elif data and not label:
            yield Fault("data.fields.label", "missing; classification needs the name of the label column")
    elif task in TASKS and task != "image-classification":
        if label:
            yield Fault("data.fields.label", f"has no meaning for the task '{task}'", repr(label))
        if data.get("labels"):
            yield Fault("data.labels", f"has no meaning for the task '{task}'")
    if task == "clicks":
        yield from _check_click_task(content)
    if task == "image-classification":
        yield from _check_image_task(content)
    elif task in TASKS and isinstance(fields, Mapping) and _changed(fields, Fields, "image"):
        yield Fault("data.fields.image", f"has no meaning for the task '{task}'", repr(fields["image"]))
    if task in TASKS:
        for key, tasks in KEYS_OF_TASKS.items():
            if task not in tasks and _changed(data, DataSection, key):
                yield Fault(f"data.{key}", f"has no meaning for the task '{task}'; it belongs to {' and '.join(tasks)}")
        if task != "causal-lm" and get_section(content, "train").get("loss_chunk") is not None:
            yield Fault("train.loss_chunk", f"has no meaning for the task '{task}'; it belongs to causal-lm")
    if task == "seq2seq":
        pairs = isinstance(fields, Mapping) and fields.get("pair") is not None
        for key in ("mask_probability", "span_length") if pairs else ("bucket", "pad_to_multiple_of"):
            if _changed(data, DataSection, key):
                yield Fault(f"data.{key}", f"has no meaning for seq2seq {'with' if pairs else 'without'} pairs")


def _check_click_task(content: Content) -> Iterator[Fault]:
    """Yield faults of the task `clicks`: settings that do not apply to rows of features, and missing ones."""
    data = get_section(content, "data")
    source = next(iter(_given_value(data, SOURCES)), None)
    if source is not None and source not in CLICK_SOURCES:
        yield Fault("data", f"the task 'clicks' reads {', '.join(CLICK_SOURCES)}", f"'{source}'")
    if data and source != "criteo" and not data.get("clicks"):
        yield Fault("data.clicks", "missing; the task 'clicks' needs the names of the columns")
    if _changed_fields(data):
        yield Fault("data.fields", "has no meaning for the task 'clicks'; name the columns in data.clicks")
    yield from _check_no_text(content, "clicks", "rows")


def _check_image_task(content: Content) -> Iterator[Fault]:
    """Yield faults of the task `image-classification`: settings that do not apply to images, and missing ones."""
    data, task = get_section(content, "data"), "image-classification"
    source = next(iter(_given_value(data, SOURCES)), None)
    fields = data.get("fields")
    fields = fields if isinstance(fields, Mapping) else {}
    if source is not None and source not in IMAGE_SOURCES:
        yield Fault("data", f"the task '{task}' reads {', '.join(IMAGE_SOURCES)}", f"'{source}'")
    elif source is not None and data.get("images") != DIGITS and data.get("image_size") is None:
        yield Fault("data.image_size", "missing; images are resized to so many pixels on a side", None, "such as 224")
    if source == "hf" and not fields.get("label"):
        yield Fault("data.fields.label", f"missing; {task} needs the name of the label column")
    for key in ("text", "pair"):
        if source == "hf" and _changed(fields, Fields, key):
            yield Fault(f"data.fields.{key}", f"has no meaning for the task '{task}'; name the columns image and label")
    yield from _check_no_text(content, task, "images")


def _check_no_text(content: Content, task: str, examples: str) -> Iterator[Fault]:
    """Yield faults for settings that do not apply to a task whose examples are not text."""
    data = get_section(content, "data")
    for key in ("tokenizer", "seq_len", "max_bytes"):
        if _changed(data, DataSection, key):
            yield Fault(f"data.{key}", f"has no meaning for the task '{task}', whose {examples} have no text")
    if get_section(content, "train").get("batch_tokens") is not None:
        problem = f"has no meaning for the task '{task}'; give the {examples} of a batch in batch_size"
        yield Fault("train.batch_tokens", problem)


def _check_clicks(content: Content) -> Iterator[Fault]:
    data = get_section(content, "data")
    clicks = data.get("clicks")
    if not isinstance(clicks, Mapping):
        return
    criteo = data.get("criteo") is not None
    for key in ("label", "label_above") if criteo else ():
        if clicks.get(key) is not None:
            yield Fault(f"data.clicks.{key}", "has no meaning for Criteo's files, whose first column is the label")
    for key in () if criteo else ("label", "categorical"):
        if not clicks.get(key):
            yield Fault(f"data.clicks.{key}", "missing; name the column" + ("s" if key == "categorical" else ""))
    features = {key: clicks[key] for key in ("numeric", "categorical") if isinstance(clicks.get(key), list)}
    seen = {clicks.get("label"): "label"}
    for key, names in features.items():
        for name in filter(lambda name: isinstance(name, str), names):
            if name in seen:
                yield Fault(f"data.clicks.{key}", f"'{name}' is given already, in {seen[name]}")
            seen[name] = key
    sizes, categorical = clicks.get("table_size"), features.get("categorical")
    if isinstance(sizes, Mapping) and categorical is not None:
        known = shorten(", ".join(map(str, categorical)), 300)
        names = {str(name) for name in categorical}
        for name in sizes:
            if str(name) not in names:
                hint = did_you_mean(str(name), map(str, categorical))
                yield Fault(f"data.clicks.table_size.{name}", f"is no categorical column; they are {known}", None, hint)
    if _changed(clicks, Clicks, "min_count") and isinstance(sizes, int):
        yield Fault("data.clicks.min_count", "has no effect where all categories are hashed, by table_size")
    if _changed(clicks, Clicks, "scaling") and not criteo and not clicks.get("numeric"):
        yield Fault("data.clicks.scaling", "has no effect without numeric columns")


def _check_batch(content: Content) -> Iterator[Fault]:
    train, data = get_section(content, "train"), get_section(content, "data")
    if not train:
        return
    given = _given_value(train, ("batch_tokens", "batch_size"))
    if len(given) != 1:
        yield Fault(
            "train", "give exactly one of batch_tokens and batch_size", " and ".join(given) if given else "neither"
        )
        return
    tokens, seq_len = train.get("batch_tokens"), data.get("seq_len", DataSection.model_fields["seq_len"].default)
    if isinstance(tokens, int) and isinstance(seq_len, int) and seq_len > 0 and tokens % seq_len:
        allowed = f"must be a multiple of data.seq_len = {seq_len}"
        yield Fault("train.batch_tokens", allowed, str(tokens), f"such as {max(1, round(tokens / seq_len)) * seq_len}")


def _check_schedule(content: Content) -> Iterator[Fault]:
    train = get_section(content, "train")
    steps = train.get("steps")
    schedule, warmup, decay = (
        train.get(key, TrainSection.model_fields[key].default) for key in ("schedule", "warmup", "decay")
    )
    if isinstance(steps, int) and steps > 0 and isinstance(warmup, int | float):
        share = warmup if warmup < 1 else warmup / steps
        if share > 1:
            yield Fault("train.warmup", f"is longer than the run of {steps} steps", str(warmup))
        elif schedule == "wsd" and isinstance(decay, int | float) and share + decay > 1 + 1e-9:  # tolerates rounding
            problem = "begins before the warm-up has ended; lower it or train.warmup"
            yield Fault("train.decay", problem, f"{decay} after a warm-up of {share:.3g} of the steps")
    if _changed(train, TrainSection, "decay") and schedule in ("cosine", "linear", "constant"):
        yield Fault("train.decay", f"has no meaning for the schedule '{schedule}'; it belongs to wsd")
    if _changed(train, TrainSection, "min_lr_ratio") and schedule == "constant":
        yield Fault("train.min_lr_ratio", "has no meaning for the schedule 'constant'")


def _check_tensor(content: Content) -> Iterator[Fault]:
    from scantling.tensor.options import FORMATS, RankOptions, linear_options

    tensor, train = get_section(content, "tensor"), get_section(content, "train")
    if not tensor:
        return
    name, num_modes = tensor.get("format"), tensor.get("num_modes")
    if isinstance(name, str) and name in FORMATS:
        try:
            linear_options(name, num_modes if isinstance(num_modes, int) else None)
        except UserError as error:
            yield Fault("tensor.num_modes", str(error))
        if tensor.get("init") == "svd" and "activation" in FORMATS[name]:
            yield Fault("tensor.init", f"svd needs a matrix, which a layer of the format {name} is not")
    adapter = tensor.get("adapter")
    if tensor.get("size_target") is None:
        for key in ("unit", "adapt", "truncate_every", "adapter"):
            if _changed(tensor, TensorSection, key):
                yield Fault(f"tensor.{key}", "has no effect without tensor.size_target")
        return
    steps, adapt = train.get("steps"), tensor.get("adapt", TensorSection.model_fields["adapt"].default)
    own = {}
    if isinstance(steps, int) and isinstance(adapt, int | float):
        own = {"steps": adapt_steps(adapt, steps)}
        if adapt > max(1, steps):
            yield Fault("tensor.adapt", f"is longer than the run of {steps} steps", str(adapt))
    if isinstance(adapter, Mapping):
        for key, problem, given in RankOptions.problems({**own, **adapter}):
            yield Fault(f"tensor.adapter.{key}", problem, given)
        for key in ("size_target", "unit", "steps"):
            if key in adapter:
                yield Fault(f"tensor.adapter.{key}", f"belongs to tensor.{'adapt' if key == 'steps' else key}")


def _check_optim(content: Content) -> Iterator[Fault]:
    from scantling.optim.registry import check_options

    optim = get_section(content, "optim")
    name = optim.get("name", OptimSection.model_fields["name"].default)
    if not isinstance(name, str):
        return
    options = {key: value for key, value in optim.items() if key not in OptimSection.model_fields}
    for path, problem in check_options(name, options):
        yield Fault(f"optim.{path}", problem)


def _check_release(content: Content) -> Iterator[Fault]:
    optim, train, precision = (get_section(content, name) for name in ("optim", "train", "precision"))
    if optim.get("release_gradients") is not True:
        return
    key = "optim.release_gradients"
    name = optim.get("name", OptimSection.model_fields["name"].default)
    if isinstance(name, str) and name.lower() != "came":
        yield Fault(key, "is for optim.name: came; take that, or leave the key out", f"the optimizer '{name}'")
    clip = train.get("clip", TrainSection.model_fields["clip"].default)
    if train and clip is not None:
        how = "" if "clip" in train else ", the default"
        yield Fault(
            key,
            "frees gradients before their global norm is known, so that they cannot be clipped by it; set train.clip: "
            "null (came limits the update of each parameter, see clip_threshold)",
            f"train.clip: {clip}{how}",
        )
    if precision.get("compute") == "fp16":
        problem = "takes steps before an overflow of fp16 gradients is known; set precision.compute: bf16"
        yield Fault(key, problem, "precision.compute: fp16")


_OF_LOCAL_STEPS, _OF_DEMO = ("outer_lr", "outer_momentum"), ("delay", "overlap", "elastic")
_USERS = {
    **dict.fromkeys(_OF_LOCAL_STEPS, "comm.name: local_steps or diloco"),
    **dict.fromkeys(_OF_DEMO, "comm.name: demo"),
}
"""The only methods with a key; without an entry, all methods except allreduce have it."""


def _check_comm(content: Content) -> Iterator[Fault]:
    comm, optim, train, precision = (get_section(content, name) for name in ("comm", "optim", "train", "precision"))
    name = method_name(comm)
    if name == "allreduce":
        of_allreduce = ("name", "bucket_mb", "find_unused_parameters", "timeout")
        for key in CommSection.model_fields:
            if key not in of_allreduce and _changed(comm, CommSection, key):
                users = _USERS.get(key, "comm.name: demo, local_steps or diloco")
                yield Fault(f"comm.{key}", f"has an effect with {users} alone")
        return
    if name in ("local_steps", "diloco"):
        yield from _check_local_steps(content)
    else:
        for key in _OF_LOCAL_STEPS:
            if _changed(comm, CommSection, key):
                yield Fault(f"comm.{key}", f"has an effect with {_USERS[key]} alone")
    if _changed(comm, CommSection, "find_unused_parameters"):
        yield Fault("comm.find_unused_parameters", "has an effect with comm.name: allreduce alone")
    if comm.get("overlap") is True:
        clip = train.get("clip", TrainSection.model_fields["clip"].default)
        if clip is not None:
            problem = (
                "sends gradients before their global norm is known, by which they are clipped; set train.clip: null"
            )
            yield Fault("comm.overlap", problem, f"train.clip: {clip}")
    elif _changed(comm, CommSection, "bucket_mb"):
        yield Fault("comm.bucket_mb", "has an effect with comm.name: allreduce, or with comm.overlap")
    limits, chosen = given_limits(comm), chosen_by_budget(comm)
    for option in BUDGET_OPTIONS:
        if option in comm and comm[option] is None and option not in chosen:
            default = getattr(CommSection(name=name), option)
            yield Fault(f"comm.{option}", f"must be a number, such as {default}; null is for a budget that chooses it")
    for key in limits:
        if chosen and all(comm.get(option) is not None for option in chosen):
            yield Fault(f"comm.{chosen[-1]}", f"is chosen by comm.{key}; leave one of both out", str(comm[chosen[-1]]))
        if name == "demo" and comm.get("exchange") == "dense":
            yield Fault(f"comm.{key}", "chooses topk, which exchange: dense does not have; leave one of both out")
    if "link" not in limits and _changed(comm, CommSection, "share"):
        yield Fault("comm.share", "has an effect with comm.link alone")
    elif len(limits) == 2:
        yield Fault("comm.budget", "is chosen by comm.link; leave one of both out", str(comm["budget"]))
    every = comm.get("sync_every", 1)
    if name == "demo" and isinstance(every, int) and every > 1 and comm.get("exchange") == "dense":
        yield Fault("comm.exchange", "dense sends everything in every step; set sync_every: 1", f"sync_every: {every}")
    topk, chunk = (comm.get(key, CommSection.model_fields[key].default) for key in ("topk", "chunk"))
    if isinstance(topk, int) and isinstance(chunk, int) and topk > chunk**2 > 0:
        yield Fault("comm.topk", f"must be at most chunk^2 = {chunk**2}, all there is in a block", str(topk))
    if optim.get("release_gradients") is True:
        problem = "steps each parameter before its gradient could be exchanged; leave one of both out"
        yield Fault("optim.release_gradients", problem, f"comm.name: {name}")
    if train.get("graph") is True:
        yield Fault("train.graph", "cannot capture an exchange; leave one of both out", f"comm.name: {name}")
    if precision.get("compute") == "fp16":
        problem = (
            "changes the loss scale, which the momentum would keep"
            if name == "demo"
            else "has one loss scale for all replicas, whose gradients overflow in different steps"
        )
        yield Fault("comm.name", f"{problem}; set precision.compute: bf16", "precision.compute: fp16")


def _check_elastic(content: Content) -> Iterator[Fault]:
    if get_section(content, "comm").get("elastic") is not True:
        return
    for name, model, key, why in (
        ("comm", CommSection, "delay", "needs replicas that stay"),
        ("comm", CommSection, "overlap", "needs replicas that stay"),
        ("comm", CommSection, "state_sync_every", "needs replicas that stay"),
        ("comm", CommSection, "sync_every", "is not possible with replicas that leave"),
        ("comm", CommSection, "budget", "is for a known number of replicas"),
        ("comm", CommSection, "link", "is for a known number of replicas"),
        ("data", DataSection, "workers", "make batches ahead, of a share that may change"),
        ("parallel", ParallelSection, "shard", "divides a model among processes of one run; a replica is one process"),
        ("parallel", ParallelSection, "replicate", "counts replicas, whose number changes"),
        ("parallel", ParallelSection, "batch_shares", "counts replicas, whose number changes"),
        ("tensor", TensorSection, "size_target", "changes shapes, which a joining replica could not take over"),
    ):
        section = get_section(content, name)
        if section.get(key) is not None and _changed(section, model, key):
            yield Fault(f"{name}.{key}", f"{why}; leave it or comm.elastic out", str(section[key]))
    if get_section(content, "comm").get("exchange") == "dense":
        problem = "keeps a momentum that a joining replica would not have; leave one of both out"
        yield Fault("comm.exchange", problem, "exchange: dense")


def _check_local_steps(content: Content) -> Iterator[Fault]:
    comm, precision = (get_section(content, name) for name in ("comm", "precision"))
    name = method_name(comm)
    unused = (*_OF_DEMO, *(SELECTION_OPTIONS if name == "diloco" else ()))
    for key in unused:
        if _changed(comm, CommSection, key):
            yield Fault(f"comm.{key}", "has no effect here; leave it out", f"comm.name: {name}")
    if precision.get("rounding") == "compensated":
        problem = "keeps bits of weights that the exchange replaces; set stochastic"
        yield Fault("precision.rounding", problem, f"comm.name: {name}")


def _check_parallel(content: Content) -> Iterator[Fault]:
    parallel, comm, optim, train, precision = (
        get_section(content, name) for name in ("parallel", "comm", "optim", "train", "precision")
    )
    if (tensor := parallel.get("tensor", 1)) != 1:
        problem = (
            "must be 1: tensor parallelism of transformers needs pretrained weights, works with neither TT layers nor "
            "low-bit momentum, and divides rows twice under parallel.shard; set parallel.shard instead"
        )
        yield Fault("parallel.tensor", problem, str(tensor))
    if parallel.get("shard", 1) == 1:
        for key in ("reshard", "reduce_dtype", "offload"):
            if _changed(parallel, ParallelSection, key):
                yield Fault(f"parallel.{key}", "has an effect with parallel.shard alone")
        return
    key = "parallel.shard"
    name = optim.get("name", OptimSection.model_fields["name"].default)
    if isinstance(name, str) and name.lower() in ("muon", "adafactor"):
        problem = "cannot shard an optimizer whose update needs whole matrices; set optim.name: came, adamw or sign"
        yield Fault(key, problem, f"optim.name: {name}")
    if precision.get("compute") == "fp16":
        problem = "gives each process other gradients, which could overflow on one alone; set precision.compute: bf16"
        yield Fault(key, problem, "precision.compute: fp16")
    if train.get("compile") is True:
        problem = "cannot compile a model that gathers its weights between blocks; leave one of both out"
        yield Fault("train.compile", problem, f"parallel.shard: {parallel['shard']}")
    if train.get("graph") is True:
        yield Fault("train.graph", "captures the step of one process; leave one of both out", "parallel.shard")
    if parallel.get("offload") is True and train.get("device") == "cpu":
        yield Fault("parallel.offload", "moves tensors from a GPU to the CPU; leave it out", "train.device: cpu")
    if comm.get("overlap") is True:
        problem = "sends the gradients of vectors before the processes of a replica have averaged them; leave it out"
        yield Fault("comm.overlap", problem, f"parallel.shard: {parallel['shard']}")
    for each in ("bucket_mb", "find_unused_parameters"):
        if _changed(comm, CommSection, each):
            yield Fault(f"comm.{each}", "has no effect with parallel.shard, which sends the gradients of each block")


def _check_graph(content: Content) -> Iterator[Fault]:
    from scantling.optim.registry import optimizer_options

    optim, train, precision = (get_section(content, name) for name in ("optim", "train", "precision"))
    if train.get("graph") is not True:
        return
    key = "train.graph"
    if train.get("device") == "cpu":
        yield Fault(key, "captures CUDA graphs; leave it out on a CPU", "train.device: cpu")
    if optim.get("release_gradients") is True:
        problem = "cannot capture a step that is taken within the backward pass; leave one of both out"
        yield Fault(key, problem, "optim.release_gradients: true")
    if precision.get("compute") == "fp16":
        problem = "cannot leave out an update whose fp16 gradients overflow; set precision.compute: bf16"
        yield Fault(key, problem, "precision.compute: fp16")
    name = optim.get("name", OptimSection.model_fields["name"].default)
    try:
        options = optimizer_options(name) if isinstance(name, str) else {"capturable": True}
    except UserError:
        return  # reported with optim.name
    if "capturable" not in options:
        problem = "needs an optimizer that can be captured, such as came or adamw"
        yield Fault(key, problem, f"the optimizer '{name}'")


def _check_parameters(content: Content) -> Iterator[Fault]:
    precision, optim = get_section(content, "precision"), get_section(content, "optim")
    if "rounding" in optim:
        yield Fault("optim.rounding", "belongs to precision.rounding, with precision.parameters: bf16")
    if precision.get("parameters", "fp32") != "bf16":
        if _changed(precision, PrecisionSection, "rounding"):
            yield Fault("precision.rounding", "has an effect with precision.parameters: bf16 alone")
        return
    key = "precision.parameters"
    name = optim.get("name", OptimSection.model_fields["name"].default)
    if isinstance(name, str) and name.lower() != "came":
        how = "" if "name" in optim else ", the default"
        # all optimizers of torch.optim round a bf16 weight to the nearest value
        problem = (
            "bf16 would lose steps smaller than half the last bit of a weight, which this optimizer rounds to the "
            "nearest; set optim.name: came, which rounds them stochastically, or leave the key out"
        )
        yield Fault(key, problem, f"optim.name: {name}{how}")
    if precision.get("compute", "bf16") in ("fp32", "fp16"):
        problem = "bf16 weights are multiplied in bf16; leave precision.compute out"
        yield Fault(key, problem, f"precision.compute: {precision['compute']}")


def _check_precision(content: Content) -> Iterator[Fault]:
    precision, model = (get_section(content, name) for name in ("precision", "model"))
    if not precision:
        return
    from scantling.precision.matmul import Matmul
    from scantling.precision.quantizer import Quantizer

    quantizers, is_whole = {}, True
    for key in ("weights", "activations", "kv_cache", "queries", "gradients"):
        given = precision.get(key)
        if isinstance(given, str | Mapping) and given:
            given = given if isinstance(given, str) else {k: v for k, v in given.items() if v is not None}
            try:
                quantizers[key] = Quantizer.from_spec(given, "channel" if key == "weights" else "token")
            except UserError as error:
                yield Fault(f"precision.{key}", str(error))
                is_whole = False
    if model.get("attention") == "eager":
        for key in ("kv_cache", "queries"):
            if key in quantizers:
                yield Fault(f"precision.{key}", "needs model.attention: sdpa", "model.attention: eager")
    compute = precision.get("compute")
    if compute not in ("int8", "fp8") or not is_whole:
        return
    matmul, multiplied = Matmul(compute), ("weights", "activations", "gradients")
    for key in multiplied:
        if key in quantizers or key != "gradients":
            try:
                matmul.check(quantizers.get(key), key)
            except UserError as error:
                yield Fault("precision.compute", str(error))
    try:
        for one, other in combinations([quantizers[key] for key in multiplied if key in quantizers], 2):
            matmul.check_pair(one, other)
    except UserError as error:
        yield Fault("precision.compute", str(error))


CHECKS: tuple[Callable[[Content], Iterator[Fault]], ...] = (
    _check_name,
    _check_model,
    _check_data,
    _check_task,
    _check_clicks,
    _check_batch,
    _check_schedule,
    _check_tensor,
    _check_optim,
    _check_release,
    _check_comm,
    _check_elastic,
    _check_parallel,
    _check_graph,
    _check_parameters,
    _check_precision,
)
