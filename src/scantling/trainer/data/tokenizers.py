"""Tokenizers with a common interface: bytes, a byte-level BPE, and saved Hugging Face tokenizers."""

from __future__ import annotations

import copy
import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from scantling.errors import UserError, did_you_mean, first_line
from scantling.files import expand_path
from scantling.saved_models import without_byte_order_marks
from scantling.trainer.data.hashing import fingerprint
from scantling.trainer.data.tokenizer_files import check_tokenizer
from scantling.trainer.hub import hub_folder, is_hub_name

Ids = npt.NDArray[np.integer[Any]]

SPECIALS = {
    "eos": "<|endoftext|>",
    "pad": "<|pad|>",
    "mask": "<|mask|>",
    "cls": "<|cls|>",
    "sep": "<|sep|>",
}
"""Special tokens of the built-in tokenizers, in the order of their ids."""
ROLES = ("bos", *SPECIALS)
"""Roles of special tokens that a tokenizer can have."""


@dataclass(frozen=True)
class Template:
    """Special tokens around one text or a pair.

    Attributes:
        parts: ids before, between and after the texts.
        types: token type of each text and each part: before, text, between, pair, after.
    """

    parts: tuple[tuple[int, ...], ...]
    types: tuple[int, ...]

    @property
    def num_specials(self) -> int:
        """Number of special tokens."""
        return sum(map(len, self.parts))

    def fill(self, *texts: Ids) -> tuple[Ids, Ids]:
        """Return ids and token types of the texts with the special tokens added."""
        pieces: list[Ids] = []
        for part, text in zip(self.parts, [*texts, None], strict=True):
            pieces.append(np.array(part, dtype=np.int64))
            if text is not None:
                pieces.append(np.asarray(text, dtype=np.int64))
        types = np.repeat(np.array(self.types, dtype=np.int64), [len(piece) for piece in pieces])
        return np.concatenate(pieces), types


NO_SPECIALS = Template(((), ()), (0, 0, 0))
"""Template of a tokenizer that adds nothing to a text."""


class Tokenizer(ABC):
    """Interface of tokenizers, between text and ids.

    Attributes:
        vocab_size: the largest id plus one.
        bos_id, eos_id, pad_id, mask_id, cls_id, sep_id: ids of special tokens; None for a missing token.
        special_ids: all ids that do not represent text.
        sentinel_ids: ids that replace hidden spans, `<extra_id_0>` and so on; empty if there are none.
    """

    name: str
    vocab_size: int
    bos_id: int | None
    eos_id: int | None
    pad_id: int | None
    mask_id: int | None
    cls_id: int | None
    sep_id: int | None
    special_ids: frozenset[int]
    sentinel_ids: tuple[int, ...] = ()

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Return a value that is equal for tokenizers that give equal ids."""

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Return the ids of each text, without special tokens."""

    @abstractmethod
    def decode(self, ids: Sequence[int] | Ids) -> str:
        """Return the text of ids, without special tokens."""

    @abstractmethod
    def save_pretrained(self, folder: str | Path, *, token_types: bool = False) -> None:
        """Write a folder that `transformers.AutoTokenizer.from_pretrained` loads, with equal ids for equal text.

        There is one difference: text that spells a special token, such as `<|endoftext|>`, becomes that token in
        transformers, and stays ordinary text here.

        Args:
            folder: target folder.
            token_types: True if the saved tokenizer should return `token_type_ids` when called, for a model with
                `type_vocab_size` > 1. A tokenizer that came from Hugging Face keeps its own setting.
        """

    def join(self, ids: Ids, pair_ids: Ids | None, max_len: int) -> tuple[Ids, Ids]:
        """Add special tokens to ids; the longer text is truncated first, as in `tokenizers`.

        Returns:
            Ids and token types, each of shape (length,) with length at most `max_len`.
        """
        template = self.single if pair_ids is None else self.pair
        room = max_len - template.num_specials
        if room < 1:
            raise UserError(
                f"data.seq_len = {max_len} leaves no room for text next to {template.num_specials} special tokens"
            )
        if pair_ids is None:
            return template.fill(ids[:room])
        first, second = truncated_lengths(len(ids), len(pair_ids), room)
        return template.fill(ids[:first], pair_ids[:second])

    @cached_property
    def single(self) -> Template:
        """Special tokens around one text."""
        if self.cls_id is None or self.sep_id is None:
            return Template(((), ()), (0, 0, 0))
        return Template(((self.cls_id,), (self.sep_id,)), (0, 0, 0))

    @cached_property
    def pair(self) -> Template:
        """Special tokens around a pair."""
        if self.cls_id is None or self.sep_id is None:
            return Template(((), (), ()), (0, 0, 0, 1, 1))
        return Template(((self.cls_id,), (self.sep_id,), (self.sep_id,)), (0, 0, 0, 1, 1))

    @property
    def document(self) -> Template:
        """Special tokens that the saved tokenizer adds to one text when it is called; may be none."""
        return self.single

    @cached_property
    def target(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Ids before and after a target text of a decoder: the tokenizer's own if they contain end-of-text.

        A decoder has to learn where its output ends. If the tokenizer adds nothing after a text, end-of-text is
        added. If it adds other tokens, such as the cls and sep of an encoder, end-of-text replaces them.
        """
        end = () if self.eos_id is None else (self.eos_id,)
        before, after = self._target_template().parts
        if after and self.eos_id not in after:
            return (), end
        return before, after or end

    def _target_template(self) -> Template:
        return self.single

    def with_padding(self) -> Tokenizer:
        """Return this tokenizer, or a copy that is saved with a padding token and its padding side."""
        return self

    @property
    def pads_left(self) -> bool:
        """True if the token that represents the text comes last, as in XLNet: padding then goes before the text."""
        after = self.single.parts[-1]
        return self.cls_id is not None and after[-1:] == (self.cls_id,)

    def require(self, task: str, *names: str) -> None:
        """Raise if the tokenizer lacks special tokens: "eos", "pad", "mask", "cls" or "sep"."""
        missing = [name for name in names if getattr(self, f"{name}_id") is None]
        if missing:
            raise UserError(
                f"data.tokenizer: {self.name} has no {' and no '.join(missing)} token, which {task} needs; "
                "use another tokenizer, or name the token in its tokenizer_config.json"
            )


def truncated_lengths(first: int, second: int, room: int) -> tuple[int, int]:
    """Return lengths that fit into `room` together: truncate the longer text until both are equal, then both.

    Source: the strategy `longest_first` of the `tokenizers` library, so that ids agree with it.
    """
    if first + second <= room:
        return first, second
    short = min(first, second)
    long = max(short, room - short) if short <= room else short
    if short + long > room:
        short, long = room // 2, room - room // 2
    return (long, short) if first > second else (short, long)


class ByteTokenizer(Tokenizer):
    """Byte tokenizer: each id is a byte of UTF-8; special tokens follow. Text never becomes a special token.

    Args:
        wrap: True if the saved tokenizer adds cls and sep to texts, for encoders.
    """

    name = "bytes"
    vocab_size = 256 + len(SPECIALS)
    eos_id, pad_id, mask_id, cls_id, sep_id = range(256, vocab_size)
    special_ids = frozenset(range(256, vocab_size))
    fingerprint = fingerprint(["bytes", list(SPECIALS)])

    def __init__(self, *, wrap: bool = False) -> None:
        self._wrap = wrap
        self.bos_id = None if wrap else self.eos_id

    @property
    def document(self) -> Template:
        return self.single if self._wrap else NO_SPECIALS

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        return [np.frombuffer(text.encode("utf-8"), dtype=np.uint8) for text in texts]

    def decode(self, ids: Sequence[int] | Ids) -> str:
        array = np.asarray(ids)
        return array[array < 256].astype(np.uint8).tobytes().decode("utf-8", errors="replace")

    def save_pretrained(self, folder: str | Path, *, token_types: bool = False) -> None:
        """Write the tokenizer as a byte-level BPE without merges, which gives the same ids."""
        from tokenizers import Tokenizer as Backend
        from tokenizers import models

        backend = Backend(models.BPE(vocab={char: byte for byte, char in enumerate(byte_characters())}, merges=[]))
        backend = finish_backend(backend, use_regex=False, wrap=self._wrap)
        FastTokenizer(backend, named_specials(wrap=self._wrap), "bytes").save_pretrained(
            folder, token_types=token_types
        )


class FastTokenizer(Tokenizer):
    """Tokenizer of the `tokenizers` library.

    Args:
        backend: a `tokenizers.Tokenizer`.
        specials: texts of the special tokens by name, "bos" to "sep".
        name: its name for messages.
        literal: True if the text of a special token in a document stays ordinary text and does not become the token.
        wrapped: the transformers tokenizer it came from, which then saves itself.
    """

    def __init__(
        self, backend: Any, specials: dict[str, str], name: str, *, literal: bool = True, wrapped: Any = None
    ) -> None:
        from tokenizers import Tokenizer as Backend

        # Copy the backend: the settings below must not change the caller's tokenizer.
        self._backend = Backend.from_str(backend.to_str())
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = literal
        self._wrapped, self._specials = wrapped, specials
        self.name = name
        self.vocab_size = max(self._backend.get_vocab(with_added_tokens=True).values()) + 1
        for key in ROLES:
            token = specials.get(key)
            setattr(self, f"{key}_id", None if token is None else self._backend.token_to_id(token))
        added = self._backend.get_added_tokens_decoder()
        self.special_ids = frozenset(id_ for id_, token in added.items() if token.special)
        named = (self.bos_id, self.eos_id, self.pad_id, self.mask_id, self.cls_id, self.sep_id)
        self.special_ids |= {id_ for id_ in named if id_ is not None}
        self.sentinel_ids = tuple(_numbered(self._backend, "<extra_id_{}>"))
        self._literal = literal

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._backend.encode_special_tokens = self._literal  # its own pickle omits this setting

    @cached_property
    def fingerprint(self) -> str:
        return fingerprint(["fast", self._backend.to_str(), self._specials, self._literal])

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def decode(self, ids: Sequence[int] | Ids) -> str:
        return str(self._backend.decode([int(id_) for id_ in ids], skip_special_tokens=True))

    def save_pretrained(self, folder: str | Path, *, token_types: bool = False) -> None:
        wrapped = self._wrapped
        if wrapped is None:
            from transformers import PreTrainedTokenizerFast

            names = {f"{key}_token": token for key, token in self._specials.items()}
            names["padding_side"] = "left" if self.pads_left else "right"
            inputs = ["input_ids", *(["token_type_ids"] if token_types else []), "attention_mask"]
            wrapped = PreTrainedTokenizerFast(
                tokenizer_object=self._backend, clean_up_tokenization_spaces=False, model_input_names=inputs, **names
            )
        wrapped.save_pretrained(str(folder))

    def with_padding(self) -> Tokenizer:
        """Return a tokenizer with padding: its own token, else end-of-text, else another special token.

        Models find the end of a text by the token before the padding, so the padding token must not end a text.
        """
        side = "left" if self.pads_left else "right"
        if self.pad_id is not None and (self._wrapped is None or self._wrapped.padding_side == side):
            return self
        ends = {part[-1] for part in (self.single.parts[-1], self.pair.parts[-1]) if part}
        others = [id_ for id_ in (self.eos_id, *sorted(self.special_ids)) if id_ is not None and id_ not in ends]
        pad_id = self.pad_id if self.pad_id is not None else next(iter(others), None)
        if pad_id is None:
            return self
        specials, wrapped = {**self._specials, "pad": str(self._backend.id_to_token(pad_id))}, self._wrapped
        if wrapped is not None:
            wrapped = copy.deepcopy(wrapped)
            wrapped.pad_token, wrapped.padding_side = specials["pad"], side
            wrapped.init_kwargs["padding_side"] = side  # it is saved from here
        return FastTokenizer(self._backend, specials, self.name, literal=self._literal, wrapped=wrapped)

    @cached_property
    def single(self) -> Template:
        return self._template(1)

    @cached_property
    def pair(self) -> Template:
        return self._template(2)

    def _target_template(self) -> Template:
        """Return the special tokens around a target, which some translation models use to mark its language."""
        if not hasattr(self._wrapped, "_switch_to_target_mode"):
            return self.single
        wrapped = copy.deepcopy(self._wrapped)
        wrapped._switch_to_target_mode()
        return FastTokenizer(wrapped.backend_tokenizer, self._specials, self.name).single

    def _template(self, texts: int) -> Template:
        """Return the special tokens that the tokenizer's own post-processor adds."""
        # Encode a sample text; tokens that belong to no text are the special tokens around it.
        text = self._any_text()
        encoding = self._backend.encode(text, text if texts == 2 else None, add_special_tokens=True)
        parts: list[list[int]] = [[] for _ in range(texts + 1)]
        types = [0] * (2 * texts + 1)
        part, inside = 0, None
        for id_, type_, sequence in zip(encoding.ids, encoding.type_ids, encoding.sequence_ids, strict=True):
            if sequence is None:
                parts[part].append(id_)
                types[2 * part] = type_
            elif sequence != inside:
                inside, part = sequence, sequence + 1
                types[2 * sequence + 1] = type_
        return Template(tuple(tuple(part) for part in parts), tuple(types))

    def _any_text(self) -> str:
        """Return a text that encodes to at least one token."""
        others = sorted(set(self._backend.get_vocab(with_added_tokens=True).values()) - self.special_ids)
        for text in itertools.chain(["a"], (self._backend.decode([id_]) for id_ in others)):
            try:
                if self._backend.encode(text, add_special_tokens=False).ids:
                    return str(text)
            except Exception:  # the Rust library raises bare Exception for an unknown word
                continue
        raise UserError(f"data.tokenizer: {self.name} has no token that a text could be made of")


def _numbered(backend: Any, text: str) -> Iterator[int]:
    """Yield the ids of `text` formatted with 0, 1, ... until one is missing."""
    for number in itertools.count():
        id_ = backend.token_to_id(text.format(number))
        if id_ is None:
            return
        yield id_


def byte_characters() -> list[str]:
    """Return the printable character with which byte-level BPE writes each byte (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def named_specials(*, wrap: bool) -> dict[str, str]:
    """Return the texts of the built-in tokenizers' special tokens by name.

    Without cls and sep around texts (`wrap`), documents are packed: end-of-text also precedes each document and is
    therefore the beginning token too, as in GPT-2.
    """
    return SPECIALS if wrap else {"bos": SPECIALS["eos"], **SPECIALS}


def finish_backend(backend: Any, *, use_regex: bool, wrap: bool) -> Any:
    """Make a byte-level tokenizer with the built-in special tokens from a BPE model.

    Args:
        backend: a `tokenizers.Tokenizer` around a BPE model.
        use_regex: split words as GPT-2 does, before the BPE.
        wrap: add cls and sep to texts when the tokenizer is called in the usual way, for encoders.
    """
    from tokenizers import AddedToken, decoders, pre_tokenizers, processors

    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS.values()])
    if wrap:
        cls, sep = SPECIALS["cls"], SPECIALS["sep"]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{cls} $A {sep}",
            pair=f"{cls} $A {sep} $B:1 {sep}:1",
            special_tokens=[(token, backend.token_to_id(token)) for token in (cls, sep)],
        )
    return backend


def load_tokenizer(path: str) -> Tokenizer:
    """Return the tokenizer in a Hugging Face folder, a `tokenizer.json` file, or on the Hub; runs no remote code.

    Raises:
        UserError: there is no tokenizer, or it is not a fast tokenizer.
    """
    location = expand_path(path)
    if location.is_file():
        return _from_file(location)
    hint = did_you_mean(path, ["bytes"])
    if hint is None and is_hub_name(path):
        try:
            location = hub_folder(path)
        except UserError as error:
            raise UserError(f"data.tokenizer: {error}; give bytes, {{bpe: SIZE}}, or a local folder") from None
    if not location.is_dir():
        hint = hint or "give bytes, {bpe: SIZE}, a local folder or tokenizer.json, or a name on the Hub"
        raise UserError(f"data.tokenizer: no such file or folder: {path} ({hint})")
    from transformers import AutoTokenizer

    with _refusing_damage(location), without_byte_order_marks(location) as readable:
        loaded = AutoTokenizer.from_pretrained(str(readable), trust_remote_code=False, local_files_only=True)
    loaded.name_or_path = path
    backend = getattr(loaded, "backend_tokenizer", None)
    if backend is None:
        raise UserError(f"data.tokenizer: {path} is not a fast tokenizer (it has no tokenizer.json); convert it first")
    names = {key: getattr(loaded, f"{key}_token", None) for key in ROLES}
    specials = {key: str(token) for key, token in names.items() if token is not None}
    with _refusing_damage(location):
        return FastTokenizer(backend, specials, path, literal=False, wrapped=loaded)


@contextmanager
def _refusing_damage(location: Path) -> Iterator[None]:
    """Check a tokenizer's files and turn errors over them into a UserError."""
    try:
        check_tokenizer(location)
        yield
    except UserError as error:
        raise UserError(f"data.tokenizer: {error}") from None
    except BaseException as error:
        if not _is_damage(error):
            raise
        raise UserError(
            f"data.tokenizer: cannot load a tokenizer from {_culprit(location)}: {first_line(error)[:300]}"
        ) from None


def _is_damage(error: BaseException) -> bool:
    """Return True if an error is about file contents; the Rust library raises bare Exception, and PanicException."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _culprit(location: Path) -> str:
    """Return the name of the file that prevents loading a tokenizer, with the reason."""
    from tokenizers import Tokenizer as Backend

    if not location.is_dir():
        return str(location)
    if not (location / "tokenizer.json").exists():
        return f"{location}, which has no tokenizer.json"
    try:
        Backend.from_str((location / "tokenizer.json").read_text(encoding="utf-8-sig"))
    except BaseException as error:
        if not _is_damage(error):
            raise
        return str(location / "tokenizer.json")
    return f"{location}: tokenizer.json and tokenizer_config.json do not fit each other"


USUAL = {
    "bos": ("<s>", "<bos>", "<|begin_of_text|>", "<|startoftext|>"),
    "eos": ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>"),
    "pad": ("<|pad|>", "[PAD]", "<pad>"),
    "mask": ("<|mask|>", "[MASK]", "<mask>"),
    "cls": ("<|cls|>", "[CLS]", "<cls>"),
    "sep": ("<|sep|>", "[SEP]", "<sep>"),
}
"""Usual texts of special tokens, to find them in a lone `tokenizer.json`, which does not name them."""


def _from_file(path: Path) -> Tokenizer:
    from tokenizers import Tokenizer as Backend

    with _refusing_damage(path):
        backend = Backend.from_str(path.read_text(encoding="utf-8-sig"))
        added = {token.content for token in backend.get_added_tokens_decoder().values()}
        found = {key: next((text for text in texts if text in added), None) for key, texts in USUAL.items()}
        return FastTokenizer(backend, {key: text for key, text in found.items() if text}, str(path), literal=False)
