"""Tokenizers behind one interface: bytes, a byte-level BPE, and whatever Hugging Face has saved."""

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

from scantling.data.hashing import fingerprint
from scantling.data.tokenizer_files import check_tokenizer
from scantling.errors import UserError, did_you_mean, first_line
from scantling.files import local
from scantling.hub import hub_folder, is_hub_name
from scantling.saved_models import without_marks

Ids = npt.NDArray[np.integer[Any]]

SPECIALS = {
    "eos": "<|endoftext|>",
    "pad": "<|pad|>",
    "mask": "<|mask|>",
    "cls": "<|cls|>",
    "sep": "<|sep|>",
}
"""The special tokens of our own tokenizers, in the order of their ids."""
ROLES = ("bos", *SPECIALS)
"""The special tokens that a tokenizer can name."""


@dataclass(frozen=True)
class Template:
    """Where special tokens stand around one text or a pair.

    Attributes:
        parts: ids before, between and after the texts.
        types: for each text and each part its token type: before, text, between, pair, after.
    """

    parts: tuple[tuple[int, ...], ...]
    types: tuple[int, ...]

    @property
    def num_specials(self) -> int:
        """How many special tokens are added."""
        return sum(map(len, self.parts))

    def fill(self, *texts: Ids) -> tuple[Ids, Ids]:
        """Ids and token types with the special tokens in place."""
        pieces: list[Ids] = []
        for part, text in zip(self.parts, [*texts, None], strict=True):
            pieces.append(np.array(part, dtype=np.int64))
            if text is not None:
                pieces.append(np.asarray(text, dtype=np.int64))
        types = np.repeat(np.array(self.types, dtype=np.int64), [len(piece) for piece in pieces])
        return np.concatenate(pieces), types


NO_SPECIALS = Template(((), ()), (0, 0, 0))
"""The template of a tokenizer that adds nothing to a text."""


class Tokenizer(ABC):
    """Turns text into ids and back.

    Attributes:
        vocab_size: one more than the largest id.
        bos_id, eos_id, pad_id, mask_id, cls_id, sep_id: special ids; None for a token that it has not.
        special_ids: all ids that are no text.
        sentinel_ids: ids that stand for a hidden span, `<extra_id_0>` and so on; empty where it has none.
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
        """Equal for tokenizers that give equal ids."""

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """The ids of each text, without special tokens added."""

    @abstractmethod
    def decode(self, ids: Sequence[int] | Ids) -> str:
        """The text of ids; special tokens are left out."""

    @abstractmethod
    def save_pretrained(self, folder: str | Path, *, token_types: bool = False) -> None:
        """Write a folder that `transformers.AutoTokenizer.from_pretrained` loads, with equal ids for equal text.

        The one difference: text that spells a special token, such as `<|endoftext|>`, becomes that token there, as
        with every tokenizer of transformers, and stays ordinary text here.

        Args:
            folder: where to.
            token_types: whether it shall return `token_type_ids` when called, for a model with `type_vocab_size` > 1.
                A tokenizer that came from Hugging Face keeps what it does.
        """

    def join(self, ids: Ids, pair_ids: Ids | None, max_len: int) -> tuple[Ids, Ids]:
        """Put special tokens around ids; the longer text is cut first, as `tokenizers` does it.

        Returns:
            Ids and token types, each of shape (length,) with length at most `max_len`.
        """
        template = self.single if pair_ids is None else self.pair
        room = max_len - template.num_specials
        if room < 1:
            raise UserError(f"data.seq_len = {max_len} leaves no room beside {template.num_specials} special tokens")
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
        """Special tokens that the saved tokenizer puts around one text when it is called; perhaps none."""
        return self.single

    @cached_property
    def target(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Ids before and after a text that a decoder is to give: the tokenizer's own if they have an end-of-text.

        A decoder has to learn its end. A tokenizer that adds nothing after a text gets end-of-text there; what one adds
        that ends otherwise, such as the cls and sep of an encoder, gives way to end-of-text.
        """
        end = () if self.eos_id is None else (self.eos_id,)
        before, after = self._target_template().parts
        if after and self.eos_id not in after:
            return (), end
        return before, after or end

    def _target_template(self) -> Template:
        return self.single

    def with_padding(self) -> Tokenizer:
        """Return this tokenizer, or one like it that is saved with a padding token and the side on which it stands."""
        return self

    @property
    def pads_left(self) -> bool:
        """True if a text ends in the token that stands for all of it, as those of XLNet: padding is then before it."""
        after = self.single.parts[-1]
        return self.cls_id is not None and after[-1:] == (self.cls_id,)

    def require(self, task: str, *names: str) -> None:
        """Refuse a tokenizer that lacks special tokens: "eos", "pad", "mask", "cls" or "sep"."""
        missing = [name for name in names if getattr(self, f"{name}_id") is None]
        if missing:
            raise UserError(
                f"data.tokenizer: {self.name} has no {' and no '.join(missing)} token, which {task} needs; "
                "use another tokenizer, or name the token in its tokenizer_config.json"
            )


def truncated_lengths(first: int, second: int, room: int) -> tuple[int, int]:
    """Lengths that fit into `room` together: the longer text is cut until both are equal, then both are.

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
    """Id = byte of UTF-8; special tokens follow. Nothing is trained, nothing in a text is ever a special token.

    Args:
        wrap: whether the saved tokenizer puts cls and sep around texts, as encoders want it.
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
        """Write it as a byte-level BPE without merges, which gives the same ids."""
        from tokenizers import Tokenizer as Backend
        from tokenizers import models

        backend = Backend(models.BPE(vocab={char: byte for byte, char in enumerate(byte_characters())}, merges=[]))
        backend = finish_backend(backend, use_regex=False, wrap=self._wrap)
        FastTokenizer(backend, named_specials(wrap=self._wrap), "bytes").save_pretrained(
            folder, token_types=token_types
        )


class FastTokenizer(Tokenizer):
    """A tokenizer of the `tokenizers` library.

    Args:
        backend: a `tokenizers.Tokenizer`.
        specials: texts of the special tokens by name, "bos" to "sep".
        name: what it is, for messages.
        literal: whether the text of a special token in a document is ordinary text, which must not become the token.
        wrapped: the transformers tokenizer it came from, which then saves itself.
    """

    def __init__(
        self, backend: Any, specials: dict[str, str], name: str, *, literal: bool = True, wrapped: Any = None
    ) -> None:
        from tokenizers import Tokenizer as Backend

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
        self._backend.encode_special_tokens = self._literal  # its own pickle leaves this out

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
        """Return a tokenizer with padding: its own, else end-of-text, else another special token.

        Models find the end of a text by the token before the padding, so it is none that a text ends in.
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
            wrapped.init_kwargs["padding_side"] = side  # it is saved from there
        return FastTokenizer(self._backend, specials, self.name, literal=self._literal, wrapped=wrapped)

    @cached_property
    def single(self) -> Template:
        return self._template(1)

    @cached_property
    def pair(self) -> Template:
        return self._template(2)

    def _target_template(self) -> Template:
        """Special tokens around a target, which the tokenizers of some translation models mark by its language."""
        if not hasattr(self._wrapped, "_switch_to_target_mode"):
            return self.single
        wrapped = copy.deepcopy(self._wrapped)
        wrapped._switch_to_target_mode()
        return FastTokenizer(wrapped.backend_tokenizer, self._specials, self.name).single

    def _template(self, texts: int) -> Template:
        """Return what the tokenizer's own post-processor adds."""
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
        """Return a text that has a token."""
        others = sorted(set(self._backend.get_vocab(with_added_tokens=True).values()) - self.special_ids)
        for text in itertools.chain(["a"], (self._backend.decode([id_]) for id_ in others)):
            try:
                if self._backend.encode(text, add_special_tokens=False).ids:
                    return str(text)
            except Exception:  # the Rust library raises bare Exception for an unknown word
                continue
        raise UserError(f"data.tokenizer: {self.name} has no token that a text could be made of")


def _numbered(backend: Any, text: str) -> Iterator[int]:
    """The ids of `text` with 0, 1, ... in it, as far as there are any."""
    for number in itertools.count():
        id_ = backend.token_to_id(text.format(number))
        if id_ is None:
            return
        yield id_


def byte_characters() -> list[str]:
    """The printable character by which byte-level BPE writes each byte (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def named_specials(*, wrap: bool) -> dict[str, str]:
    """Texts of the special tokens of our own tokenizers by name.

    Without cls and sep around texts (`wrap`), documents are packed: end-of-text stands before each, too, and is named
    as the beginning, as GPT-2 does.
    """
    return SPECIALS if wrap else {"bos": SPECIALS["eos"], **SPECIALS}


def finish_backend(backend: Any, *, use_regex: bool, wrap: bool) -> Any:
    """Make a BPE model a byte-level tokenizer with our special tokens.

    Args:
        backend: a `tokenizers.Tokenizer` around a BPE model.
        use_regex: split words as GPT-2 does, before the BPE.
        wrap: put cls and sep around texts when it is called in the usual way, as encoders want it.
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
    """Return the tokenizer in a Hugging Face folder, a `tokenizer.json` file, or of a name on the Hub; no code is run.

    Raises:
        UserError: there is none, or it is not a fast tokenizer.
    """
    place = local(path)
    if place.is_file():
        return _from_file(place)
    hint = did_you_mean(path, ["bytes"])
    if hint is None and is_hub_name(path):
        try:
            place = hub_folder(path)
        except UserError as error:
            raise UserError(f"data.tokenizer: {error}; give bytes, {{bpe: SIZE}}, or a local folder") from None
    if not place.is_dir():
        hint = hint or "give bytes, {bpe: SIZE}, a local folder or tokenizer.json, or a name on the Hub"
        raise UserError(f"data.tokenizer: no such file or folder: {path} ({hint})")
    from transformers import AutoTokenizer

    with _refusing_damage(place), without_marks(place) as readable:
        loaded = AutoTokenizer.from_pretrained(str(readable), trust_remote_code=False, local_files_only=True)
    loaded.name_or_path = path
    backend = getattr(loaded, "backend_tokenizer", None)
    if backend is None:
        raise UserError(f"data.tokenizer: {path} is not a fast tokenizer (it has no tokenizer.json); convert it first")
    names = {key: getattr(loaded, f"{key}_token", None) for key in ROLES}
    specials = {key: str(token) for key, token in names.items() if token is not None}
    with _refusing_damage(place):
        return FastTokenizer(backend, specials, path, literal=False, wrapped=loaded)


@contextmanager
def _refusing_damage(place: Path) -> Iterator[None]:
    """Turn errors over the files of a tokenizer into a UserError; they are checked first."""
    try:
        check_tokenizer(place)
        yield
    except UserError as error:
        raise UserError(f"data.tokenizer: {error}") from None
    except BaseException as error:
        if not _is_damage(error):
            raise
        raise UserError(
            f"data.tokenizer: cannot load a tokenizer from {_culprit(place)}: {first_line(error)[:300]}"
        ) from None


def _is_damage(error: BaseException) -> bool:
    """True if an error is about what was read; the Rust library raises bare Exception, and panics that are none."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _culprit(place: Path) -> str:
    """Return which file of a tokenizer that cannot be loaded is to blame, in words."""
    from tokenizers import Tokenizer as Backend

    if not place.is_dir():
        return str(place)
    if not (place / "tokenizer.json").exists():
        return f"{place}, which has no tokenizer.json"
    try:
        Backend.from_str((place / "tokenizer.json").read_text(encoding="utf-8-sig"))
    except BaseException as error:
        if not _is_damage(error):
            raise
        return str(place / "tokenizer.json")
    return f"{place}: tokenizer.json and tokenizer_config.json do not fit each other"


USUAL = {
    "bos": ("<s>", "<bos>", "<|begin_of_text|>", "<|startoftext|>"),
    "eos": ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>"),
    "pad": ("<|pad|>", "[PAD]", "<pad>"),
    "mask": ("<|mask|>", "[MASK]", "<mask>"),
    "cls": ("<|cls|>", "[CLS]", "<cls>"),
    "sep": ("<|sep|>", "[SEP]", "<sep>"),
}
"""Texts by which a lone `tokenizer.json` is searched for special tokens, which it does not name."""


def _from_file(path: Path) -> Tokenizer:
    from tokenizers import Tokenizer as Backend

    with _refusing_damage(path):
        backend = Backend.from_str(path.read_text(encoding="utf-8-sig"))
        added = {token.content for token in backend.get_added_tokens_decoder().values()}
        found = {key: next((text for text in texts if text in added), None) for key, texts in USUAL.items()}
        return FastTokenizer(backend, {key: text for key, text in found.items() if text}, str(path), literal=False)
