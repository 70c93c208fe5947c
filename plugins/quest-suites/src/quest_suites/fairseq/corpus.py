"""Texts for the language-modelling suites: Python's documentation, byte pairs, and the word-swap attack."""

import itertools
import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

SWAPPED = "AAA"
"""The attack replaces words by this one (Nielsen et al., 2024)."""

JOINT = "@@"
"""Marks a piece that the next one continues, as subword-nmt writes it and fairseq reads it."""

Lines = list[str]


def pydocs() -> tuple[Lines, Lines, Lines]:
    """Return training, validation and test text of ``pydoc_data.topics``: one paragraph a line, words and marks apart.

    Topics repeat each other, so each paragraph is kept once. Of every ten runs of twenty paragraphs one is for
    validation and one for the test, so neighbors stay together and the splits do not overlap.
    """
    from pydoc_data.topics import topics

    paragraphs = dict.fromkeys(
        " ".join(re.findall(r"\w+|[^\w\s]", paragraph))
        for name in sorted(topics)
        for paragraph in re.split(r"\n\s*\n", topics[name])
    )
    lines = [line for line in paragraphs if re.search(r"\w", line)]
    splits: tuple[Lines, Lines, Lines] = ([], [], [])
    for start in range(0, len(lines), 20):
        splits[{4: 1, 9: 2}.get(start // 20 % 10, 0)].extend(lines[start : start + 20])
    return splits


def swap_words(lines: Sequence[str], rate: float, seed: int = 0) -> Lines:
    """Replace a random share `rate` of the words of `lines` by SWAPPED.

    A word has a letter or a digit; marks and line ends stay. The share is exact to one word; equal seeds choose equal
    words.
    """
    tokens = [line.split() for line in lines]
    words = [(i, j) for i, line in enumerate(tokens) for j, token in enumerate(line) if re.search(r"\w", token)]
    for i, j in random.Random(f"{seed}/{rate}").sample(words, round(rate * len(words))):
        tokens[i][j] = SWAPPED
    return [" ".join(line) for line in tokens]


class BytePairs:
    """Byte-pair encoding (Sennrich et al., 2016), learned from the words of `lines`.

    Attributes:
        merges: pairs of pieces in the order in which they were joined.
    """

    def __init__(self, lines: Iterable[str], merges: int) -> None:
        counts = Counter(word for line in lines for word in line.split())
        words = [list(word) for word in counts]
        weights = list(counts.values())
        pairs: Counter[tuple[str, str]] = Counter()
        places: dict[tuple[str, str], set[int]] = defaultdict(set)
        for place, (word, weight) in enumerate(zip(words, weights, strict=True)):
            for pair in itertools.pairwise(word):
                pairs[pair] += weight
                places[pair].add(place)
        self.merges: list[tuple[str, str]] = []
        while len(self.merges) < merges and pairs:
            most = max(pairs.values())
            best = max(pair for pair, count in pairs.items() if count == most)
            if most < 2:
                break
            self.merges.append(best)
            for place in places.pop(best):
                word, weight = words[place], weights[place]
                for pair in itertools.pairwise(word):
                    pairs[pair] -= weight
                words[place] = word = _join(word, best)
                for pair in itertools.pairwise(word):
                    pairs[pair] += weight
                    places[pair].add(place)
            del pairs[best]
        self._rank = {pair: rank for rank, pair in enumerate(self.merges)}
        self._pieces: dict[str, str] = {}

    def encode(self, line: str) -> str:
        """Words -> pieces: ``statement`` may become ``state@@ ment``."""
        return " ".join(self._pieces.get(word) or self._split(word) for word in line.split())

    def _split(self, word: str) -> str:
        pieces = list(word)
        while len(pieces) > 1:
            best = min(itertools.pairwise(pieces), key=lambda pair: self._rank.get(pair, len(self._rank)))
            if best not in self._rank:
                break
            pieces = _join(pieces, best)
        self._pieces[word] = f"{JOINT} ".join(pieces)
        return self._pieces[word]


def _join(pieces: list[str], pair: tuple[str, str]) -> list[str]:
    """Join every neighboring `pair` in `pieces`, from the left."""
    joined, i = [], 0
    while i < len(pieces):
        width = 2 if tuple(pieces[i : i + 2]) == pair else 1
        joined.append("".join(pieces[i : i + width]))
        i += width
    return joined
