"""A cloze set after LAMBADA's pattern from anyone's own text: guess a passage's last word, which stood there before.

    python recipes/cloze_passages.py --dataset held_out.jsonl
    adacc eval cloze --model FOLDER --passages cloze.jsonl

Take documents that the model was not trained on.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

from text_files import checked_files, read_file

CLOZE_FILE = "cloze.jsonl"
"""The passages' name in a run folder."""

NUM_PASSAGES = 500
"""The standard error of an accuracy is then 2.2 points at most."""

PASSAGE_CHARACTERS = 400
"""About as long as LAMBADA's passages."""

LEAST_LETTERS = 4
"""Shorter words are mostly grammar, and guessed from the words beside them."""

_WORD = re.compile(r"\w+")


def main(argv: Sequence[str] | None = None) -> None:
    """Make the passages of a file of documents."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", required=True, help="file or folder of documents, as for gpt2_pile.py")
    parser.add_argument("--output", type=Path, default=Path(CLOZE_FILE), help=f"default: {CLOZE_FILE}")
    parser.add_argument("--num_passages", type=int, default=NUM_PASSAGES, help=f"default: {NUM_PASSAGES}")
    arguments = parser.parse_args(argv)
    if arguments.num_passages < 1:
        raise ValueError(f"--num_passages={arguments.num_passages} must be 1 or more, say {NUM_PASSAGES}")
    documents = (text for path in checked_files(arguments.dataset) for text in read_file(str(path)))
    save_passages(cloze_passages(documents, arguments.num_passages), arguments.output)


def cloze_passages(
    documents: Iterable[str], num_passages: int, passage_characters: int = PASSAGE_CHARACTERS
) -> list[str]:
    """At most `num_passages` passages of at most `passage_characters`, taken evenly from all that the documents offer.

    The last word has four letters or more and occurs earlier in the passage. No two passages share text. Raises
    ValueError where the documents offer none.
    """
    found = [passage for document in documents for passage in _passages(document, passage_characters)]
    if not found:
        raise ValueError(
            f"the documents offer no passage of {passage_characters} characters that ends in a word which occurs in it "
            "before; hold out more text"
        )
    kept = min(num_passages, len(found))
    return [found[place * len(found) // kept] for place in range(kept)]


def save_passages(passages: Iterable[str], path: Path) -> None:
    """Write {"text": passage} per line, the schema of LAMBADA."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": passage}) + "\n" for passage in passages), encoding="utf-8")


def _passages(document: str, characters: int) -> Iterator[str]:
    """From each stretch of `characters` the longest passage, if there is one of half that length."""
    words = list(_WORD.finditer(document))
    by_stretch = groupby(words, key=lambda word: word.start() // characters)
    for stretch, group in by_stretch:
        passage = _longest_passage(document, [word for word in group if word.end() <= (stretch + 1) * characters])
        if passage is not None and len(passage) >= characters // 2:
            yield passage


def _longest_passage(document: str, words: list[re.Match[str]]) -> str | None:
    """From the first of the words up to the last that will do."""
    first: dict[str, int] = {}
    for place, word in enumerate(words):
        first.setdefault(word.group(), place)
    for place in reversed(range(len(words))):
        word = words[place]
        if first[word.group()] < place and _can_be_asked(document, word):
            return document[words[0].start() : word.end()]
    return None


def _can_be_asked(document: str, word: re.Match[str]) -> bool:
    """Whether it is long enough, of letters only, and after one space.

    At the start of a line lm-eval would take the indentation for a part of the answer.
    """
    before = document[max(0, word.start() - 2) : word.start()]
    return len(word.group()) >= LEAST_LETTERS and word.group().isalpha() and re.fullmatch(r"\S ", before) is not None


if __name__ == "__main__":
    main()
