"""English-like text from a seed: the same on every machine and Python, unlike installed files."""

from __future__ import annotations

import random
from collections.abc import Sequence

_ONSETS = ("b", "br", "c", "ch", "d", "f", "g", "gr", "h", "l", "m", "n", "p", "pl", "r", "s", "st", "t", "th", "w")
_VOWELS = ("a", "e", "i", "o", "u", "ai", "ea", "ou")
_CODAS = ("", "", "d", "l", "m", "n", "nd", "r", "s", "st", "t")
_ARTICLES = ("the", "a", "every", "this", "her", "his", "their", "no")
_PREPOSITIONS = ("of", "in", "under", "with", "near", "without", "after", "for")
_ENDS = (". ", ". ", ".\n", "? ")
_INSIDE = (", and then ", "; ")


def english_like(length: int, seed: int = 0) -> str:
    """Return sentences of invented words in English word order, as ASCII.

    Words follow Zipf's law, and each noun has its own verbs and adjectives, so that a model has letters, words, grammar
    and pairs of words to learn.

    Args:
        length: number of characters.
        seed: decides the words and the sentences.
    """
    draw = random.Random(seed).random  # the only method whose values Python guarantees to keep

    def choose(words: Sequence[str]) -> str:
        return words[int(draw() * len(words))]

    def frequent(words: Sequence[str]) -> str:
        return words[int(len(words) ** draw()) - 1]

    def invent(count: int) -> list[str]:
        """Return distinct words of one to three syllables, short ones first."""
        words: dict[str, None] = {}
        while len(words) < count:
            syllables = 1 + len(words) * 3 // count
            words["".join(choose(_ONSETS) + choose(_VOWELS) + choose(_CODAS) for _ in range(syllables))] = None
        return list(words)

    nouns, verbs, adjectives = invent(300), invent(120), invent(80)
    verbs_of = {noun: [choose(verbs) for _ in range(4)] for noun in nouns}
    adjectives_of = {noun: [choose(adjectives) for _ in range(3)] for noun in nouns}

    def phrase(noun: str) -> str:
        adjective = f"{choose(adjectives_of[noun])} " if draw() < 0.4 else ""
        return f"{choose(_ARTICLES)} {adjective}{noun}"

    sentences: list[str] = []
    size, end = 0, ". "
    while size < length:
        subject = frequent(nouns)
        words = [phrase(subject), f"{choose(verbs_of[subject])}s"]
        if draw() < 0.8:
            words.append(phrase(frequent(nouns)))
        if draw() < 0.5:
            words += [choose(_PREPOSITIONS), phrase(frequent(nouns))]
        text = " ".join(words)
        begin = text if end in _INSIDE else text.capitalize()
        end = choose(_ENDS + _INSIDE)
        sentences.append(begin + end)
        size += len(sentences[-1])
    return "".join(sentences)[:length]
