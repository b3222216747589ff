"""Models and tokenizers by their names on the Hugging Face Hub, as folders of its cache on this machine.

Only JSON, texts and safetensors are fetched; with `HF_HUB_OFFLINE=1` or without a network, nothing is.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from scantling.errors import UserError, first_line
from scantling.files import expand_path

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
_SETTINGS = ("*.json", "*.txt", "*.model", "*.jinja")
_WEIGHTS = ("model.safetensors", "model-*.safetensors")


def is_hub_name(text: str) -> bool:
    """True if a text may be a name on the Hub, such as `gpt2` or `openai/gpt`, and names no file or folder here."""
    return (
        _NAME.fullmatch(text) is not None and not text.endswith((".json", ".yaml")) and not expand_path(text).exists()
    )


@cache
def hub_folder(name: str, *, weights: bool = False) -> Path:
    """Return the folder of the cache with a model or tokenizer, after fetching missing files.

    Args:
        name: on the Hub.
        weights: fetch weights, too.

    Raises:
        UserError: there is no such name, or the Hub cannot be reached and the cache does not hold it.
    """
    from huggingface_hub import snapshot_download

    patterns = [*_SETTINGS, *(_WEIGHTS if weights else ())]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns, ignore_patterns=["*/*"]))
    except Exception as error:  # of the network, and of the Hub's answers
        raise UserError(
            f"there is no file or folder {name} here, and it is not available from the Hugging Face Hub or its cache: "
            f"{first_line(error)}"
        ) from None
