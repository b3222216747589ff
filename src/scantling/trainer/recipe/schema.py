"""Schema of a recipe: one YAML file that describes a run.

All sections except `model`, `data` and `train` are optional, and an absent section means the usual default: dense
weights, AdamW, gradient all-reduce, fp32. `scantling schema` prints the JSON schema of these classes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationInfo,
    field_validator,
    model_validator,
)

from scantling.comm.config import (
    DILOCO_STEPS,
    LOCAL_STEPS,
    OPTIONS,
    OUTER_LR,
    SELECTION_OPTIONS,
    Exchange,
    ResidualFormat,
    Values,
    local_step_defaults,
)
from scantling.errors import UserError
from scantling.numerics.literals import Clip, Granularity, Rounding

Text = Annotated[str, StringConstraints(min_length=1)]
# YAML reads the labels 0 and 1 as numbers, and documents are labeled with texts; true and false stay invalid
Label = Annotated[
    Text,
    BeforeValidator(
        lambda value: str(value) if isinstance(value, int) and not isinstance(value, bool) else value,
        json_schema_input_type=str | int,
    ),
]
Paths = Text | Annotated[list[Text], Field(min_length=1)]

TASKS = ("causal-lm", "masked-lm", "seq2seq", "classification", "clicks", "image-classification")
SOURCES = ("corpus", "text", "jsonl", "csv", "parquet", "hf", "bin", "criteo", "images")
CLICK_SOURCES = ("criteo", "csv", "parquet")
"""Sources that the task `clicks` reads."""
IMAGE_SOURCES = ("images", "hf")
"""Sources that the task `image-classification` reads."""
DIGITS = "digits"
"""The built-in images."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True)

    @field_validator("*", mode="wrap")
    @classmethod
    def _no_bool_for_a_number(cls, value: Any, handler: Any) -> Any:
        result = handler(value)
        # pydantic converts true to 1
        if isinstance(value, bool) and not isinstance(result, bool):
            raise ValueError("must be a number, not true or false")
        return result


class ModelSection(Section):
    """The model to train: a preset, or a configuration or model folder in Hugging Face's format."""

    preset: Text | None = None
    """Name of a built-in architecture, such as `llama-10m`. Give exactly one of `preset` and `hf`."""
    hf: Text | None = None
    """A local folder with `config.json` (and weights, for fine-tuning), a `config.json` file, or a name on the
    Hugging Face Hub, which is downloaded to its cache (with `HF_HUB_OFFLINE=1`: read from the cache)."""
    pretrained: bool | None = None
    """Load the weights in the `hf` folder. Default: true if the folder holds weights, and for names on the Hub."""
    task: Literal["causal-lm", "masked-lm", "seq2seq", "classification", "clicks", "image-classification"] | None = None
    """Training task. Default: the preset's task, or the one that the configuration's architecture is made for.
    Decoders that also read images or sound, such as Gemma 3, are `causal-lm`: their language model trains on text,
    and their other parameters are frozen."""
    overrides: dict[str, Any] = Field(default_factory=dict)
    """Keys of the transformers configuration to change, such as `{hidden_size: 128, num_hidden_layers: 2}`. Nested
    configurations, such as `{text_config: {vocab_size: 512}}`, are merged: their other keys are kept."""
    attention: Literal["sdpa", "eager"] = "sdpa"
    """Attention implementation of transformers."""


class Fields(Section):
    """Column names of a structured source."""

    text: Text = "text"
    """Column with the text (the first sentence of a pair; for seq2seq, the input)."""
    pair: Text | None = None
    """Column with the second sentence of a pair; for seq2seq, the target."""
    label: Text | None = None
    """Column with the label, for classification of texts and images."""
    image: Text = "image"
    """Column with the image, for an `hf` dataset."""


Rows = Annotated[int, Field(ge=1, le=2**31 - 1)]
ColumnNames = Annotated[list[Text], Field(min_length=1)]


class Clicks(Section):
    """Label and feature columns of a click log, and their conversion to numbers and ids."""

    label: Text | None = None
    """Column with the label: 0 or 1. Criteo's files need no setting. Rows without a label are skipped."""
    label_above: float | None = Field(default=None, allow_inf_nan=False)
    """Threshold for a numeric label: values above it count as 1. Example: 15 for minutes of delay."""
    numeric: ColumnNames | None = None
    """Columns with numbers. Default: none; for Criteo's files, I1 to I13."""
    categorical: ColumnNames | None = None
    """Columns with categories, texts or numbers. Default: C1 to C26 of Criteo's files."""
    scaling: Literal["standard", "log1p"] = "standard"
    """Scaling of numbers. `standard`: subtract the mean and divide by the deviation of the training rows. `log1p`:
    log(1 + x), 0 for x below 0. Missing numbers become 0."""
    table_size: Rows | dict[Text, Rows] | None = None
    """Number of ids that categories are hashed to, for all columns or per column. Without it, each category has its
    own id."""
    min_count: int = Field(default=1, ge=1)
    """For categories with their own ids: categories rarer than this in the training rows share the id of unknown
    ones."""

    def num_rows(self, column: str) -> int | None:
        """Return the number of ids that a column's categories are hashed to; None if each category has its own id."""
        # a mapping names only some columns; the others keep one id per category
        return self.table_size.get(column) if isinstance(self.table_size, dict) else self.table_size


class BpeTokenizer(Section):
    """A byte-level BPE trained on the training documents and cached."""

    bpe: int = Field(ge=261, le=1_000_000)
    """Vocabulary size, including 256 bytes and 5 special tokens."""


class DataSection(Section):
    """The training data. Give exactly one source."""

    corpus: Literal["python-stdlib"] | None = None
    """A built-in corpus: `python-stdlib` is the source of the Python standard library on this machine."""
    text: Paths | None = None
    """Text files, folders or globs, UTF-8, also `.gz` and `.xz`. Each file is a document, or see
    `document_separator`. A folder stands for all files in it and its subfolders, except hidden ones."""
    jsonl: Paths | None = None
    """JSON Lines files, globs, or folders of `.jsonl` files, also compressed; columns are named in `fields`."""
    csv: Paths | None = None
    """CSV files with a header line, globs, or folders of `.csv` files, also compressed; columns are named in
    `fields`."""
    parquet: Paths | None = None
    """Parquet files, globs, or folders of `.parquet` files; columns are named in `fields`."""
    hf: Text | None = None
    """A Hugging Face dataset name or folder, read through `datasets`."""
    hf_config: Text | None = None
    """Configuration name of the `hf` dataset."""
    hf_split: Text = "train"
    """Split of the `hf` dataset to train on."""
    bin: Paths | None = None
    """Flat files of token ids (uint16 or uint32, little endian) from another tokenization pipeline. Set `tokenizer`
    to the one that made them; without it, the vocabulary size is the largest id in the files plus one."""
    bin_dtype: Literal["uint16", "uint32"] = "uint16"
    """Data type of the `bin` files."""
    criteo: Paths | None = None
    """Click logs in Criteo's format, also compressed: a label, 13 numbers and 26 categories, separated by tabs."""
    images: Text | None = None
    """Labeled images: a folder with one subfolder of images per class, an `.npz` file with arrays `images` and
    `labels`, or `digits`: scikit-learn's 1,797 handwritten digits of 8x8 pixels (needs the `vision` extra)."""
    image_size: int | None = Field(default=None, ge=1, le=4096)
    """Width and height in pixels that all images are resized to, whatever their shape. Required unless `images:
    digits`."""
    image_channels: Literal[1, 3] | None = None
    """1 converts images to grayscale, 3 to RGB. Default: 3, and 1 for `digits`."""
    image_shift: int = Field(default=0, ge=0, le=4096)
    """Shift training images by up to this many pixels along both sides, randomly in each epoch; empty pixels are
    black."""
    image_flip: bool = False
    """Mirror half of the training images left to right, randomly in each epoch."""
    clicks: Clicks | None = None
    """Columns of click logs; required for `csv` and `parquet`."""
    fields: Fields = Field(default_factory=Fields)
    """Column names of structured sources."""
    labels: list[Label] | None = None
    """The label set in the order of the ids. Default: the sorted labels of the training documents."""
    document_separator: Text | None = None
    """In text files, a line that starts with this begins a new document (the line itself is removed)."""
    tokenizer: Text | BpeTokenizer = "bytes"
    """`bytes` (for `bin` files: none), `{bpe: VOCABULARY_SIZE}`, a folder or `tokenizer.json` file in Hugging Face's
    format, or a name on the Hub as in `model.hf`."""
    seq_len: int = Field(default=256, ge=2, le=1_048_576)
    """Tokens per training sequence (the maximum, for classification and pairs); for seq2seq, tokens of the input."""
    target_len: int | None = Field(default=None, ge=2, le=1_048_576)
    """seq2seq: most tokens of a target. Default: `seq_len`."""
    document_mask: bool = False
    """Keep attention inside a document if several are packed into one sequence (slower). Models that ignore the mask
    are rejected."""
    heldout: float = Field(default=0.05, ge=0.0, lt=1.0)
    """Share held out for evaluation: of the documents, never of windows; if there is only one document, its end; for
    `bin` files, their end; for click logs, of the rows; for images, of the images."""
    validation: Paths | None = None
    """Held-out files or images of the same kind as the source (for `hf`: a split), instead of `heldout`."""
    max_bytes: int | None = Field(default=None, ge=1)
    """Use only about this many bytes of text, in complete documents, selected by hash."""
    mask_probability: float = Field(default=0.15, gt=0.0, lt=1.0)
    """Masked LM, and seq2seq without pairs: share of the tokens to predict."""
    span_length: float = Field(default=3.0, ge=1.0, allow_inf_nan=False)
    """seq2seq without pairs: average number of tokens in a hidden span."""
    bucket: bool = True
    """Classification, and seq2seq with pairs: batch examples of similar length to reduce padding."""
    pad_to_multiple_of: int | None = Field(default=None, ge=1)
    """Classification, and seq2seq with pairs: round batch lengths up to a multiple of this, at most `seq_len`. With
    `seq_len` itself, all batches have one shape, which is best for CUDA graphs. Default: the longest example of the
    batch."""
    workers: int = Field(default=0, ge=0, le=64)
    """Processes that prepare batches; the order of the data does not depend on it."""

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of the model's input images."""
        size = self.image_size or (8 if self.images == DIGITS else None)
        if size is None:
            raise AssertionError("a loaded recipe has a size for its images")
        return self.image_channels or (1 if self.images == DIGITS else 3), size, size

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, inputs and targets."""
        return max(self.seq_len, self.target_len or 0)


class OptimSection(Section):
    """The optimizer, by name; all other keys are its arguments, such as `betas: [0.9, 0.95]`."""

    model_config = ConfigDict(extra="allow")

    name: Text = "adamw"
    """`adamw`, `came`, `adafactor`, `sgd`, `muon`, `sign`, or a class of torch.optim that needs gradients only."""
    lr: float = Field(default=1e-3, gt=0.0, allow_inf_nan=False)
    """Peak learning rate."""
    weight_decay: float = Field(default=0.1, ge=0.0, allow_inf_nan=False)
    """Weight decay of matrices and embeddings, decoupled if the optimizer supports it; vectors are never decayed."""
    release_gradients: bool = False
    """`came` on one process, or on the shards of one replica: step each parameter within the backward pass and free its
    gradient. Needs `clip: null`."""
    embedding_lr_scale: float = Field(default=1.0, gt=0.0, allow_inf_nan=False)
    """Learning rate of embeddings as a multiple of `lr`: 10 to 16 for T5, whose embeddings are initialized large."""

    @property
    def rates(self) -> dict[str, float]:
        """Learning rates that `scantling.param_groups` takes for some parameters; empty if all use `lr`."""
        # empty, so that groups with the same rate are not split
        return {} if self.embedding_lr_scale == 1.0 else {"embedding_lr": self.embedding_lr_scale * self.lr}

    @property
    def options(self) -> dict[str, Any]:
        """The optimizer's own arguments, as given."""
        return dict(self.model_extra or {})


class TensorSection(Section):
    """CoMERA: layers are stored as TT cores, whose ranks can be pruned to a size target during training."""

    rank: int | list[int] | dict[str, int | list[int] | dict[str, Any]] = 32
    """TT ranks: one for all layers, or by pattern of layer names, see `scantling.tensorize`."""
    format: Literal["tt", "tt-silu", "low-rank", "cola"] = "tt"
    """Format of linear layers: tensor trains (`tt`) or two thin matrices (`low-rank`). `tt-silu` and `cola` are the
    same with silu between the factors that narrow and those that widen."""
    num_modes: int | None = Field(default=None, ge=1, le=5)
    """Number of modes that the inputs and outputs of linear layers are split into. Default: 3 for tensor trains, 1
    for two matrices."""
    init: Literal["random", "svd"] = "random"
    """`random`: random initialization with the norm of the replaced weights, to train from scratch; it discards the
    weights in `model.hf`, with a warning. `svd`: the closest TT approximation, with a warning that gives its distance
    from the weights."""
    lr_scale: float = Field(default=1 / 3, gt=0.0, allow_inf_nan=False)
    """Learning rate of the TT cores as a share of `optim.lr`. It is below 1 because all cores of a weight change at
    once."""
    embedding_lr_scale: float = Field(default=1.0, gt=0.0, allow_inf_nan=False)
    """Learning rate of the TT cores of embeddings as a multiple of `optim.lr`. A row is looked up in few steps."""
    control_lr_scale: float | None = Field(default=None, gt=0.0, allow_inf_nan=False)
    """Learning rate of the rank gates as a multiple of `optim.lr`. A gate scales its rank in the whole weight, so a
    higher rate than that of the cores makes training unstable. Default: `lr_scale`."""
    size_target: float | None = Field(default=None, gt=0.0, allow_inf_nan=False)
    """Target size of the TT layers: a share of their size if at most 1, or else a size in `unit`. Default: no target.
    """
    unit: Literal["parameters", "flops", "bytes"] = "parameters"
    """Unit of the size target: TT parameters, FLOPs per token (forward and backward), or bytes of training state."""
    adapt: float = Field(default=0.5, gt=0.0, allow_inf_nan=False)
    """Step at which the target is reached: a number of steps, or a share of all steps if at most 1."""
    truncate_every: int = Field(default=50, ge=1)
    """Steps between removals of pruned ranks; the last removal is when the target is reached."""
    adapter: dict[str, Any] = Field(default_factory=dict)
    """Other settings of the rank adapter, such as `{schedule: paper, gamma: 0.1}`; see `RankOptions`."""

    def rates(self, lr: float) -> dict[str, float]:
        """Return the learning rates of TT cores and rank gates for `scantling.param_groups`, given the run's rate."""
        control = self.lr_scale if self.control_lr_scale is None else self.control_lr_scale
        return {
            "core_lr": self.lr_scale * lr,
            "embedding_core_lr": self.embedding_lr_scale * lr,
            "control_lr": control * lr,
        }

    def rank_options(self, steps: int) -> dict[str, Any]:
        """Return the arguments of the `RankAdapter` in a run of this many steps."""
        adapt = adapt_steps(self.adapt, steps)
        return {"size_target": self.size_target, "unit": self.unit, "steps": adapt, **self.adapter}


def adapt_steps(adapt: float, steps: int) -> int:
    """Return `tensor.adapt` as a number of steps in a run of `steps`."""
    return max(1, round(adapt * steps) if adapt <= 1.0 else round(adapt))


def _demo_option(name: str) -> Any:
    """Return a field with the default, the limits and the description of an option of the exchange."""
    option, limits = OPTIONS[name], OPTIONS[name].metadata
    return Field(default=option.default, ge=limits["least"], le=limits["most"], description=f"demo: {limits['doc']}")


def method_defaults(name: str, chunk: int) -> dict[str, Any]:
    """Return the defaults of a method of `comm` that differ from those of the fields; see `sparseloco` and `diloco`."""
    if name == "local_steps":
        return {"sync_every": LOCAL_STEPS, "outer_lr": OUTER_LR, **local_step_defaults(chunk)}
    if name == "diloco":
        return {"sync_every": DILOCO_STEPS, "dense": "fp32", "outer_lr": 0.7, "outer_momentum": 0.9}
    return {}


BUDGET_OPTIONS = ("topk", "sync_every")
"""Options of `comm` that may be None, so that a budget of bytes chooses them."""
_UNITS = {"budget": ("B/step", "2 MB/step"), "link": ("bit/s", "100 Mbit/s")}
"""Unit and example of the keys of `comm` that have one."""


def _form(key: str) -> str:
    """Return the regular expression of a number with the unit of its key."""
    return rf"^([0-9]+(?:\.[0-9]+)?) ?([kMG]?){_UNITS[key][0]}$"


def _number(text: object, key: str) -> float:
    """Return the number of a text such as `2 MB/step` in the unit of its key.

    Raises:
        ValueError: another form, or 0.
    """
    unit, example = _UNITS[key]
    found = re.fullmatch(_form(key), str(text))
    number = float(found[1]) * {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9}[found[2]] if found else 0.0
    if not number:
        raise ValueError(f"must be a number above 0 and its unit, {unit} with k, M, G or nothing before it: {example}")
    return number


def given_limits(comm: Mapping[str, Any]) -> list[str]:
    """Return which of `budget` and `link`, which choose options, are given in a section `comm`."""
    return [key for key in ("budget", "link") if comm.get(key) is not None]


def method_name(comm: Mapping[str, Any]) -> Any:
    """Return `comm.name` as given, or its default."""
    return comm.get("name", "local_steps" if given_limits(comm) else "allreduce")


def chosen_by_budget(comm: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the options that the budget or the link of a section `comm` chooses, unless they are given."""
    name = method_name(comm)
    if not given_limits(comm):
        return ()
    if name == "local_steps":
        return ("sync_every",) if comm.get("exchange") == "dense" else BUDGET_OPTIONS
    return ("topk",) if name == "demo" else ("sync_every",) if name == "diloco" else ()


class CommSection(Section):
    """Communication between the processes of a run."""

    name: Literal["allreduce", "demo", "local_steps", "diloco"] = "allreduce"
    """`allreduce`: gradients are averaged in buckets during the backward pass (DDP). `demo`: each process keeps its
    own momentum and sends only the largest components; with `optim.name: sign` this is DeMo. `local_steps`: each
    replica steps its own optimizer, and every `sync_every` steps the replicas exchange the largest elements of what
    these changed, by default the signs of all (as SparseLoCo, but each keeps the rest in its weights); `diloco`: all of
    what they changed. The two have defaults of their own: `sync_every` 15, signs, the `topk` of whole blocks and
    `decay` 1, or `sync_every` 250 and `dense` fp32, and `outer_lr`. With a `budget` or a `link` the default is
    `local_steps`."""
    bucket_mb: float = Field(default=25.0, gt=0.0, le=1024.0)
    """Bucket size in MiB, for allreduce and for demo with overlap."""
    find_unused_parameters: bool = False
    """allreduce: true if some parameters may get no gradient in a step, which is then checked in each step. Without
    it, a model with such parameters raises an error."""
    timeout: float = Field(default=300.0, gt=0.0, le=1e7)
    """Seconds that processes wait for each other in a step; they wait longer for data and for checkpoint checksums."""
    topk: int | None = _demo_option("topk")
    chunk: int = _demo_option("chunk")
    decay: float = _demo_option("decay")
    values: Values = _demo_option("values")
    dense: Values = _demo_option("dense")
    residual: ResidualFormat = _demo_option("residual")
    exchange: Exchange = _demo_option("exchange")
    sync_every: int | None = _demo_option("sync_every")
    state_sync_every: int | None = _demo_option("state_sync_every")
    check_every: int | None = _demo_option("check_every")
    delay: int = _demo_option("delay")
    overlap: bool = _demo_option("overlap")
    outer_lr: float = Field(default=1.0, gt=0.0, allow_inf_nan=False)
    """Learning rate of the outer step. Default of local_steps: 1.3; of diloco: 0.7."""
    outer_momentum: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Local steps: Nesterov momentum of the outer step. Default with diloco: 0.9."""
    elastic: bool = False
    """demo: true for replicas that leave and join during the run, with torchft. Each is one process, started without
    torchrun, with its own run directory, and finds the others through the lighthouse at `TORCHFT_LIGHTHOUSE`."""
    budget: Annotated[str, Field(pattern=_form("budget"))] | None = None
    """Bytes that a process may send to other replicas per step, such as `2 MB/step`. It chooses `topk` of demo,
    `sync_every` of diloco, and of local steps both, or the one that is left out. Options that it chooses are null in a
    stored recipe, and depend on the number of replicas."""
    link: Annotated[str, Field(pattern=_form("link"))] | None = None
    """Speed at which a process sends to other replicas, such as `100 Mbit/s`. A new run first measures its forward and
    backward passes, and sets `budget` so that sending takes `share` of their time."""
    share: float = Field(default=0.1, gt=0.0, le=1.0)
    """Time of the messages on the `link`, as a share of the time of forward and backward passes."""

    @model_validator(mode="before")
    @classmethod
    def _fill_defaults(cls, content: Any) -> Any:
        """Fill in the defaults of a method, so that a stored recipe has them as values."""
        if not isinstance(content, Mapping):
            return content
        name = method_name(content)
        chunk = content.get("chunk", cls.model_fields["chunk"].default)
        try:
            defaults = method_defaults(name, int(chunk))
        except (TypeError, ValueError):  # a fault, which is found later
            defaults = {}
        if given_limits(content):
            defaults |= {"name": name, **dict.fromkeys(chosen_by_budget(content))}
        return {**defaults, **content}

    @field_validator("budget", "link", mode="before")
    @classmethod
    def _check_number(cls, value: Any, info: ValidationInfo) -> Any:
        if value is not None:
            _number(value, str(info.field_name))
        return value

    @property
    def budget_bytes(self) -> float | None:
        """The budget in bytes per step."""
        if self.budget is None:
            return None
        return _number(self.budget, "budget")

    def budget_on_link(self, seconds: float) -> str | None:
        """Return the budget of a run whose passes take this many seconds per step; None without a `link`."""
        if self.link is None:
            return None
        return f"{max(1, int(_number(self.link, 'link') / 8 * self.share * seconds))} B/step"

    @property
    def keeps_replicas_equal(self) -> bool:
        """False with local steps: weights and optimizer states differ between replicas."""
        return self.name in ("allreduce", "demo")

    @property
    def demo_options(self) -> dict[str, Any]:
        """The arguments of `MomentumExchange`."""
        return {name: getattr(self, name) for name in OPTIONS}

    @property
    def local_options(self) -> tuple[str, dict[str, Any], dict[str, Any]]:
        """The arguments of `LocalStepsExchange`: method, options of the outer optimizer, options of the exchange."""
        is_diloco = self.name == "diloco"
        outer = {name: getattr(self, name) for name in ("sync_every", "outer_lr", "outer_momentum")}
        unused = {"sync_every", *(SELECTION_OPTIONS if is_diloco else ())}
        options = {name: value for name, value in self.demo_options.items() if name not in unused}
        return "diloco" if is_diloco else "sparseloco", outer, options


class ParallelSection(Section):
    """Division of the model among the processes of a run: `replicate` replicas of `shard` processes each.

    Every process takes its own share of the batch. The processes of a replica hold a part of each weight matrix, of its
    gradient and of its optimizer state, and gather the weights of a block when they need them (FSDP2).
    """

    shard: Annotated[int, Field(ge=1)] | Literal["auto"] = 1
    """Processes that share one replica; `auto`: as many as `replicate` leaves."""
    replicate: int | None = Field(default=None, ge=1)
    """Replicas, which `comm` synchronizes. Default: as many as `shard` leaves; 1 with `shard: auto`."""
    batch_shares: list[Annotated[int, Field(ge=1)]] | None = Field(default=None, min_length=1)
    """Relative shares of the replicas in each batch, such as `[3, 1]` if the first one is three times as fast.
    Default: equal shares. All tokens have the same weight, whichever replica trains on them."""
    tensor: int = Field(default=1, ge=1)
    """Processes that share each matrix product (tensor parallelism): 1, because that of transformers needs pretrained
    weights, works with neither TT layers nor low-bit momentum, and divides rows twice under `shard`."""
    reshard: Literal["auto", "always", "never"] = "auto"
    """Free the gathered weights of a block after its forward pass and gather them again for its backward pass. `auto`:
    of all blocks, but not of the layers outside of blocks, which the backward pass needs first; `never` sends a third
    less and keeps all weights between the passes."""
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """Format in which gradients are sent and summed."""
    offload: bool = False
    """Keep weights, gradients and optimizer state in the memory of the CPU, and update them there; on a GPU alone."""
    async_checkpoint: bool = False
    """Write checkpoints while training goes on, from a copy of weights and optimizer state in the memory of the CPU, to
    the same files. Needs no `shard`."""

    def mesh_shape(self, world_size: int) -> tuple[int, int]:
        """Return the replicas, and the processes of each, among this many processes.

        Raises:
            UserError: the numbers do not fit.
        """
        if self.shard == "auto":
            replicate = self.replicate or 1
            shard = max(1, world_size // replicate)
        else:
            shard, replicate = self.shard, self.replicate or max(1, world_size // self.shard)
        if replicate * shard != world_size:
            given = f"parallel.shard: {self.shard}"
            given += "" if self.replicate is None else f" and parallel.replicate: {self.replicate}"
            raise UserError(
                f"{given} do not fit {world_size} process{'es' if world_size > 1 else ''}, which must be replicate x "
                "shard; start as many with torchrun, or change one of the two"
            )
        return replicate, shard


class FormatSection(Section):
    """A low-precision number format, and the values that share a scale."""

    format: Text
    """Name of the format, such as `int4`, `fp8_e4m3` or `mxfp4_e2m1`."""
    granularity: Granularity | None = None
    """Values that share a scale. Default: a channel for weights, a token for everything else, groups for block
    formats. With `tensor` or `channel`, activations, keys, values and queries of a token depend on later tokens and
    on the other sequences of the batch. `tensor` is the setting of the paper on precision laws."""
    group_size: int | None = Field(default=None, ge=1)
    """Number of neighboring values that share a scale."""
    rounding: Rounding = "nearest"
    """Round to the nearest value, or stochastically so that the mean is kept."""
    clip: Clip = "absmax"
    """Value that the largest code represents: the largest magnitude, or the one with the least squared error."""


class PrecisionSection(Section):
    """Number formats of the run."""

    parameters: Literal["fp32", "bf16"] = "fp32"
    """Format of the weights, of their gradients and of checkpoints. `bf16`: weight matrices and embeddings are stored
    in bf16 alone, without an fp32 copy, and `optim.name: came` writes them with `rounding`; `compute` is bf16 by
    default. Vectors, such as biases and norms, and TT cores are few numbers and stay fp32."""
    rounding: Literal["stochastic", "compensated"] = "stochastic"
    """How a bf16 weight is written, so that steps smaller than its last bit are not lost: randomly up or down, right in
    the mean, or to the nearest, with the error kept for the next step in one more byte per weight."""
    compute: Literal["fp32", "bf16", "fp16", "int8", "fp8"] = "fp32"
    """Format of matrix products: fp32, or autocast to bf16, or to fp16 with loss scaling. With `int8` and `fp8`,
    linear layers multiply in the formats of `weights` and `activations`; everything else uses bf16 on a GPU and fp32
    on a CPU."""
    weights: Text | FormatSection | None = None
    """Format of the weights of linear layers in the forward pass: a name such as `int8`, or a mapping."""
    activations: Text | FormatSection | None = None
    """Format of the inputs of linear layers."""
    kv_cache: Text | FormatSection | None = None
    """Format of keys and values in attention."""
    queries: Text | FormatSection | None = None
    """Format of queries in attention."""
    gradients: Text | FormatSection | None = None
    """Format of the gradients that are multiplied in the backward pass of linear layers."""

    @model_validator(mode="before")
    @classmethod
    def _compute_in_the_format_of_the_weights(cls, content: Any) -> Any:
        is_bf16 = isinstance(content, Mapping) and content.get("parameters") == "bf16"
        return {"compute": "bf16", **content} if is_bf16 else content

    def autocast(self, device: str) -> str:
        """Return the format of products that are not in low precision, on a kind of device."""
        if self.compute not in ("int8", "fp8"):
            return self.compute
        return "bf16" if device == "cuda" or self.parameters == "bf16" else "fp32"

    @property
    def quantized(self) -> dict[str, Any]:
        """The arguments of `quantize_training`; empty without quantization."""
        given = {name: getattr(self, name) for name in ("weights", "activations", "kv_cache", "queries", "gradients")}
        formats = {
            name: each.model_dump(exclude_none=True) if isinstance(each, FormatSection) else each
            for name, each in given.items()
            if each is not None
        }
        return formats | ({"compute": self.compute} if self.compute in ("int8", "fp8") else {})


class TrainSection(Section):
    """Length and settings of the training."""

    steps: int = Field(ge=1)
    """Optimizer steps."""
    batch_tokens: int | None = Field(default=None, ge=1)
    """Tokens per optimizer step over all processes, a multiple of `seq_len`; or give `batch_size`."""
    batch_size: int | None = Field(default=None, ge=1)
    """Sequences per optimizer step over all processes."""
    micro_batch_size: int | None = Field(default=None, ge=1)
    """Sequences per forward pass of one process. Default: its whole share, without gradient accumulation. With
    `release_gradients` and `activation_checkpointing: true` they pass one block after the other, so that the gradients
    of one block exist at a time; the inputs of all blocks are then stored for the whole share."""
    clip: float | None = Field(default=1.0, gt=0.0)
    """Largest global gradient norm; null for no clipping."""
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """Learning rate after warm-up: cosine or linear decay, or stable and then linear decay (wsd), or constant."""
    warmup: float = Field(default=0.05, ge=0.0)
    """Warm-up: a number of steps, or a share of all steps if below 1."""
    decay: float = Field(default=0.2, gt=0.0, le=1.0)
    """Share of all steps in which `wsd` decays."""
    min_lr_ratio: float = Field(default=0.1, ge=0.0, le=1.0)
    """Learning rate at the end, as a share of the peak."""
    eval_every: int | None = Field(default=None, ge=1)
    """Steps between evaluations; one always follows the last step."""
    eval_samples: int | None = Field(default=None, ge=1)
    """Most held-out sequences per evaluation. Default: all."""
    checkpoint_every: int | None = Field(default=None, ge=1)
    """Steps between checkpoints; one always follows the last step."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Number of checkpoints to keep, the newest ones."""
    seed: int = Field(default=0, ge=0, le=2**32 - 1)
    """Seed of the weights, the order of the data, the split and dropout."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` uses the GPU if there is one."""
    compile: bool = False
    """Compile the model with torch.compile."""
    graph: bool = False
    """Capture each step in CUDA graphs; requires one process on a GPU, and batches of one or few shapes."""
    activation_checkpointing: bool | Literal["feed_forward"] = False
    """Recompute activations in the backward pass instead of storing them: those of whole blocks, or, with
    `feed_forward`, only those of feed-forward layers and norms."""
    loss_chunk: int | None = Field(default=None, ge=1)
    """causal-lm: compute logits and loss for this many tokens at a time, and logits again in the backward pass, so that
    those of a whole batch never exist. For large vocabularies: 512 tokens of 128,256 classes take 0.25 GiB."""
    deterministic: bool = False
    """Force deterministic kernels on a GPU (they are always used on a CPU)."""
    tensorboard: bool = False
    """Also write TensorBoard events to the run directory (needs the `tb` extra)."""


class Recipe(Section):
    """One training run."""

    name: Text | None = None
    """Name of the run. Default: the recipe file's name."""
    model: ModelSection
    """The model to train."""
    data: DataSection
    """The training data."""
    tensor: TensorSection | None = None
    """Layers as TT cores. Default: dense layers."""
    optim: OptimSection = Field(default_factory=OptimSection)
    """The optimizer."""
    comm: CommSection = Field(default_factory=CommSection)
    """Communication between processes."""
    parallel: ParallelSection = Field(default_factory=ParallelSection)
    """Division of the model among processes."""
    precision: PrecisionSection = Field(default_factory=PrecisionSection)
    """Number formats."""
    train: TrainSection
    """Settings of the training loop: steps, batch, schedule, checkpoints."""

    def with_budget(self, budget: str) -> Recipe:
        """Return this recipe with a budget of bytes instead of `comm.link` and `comm.share`."""
        comm = {"budget": budget, "link": None, "share": CommSection.model_fields["share"].default}
        return self.model_copy(update={"comm": self.comm.model_copy(update=comm)})

    def with_measured_budget(self, stored: Recipe) -> Recipe:
        """Return this recipe with the budget that a stored run measured for its link; measuring again would differ."""
        if self.comm.link is None or stored.comm.budget is None:
            return self
        return self.with_budget(stored.comm.budget)

    @property
    def optimizer_options(self) -> dict[str, Any]:
        """The arguments of the optimizer, without learning rate and weight decay."""
        rounding = {} if self.precision.parameters == "fp32" else {"rounding": self.precision.rounding}
        return self.optim.options | rounding

    @property
    def batch_size(self) -> int:
        """Sequences per optimizer step over all processes."""
        if self.train.batch_size is not None:
            return self.train.batch_size
        if self.train.batch_tokens is None:
            raise AssertionError("a loaded recipe has a batch size")
        return self.train.batch_tokens // self.data.seq_len

    def micro_batch_size(self, world_size: int = 1) -> int:
        """Return the most sequences per forward pass of one of `world_size` processes."""
        # at least one, although `check_world_size` refuses a batch that is smaller than the number of processes
        share = max(1, self.batch_share(world_size))
        return min(self.train.micro_batch_size or share, share)

    def batch_weights(self, world_size: int = 1) -> list[int]:
        """Return the relative shares of all processes in a batch."""
        shares = self.parallel.batch_shares
        if shares is None or world_size == 1:
            return [1] * world_size
        return [share for share in shares for _ in range(max(1, world_size // len(shares)))]

    def batch_share(self, world_size: int = 1) -> int:
        """Return the most sequences of one of `world_size` processes in a step."""
        weights = self.batch_weights(world_size)
        return self.batch_size * max(weights) // sum(weights)

    def accumulates_in_blocks(self, world_size: int = 1) -> bool:
        """Return True if the micro-batches pass each block one after the other, instead of the whole model.

        Each gradient is then complete when its block is done, and can be released.
        """
        return (
            self.optim.release_gradients
            and self.train.activation_checkpointing is True
            and self.accumulates(world_size)
        )

    def pass_size(self, world_size: int = 1) -> int:
        """Return the sequences that pass the model at a time on one of `world_size` processes."""
        in_parts = self.accumulates_in_blocks(world_size)
        return self.batch_share(world_size) if in_parts else self.micro_batch_size(world_size)

    def accumulates(self, world_size: int = 1) -> bool:
        """Return True if a process accumulates its gradient over several micro-batches."""
        return self.micro_batch_size(world_size) < self.batch_share(world_size)
