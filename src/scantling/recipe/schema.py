"""The recipe: one YAML file that describes a run. This module is its schema and nothing else.

Every section but `model`, `data` and `train` may be absent, and absent means what everybody does today: dense weights,
AdamW, gradient all-reduce, fp32. `scantling schema` prints the JSON schema made from these classes.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, field_validator

from scantling.numerics.words import Clip, Granularity, Rounding

Text = Annotated[str, StringConstraints(min_length=1)]
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
DEVICES = ("auto", "cpu", "cuda")
"""Kinds of device by name; `auto` is the GPU if there is one."""
DIGITS = "digits"
"""The built-in images."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True)

    @field_validator("*", mode="wrap")
    @classmethod
    def _no_bool_for_a_number(cls, value: Any, handler: Any) -> Any:
        result = handler(value)
        if isinstance(value, bool) and not isinstance(result, bool):
            raise ValueError("must be a number, not true or false")
        return result


class ModelSection(Section):
    """Which model is trained: a preset, or a configuration or model folder in Hugging Face's format."""

    preset: Text | None = None
    """Name of a built-in architecture, such as `llama-10m`; exactly one of `preset` and `hf` is given."""
    hf: Text | None = None
    """A local folder with `config.json` (and weights, for fine-tuning), a `config.json` file, or a name on the Hugging
    Face Hub, which is fetched into its cache (with `HF_HUB_OFFLINE=1`: found there)."""
    pretrained: bool | None = None
    """Load the weights found in the `hf` folder. Default: yes when the folder holds weights, and for names on the
    Hub."""
    task: Literal["causal-lm", "masked-lm", "seq2seq", "classification", "clicks", "image-classification"] | None = None
    """What the model is trained to do. Default: the preset's task, or what the configuration's architecture is for.
    Decoders that also read images or sound, such as Gemma 3, are `causal-lm`: their language model trains on text, and
    the rest stays as it is."""
    overrides: dict[str, Any] = Field(default_factory=dict)
    """Keys of the transformers configuration to change, such as `{hidden_size: 128, num_hidden_layers: 2}`. Of a part,
    such as `{text_config: {vocab_size: 512}}`, the other keys stay."""
    attention: Literal["sdpa", "eager"] = "sdpa"
    """Attention implementation of transformers."""


class Fields(Section):
    """Which columns of a structured source hold what."""

    text: Text = "text"
    """Column with the text (the first sentence of a pair; for seq2seq the input)."""
    pair: Text | None = None
    """Column with the second sentence of a pair; for seq2seq the target."""
    label: Text | None = None
    """Column with the label, for classification of texts and images."""
    image: Text = "image"
    """Column with the image, of an `hf` dataset."""


Rows = Annotated[int, Field(ge=1, le=2**31 - 1)]
ColumnNames = Annotated[list[Text], Field(min_length=1)]


class Clicks(Section):
    """Which columns of a click log are the label and the features, and how these become numbers and ids."""

    label: Text | None = None
    """Column with the label: 0 or 1. Criteo's files have theirs in place. Rows without a label are left out."""
    label_above: float | None = Field(default=None, allow_inf_nan=False)
    """The label is whether its column is above this number, such as 15 for minutes of delay."""
    numeric: ColumnNames | None = None
    """Columns with numbers. Default: none; of Criteo's files I1 to I13."""
    categorical: ColumnNames | None = None
    """Columns with categories, texts or numbers. Default: C1 to C26 of Criteo's files."""
    scaling: Literal["standard", "log1p"] = "standard"
    """Numbers less their mean over their deviation, of the training rows; or log(1 + x), 0 below 0. Missing: 0."""
    table_size: Rows | dict[Text, Rows] | None = None
    """Categories are hashed to so many ids, in all columns or by column. Where none is given, each has its own id."""
    min_count: int = Field(default=1, ge=1)
    """Where categories have their own ids: rarer ones, counted in the training rows, share the id of unknown ones."""

    def rows_of(self, column: str) -> int | None:
        """Ids that a column's categories are hashed to; None where each has its own."""
        return self.table_size.get(column) if isinstance(self.table_size, dict) else self.table_size


class BpeTokenizer(Section):
    """A byte-level BPE trained on the training documents and cached."""

    bpe: int = Field(ge=261, le=1_000_000)
    """Vocabulary size, with 256 bytes and 5 special tokens included."""


class DataSection(Section):
    """What the model is trained on. Exactly one source is given."""

    corpus: Literal["python-stdlib"] | None = None
    """A built-in corpus: `python-stdlib` is the source of the Python standard library on this machine."""
    text: Paths | None = None
    """Text files, folders or globs, also `.gz` and `.xz`, UTF-8; one document a file, or see `document_separator`. A
    folder stands for all files in it and in the folders below, hidden ones left out."""
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
    """Flat files of token ids (uint16 or uint32, little endian) that were tokenised elsewhere. The `tokenizer` is what
    made them; without one the model has one id more than the largest in the files."""
    bin_dtype: Literal["uint16", "uint32"] = "uint16"
    """Number format of the `bin` files."""
    criteo: Paths | None = None
    """Click logs in Criteo's layout, also compressed: a label, 13 numbers and 26 categories, with tabs between them."""
    images: Text | None = None
    """Labelled images: a folder that holds a folder of images for each class, an `.npz` file with arrays `images` and
    `labels`, or `digits`: scikit-learn's 1,797 handwritten digits of 8x8 pixels (needs the `vision` extra)."""
    image_size: int | None = Field(default=None, ge=1, le=4096)
    """Pixels on a side, to which each image is resized, whatever its shape. Required for all images but `digits`."""
    image_channels: Literal[1, 3] | None = None
    """1 makes images grey, 3 RGB. Default: 3, and 1 for `digits`."""
    image_shift: int = Field(default=0, ge=0, le=4096)
    """Training images are moved by up to so many pixels along both sides, anew in each epoch; what is left is black."""
    image_flip: bool = False
    """Mirror half of the training images left to right, anew in each epoch."""
    clicks: Clicks | None = None
    """Columns of click logs: of `csv` and `parquet` they have to be named here."""
    fields: Fields = Field(default_factory=Fields)
    """Column names of structured sources."""
    labels: list[Label] | None = None
    """The label set in the order of the ids. Default: the sorted labels of the training documents."""
    document_separator: Text | None = None
    """In text files, a line that starts with this begins a new document (the line itself is left out)."""
    tokenizer: Text | BpeTokenizer = "bytes"
    """`bytes` (for `bin` files: none), `{bpe: VOCABULARY_SIZE}`, a folder or `tokenizer.json` file in Hugging Face's
    format, or a name on the Hub as in `model.hf`."""
    seq_len: int = Field(default=256, ge=2, le=1_048_576)
    """Tokens per training sequence (the most, for classification and pairs); for seq2seq those of the input."""
    target_len: int | None = Field(default=None, ge=2, le=1_048_576)
    """seq2seq: most tokens of a target. Default: `seq_len`."""
    document_mask: bool = False
    """Keep attention inside a document when several are packed into one sequence (slower); a model that would mix them
    all the same is refused."""
    heldout: float = Field(default=0.05, ge=0.0, lt=1.0)
    """Share held out for evaluation: of the documents, never of windows; the end of a text that is the only document;
    of `bin` files their end; of the rows of click logs; of the images."""
    validation: Paths | None = None
    """Held-out files, or images, of the same kind as the source (for `hf`: a split), instead of `heldout`."""
    max_bytes: int | None = Field(default=None, ge=1)
    """Use only about this many bytes of text, whole documents, chosen by hash."""
    mask_probability: float = Field(default=0.15, gt=0.0, lt=1.0)
    """Masked LM, and seq2seq without pairs: share of the tokens that are predicted."""
    span_length: float = Field(default=3.0, ge=1.0, allow_inf_nan=False)
    """seq2seq without pairs: tokens in a hidden span on average."""
    bucket: bool = True
    """Classification, and seq2seq with pairs: batch examples of similar length to save padding."""
    pad_to_multiple_of: int | None = Field(default=None, ge=1)
    """Classification, and seq2seq with pairs: lengths of batches are a multiple of it, at most `seq_len`; given
    `seq_len` itself, all batches have one shape, which CUDA graphs want. Default: the longest example of the batch."""
    workers: int = Field(default=0, ge=0, le=64)
    """Processes that prepare batches; the order of the data does not depend on it."""

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of the images that a model is given."""
        size = self.image_size or (8 if self.images == DIGITS else None)
        if size is None:
            raise AssertionError("a loaded recipe has a size for its images")
        return self.image_channels or (1 if self.images == DIGITS else 3), size, size

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, inputs and targets."""
        return max(self.seq_len, self.target_len or 0)


class OptimSection(Section):
    """The optimizer, by name; any further key is an argument of that optimizer, such as `betas: [0.9, 0.95]`."""

    model_config = ConfigDict(extra="allow")

    name: Text = "adamw"
    """`adamw`, `came`, `adafactor`, `sgd`, `muon`, `sign`, or a class of torch.optim that steps on gradients alone."""
    lr: float = Field(default=1e-3, gt=0.0, allow_inf_nan=False)
    """Peak learning rate."""
    weight_decay: float = Field(default=0.1, ge=0.0, allow_inf_nan=False)
    """Decay of matrices and embeddings, decoupled where the optimizer has it so; vectors are never decayed."""
    release_gradients: bool = False
    """`came` on one process: step each parameter within the backward pass and free its gradient. Needs `clip: null`."""
    embedding_lr_scale: float = Field(default=1.0, gt=0.0, allow_inf_nan=False)
    """Learning rate of embeddings as a multiple of `lr`: 10 to 16 for T5, whose embeddings begin large."""

    @property
    def rates(self) -> dict[str, float]:
        """What `scantling.param_groups` takes of the rates of some parameters; nothing where all learn at `lr`."""
        return {} if self.embedding_lr_scale == 1.0 else {"embedding_lr": self.embedding_lr_scale * self.lr}

    @property
    def options(self) -> dict[str, Any]:
        """The optimizer's own arguments, as given."""
        return dict(self.model_extra or {})


class TensorSection(Section):
    """CoMERA: layers live as tensor-train cores, whose ranks can come down to a size target while training."""

    rank: int | list[int] | dict[str, int | list[int] | dict[str, Any]] = 32
    """Ranks of the cores: one for all, or by pattern over the names of layers, see `scantling.tensorize`."""
    format: Literal["tt", "tt-silu", "low-rank", "cola"] = "tt"
    """Of linear layers: tensor trains, or two thin matrices; with silu between what narrows and what widens, or not."""
    num_modes: int | None = Field(default=None, ge=1, le=5)
    """Into how many modes inputs and outputs of linear layers are split. Default: 3 of tensor trains, 1 of matrices."""
    init: Literal["random", "svd"] = "random"
    """`random`: drawn to the norm of the weights replaced, to train from scratch; of weights in `model.hf` nothing is
    left, and a warning says so. `svd`: the closest cores; a warning says how far they are from the weights."""
    lr_scale: float = Field(default=1 / 3, gt=0.0, allow_inf_nan=False)
    """Learning rate of the cores as a share of `optim.lr`: a weight moves by what all of its cores move."""
    embedding_lr_scale: float | None = Field(default=None, gt=0.0, allow_inf_nan=False)
    """Learning rate of the cores of embeddings as a multiple of `optim.lr`. Default: `lr_scale`."""
    control_lr_scale: float = Field(default=10.0, gt=0.0, allow_inf_nan=False)
    """Learning rate of the rank controls as a multiple of `optim.lr`. They begin at 1 and move by their rate a step at
    most."""
    size_target: float | None = Field(default=None, gt=0.0, allow_inf_nan=False)
    """What the cores are to come down to: up to 1 a share of their size, above 1 a size in `unit`. Default: none."""
    unit: Literal["parameters", "flops", "bytes"] = "parameters"
    """Of the size target: numbers in the cores, FLOPs a token (forward and backward), or bytes of training state."""
    adapt: float = Field(default=0.5, gt=0.0, allow_inf_nan=False)
    """When the target is reached: a number of steps, or a share of all steps when at most 1."""
    truncate_every: int = Field(default=50, ge=1)
    """Steps between removals of ranks that have come to be shut; the last is when the target is reached."""
    adapter: dict[str, Any] = Field(default_factory=dict)
    """Further settings of the adapter, such as `{schedule: paper, gamma: 0.1}`; see `RankOptions`."""

    def rates(self, lr: float) -> dict[str, float]:
        """What `scantling.param_groups` takes of the rates of cores and controls, for the rate of a run."""
        table = self.lr_scale if self.embedding_lr_scale is None else self.embedding_lr_scale
        return {
            "core_lr": self.lr_scale * lr,
            "embedding_core_lr": table * lr,
            "control_lr": self.control_lr_scale * lr,
        }

    def rank_options(self, steps: int) -> dict[str, Any]:
        """The arguments of the `RankAdapter` in a run of so many steps."""
        adapt = adapt_steps(self.adapt, steps)
        return {"size_target": self.size_target, "unit": self.unit, "steps": adapt, **self.adapter}


def adapt_steps(adapt: float, steps: int) -> int:
    """`tensor.adapt` as a number of steps in a run of `steps`."""
    return max(1, round(adapt * steps) if adapt <= 1.0 else round(adapt))


class CommSection(Section):
    """What the processes of one run exchange."""

    name: Literal["allreduce", "demo"] = "allreduce"
    """`allreduce`: gradients are averaged in buckets while the backward pass runs (DDP). `demo`: each process keeps a
    momentum of its own, and only its largest components travel; `optim.name: sign` makes DeMo of it."""
    bucket_mb: float = Field(default=25.0, gt=0.0, le=1024.0)
    """Size of one bucket in MiB: of allreduce, and of demo with overlap."""
    find_unused_parameters: bool = False
    """allreduce: whether some parameters may get no gradient in a step, which is looked for in each: a model that has
    such ones is refused otherwise."""
    timeout: float = Field(default=300.0, gt=0.0, le=1e7)
    """Seconds that processes wait for each other in a step; for data and the sums of a checkpoint they wait longer."""
    topk: int = Field(default=32, ge=1)
    """demo: components sent of a block of chunk x chunk."""
    chunk: int = Field(default=64, ge=1, le=4096)
    """demo: longest side of a block."""
    decay: float = Field(default=0.95, ge=0.0, le=1.0)
    """demo: of the momentum, each step."""
    alpha: float = Field(default=1.0, ge=0.0, le=1.0)
    """demo: share of what was sent that is taken out of the momentum."""
    values: Literal["fp32", "bf16", "int8", "int4", "sign"] = "sign"
    """demo: format of the components."""
    dense: Literal["fp32", "bf16", "int8", "int4", "sign"] = "bf16"
    """demo: format of what is no matrix (embeddings, vectors), which travels whole."""
    exchange: Literal["auto", "all_gather", "owner", "whole"] = "auto"
    """demo: how messages travel; `auto` takes what sends fewer bytes, with `whole` everything travels by all-reduce."""
    sync_every: int = Field(default=1, ge=1)
    """demo: steps from one exchange to the next; in the others gradients are only summed, without local steps."""
    state_sync_every: int | None = Field(default=None, ge=1)
    """demo: exchanges after which the momenta of all processes are averaged. Default: never."""
    check_every: int | None = Field(default=100, ge=1)
    """demo: exchanges after which the parameters of all processes are compared; null for never."""
    on_mismatch: Literal["stop", "resync"] = "stop"
    """demo: what is done where they are not alike."""
    delay: int = Field(default=0, ge=0, le=1)
    """demo: steps from an exchange to its result; with 1 messages have the time of a whole step."""
    overlap: bool = False
    """demo: whether what is ready leaves during the backward pass; without clipping."""
    residual: Literal["fp32", "int8"] = "fp32"
    """demo: format of the momentum of each process."""
    auto_off: bool = False
    """demo: whether it is measured, after a few steps, if an all-reduce of everything takes less time; where it does,
    everything travels from then on. What is sent and computed then depends on a clock."""

    @property
    def demo_options(self) -> dict[str, Any]:
        """The arguments of `MomentumExchange`."""
        others = ("name", "find_unused_parameters", "timeout")
        return {name: getattr(self, name) for name in type(self).model_fields if name not in others}


class FormatSection(Section):
    """A number format of few bits, and what shares a scale."""

    format: Text
    """Such as `int4`, `fp8_e4m3` or `mxfp4_e2m1`."""
    granularity: Granularity | None = None
    """What shares a scale. Default: a channel of weights, a token of everything else; groups in block formats. With
    `tensor` or `channel`, activations, keys, values and queries of a token depend on later tokens and on the other
    sequences of the batch; `tensor` is the setting of the paper on precision laws."""
    group_size: int | None = Field(default=None, ge=1)
    """Neighbours that share a scale."""
    rounding: Rounding = "nearest"
    """To the nearest value, or by chance so that the mean is kept."""
    clip: Clip = "absmax"
    """What the largest value stands for: the largest magnitude, or that with the least squared error."""


class PrecisionSection(Section):
    """The number formats of the run. Parameters, gradients of parameters and checkpoints stay fp32."""

    compute: Literal["fp32", "bf16", "fp16", "int8", "fp8"] = "fp32"
    """Format of matrix products: fp32, or autocast to bf16, or to fp16 with loss scaling. `int8` and `fp8` multiply in
    linear layers what `weights` and `activations` say, and everything else in bf16 on a GPU, fp32 on a CPU."""
    weights: Text | FormatSection | None = None
    """Format of the weights of linear layers in the forward pass: a name such as `int8`, or a mapping."""
    activations: Text | FormatSection | None = None
    """Format of the inputs of linear layers."""
    kv_cache: Text | FormatSection | None = None
    """Format of keys and values in attention."""
    queries: Text | FormatSection | None = None
    """Format of queries in attention."""
    gradients: Text | FormatSection | None = None
    """Format of the gradients that the backward pass of linear layers multiplies."""

    def autocast(self, device: str) -> str:
        """The format of what is not multiplied in few bits, on a kind of device."""
        if self.compute not in ("int8", "fp8"):
            return self.compute
        return "bf16" if device == "cuda" else "fp32"

    @property
    def quantized(self) -> dict[str, Any]:
        """The arguments of `quantize_training`; none where nothing is quantized."""
        given = {name: getattr(self, name) for name in ("weights", "activations", "kv_cache", "queries", "gradients")}
        formats = {
            name: each.model_dump(exclude_none=True) if isinstance(each, FormatSection) else each
            for name, each in given.items()
            if each is not None
        }
        return formats | ({"compute": self.compute} if self.compute in ("int8", "fp8") else {})


class TrainSection(Section):
    """How long and how the model is trained."""

    steps: int = Field(ge=1)
    """Optimizer steps."""
    batch_tokens: int | None = Field(default=None, ge=1)
    """Tokens per optimizer step over all processes, a multiple of `seq_len`; or give `batch_size`."""
    batch_size: int | None = Field(default=None, ge=1)
    """Sequences per optimizer step over all processes."""
    micro_batch_size: int | None = Field(default=None, ge=1)
    """Sequences one process takes through the model at a time. Default: its whole share, no accumulation."""
    clip: float | None = Field(default=1.0, gt=0.0)
    """Largest global gradient norm; null for no clipping."""
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """Learning rate after warm-up: cosine or linear decay, or stable and then linear decay (wsd), or constant."""
    warmup: float = Field(default=0.05, ge=0.0)
    """Warm-up: a number of steps, or a share of all steps when below 1."""
    decay: float = Field(default=0.2, gt=0.0, le=1.0)
    """Share of all steps in which `wsd` decays."""
    min_lr_ratio: float = Field(default=0.1, ge=0.0, le=1.0)
    """Learning rate at the end, as a share of the peak."""
    eval_every: int | None = Field(default=None, ge=1)
    """Steps between evaluations; one always follows the last step."""
    eval_samples: int | None = Field(default=None, ge=1)
    """Most held-out sequences used per evaluation. Default: all."""
    checkpoint_every: int | None = Field(default=None, ge=1)
    """Steps between checkpoints; one always follows the last step."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """How many of the newest checkpoints are kept."""
    seed: int = Field(default=0, ge=0, le=2**32 - 1)
    """Seed of the weights, the order of the data, the split and the dropout."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes the GPU where there is one."""
    compile: bool = False
    """Compile the model with torch.compile."""
    graph: bool = False
    """Capture the work of a step in CUDA graphs: one process on a GPU, and batches of one shape or of a few."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass instead of storing them."""
    deterministic: bool = False
    """Force deterministic kernels on a GPU (always so on a CPU)."""
    tensorboard: bool = False
    """Also write TensorBoard events into the run directory (needs the `tb` extra)."""


class Recipe(Section):
    """One training run."""

    name: Text | None = None
    """Name of the run. Default: the recipe file's name."""
    model: ModelSection
    """Which model is trained."""
    data: DataSection
    """What it is trained on."""
    tensor: TensorSection | None = None
    """Layers as tensor-train cores. Default: dense layers."""
    optim: OptimSection = Field(default_factory=OptimSection)
    """The optimizer."""
    comm: CommSection = Field(default_factory=CommSection)
    """What the processes exchange."""
    precision: PrecisionSection = Field(default_factory=PrecisionSection)
    """Number formats."""
    train: TrainSection
    """How long and how it is trained."""

    @property
    def batch_size(self) -> int:
        """Sequences per optimizer step over all processes."""
        if self.train.batch_size is not None:
            return self.train.batch_size
        if self.train.batch_tokens is None:
            raise AssertionError("a loaded recipe has a batch size")
        return self.train.batch_tokens // self.data.seq_len

    def micro_batch_size(self, world_size: int = 1) -> int:
        """Most sequences that one of so many processes puts through the model at once."""
        share = max(1, self.batch_size // world_size)
        return min(self.train.micro_batch_size or share, share)

    def accumulates(self, world_size: int = 1) -> bool:
        """Whether several micro-batches of a process add up to its gradient."""
        return self.micro_batch_size(world_size) < self.batch_size // world_size
