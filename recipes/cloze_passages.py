"""Cloze test in the style of LAMBADA from any text: guess a passage's last word, which occurs earlier in the passage.

    python recipes/cloze_passages.py --dataset held_out.jsonl
    adacc eval cloze --model FOLDER --passages cloze.jsonl

Use documents that the model was not trained on.
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
"""Name of the file of passages in a run folder."""

NUM_PASSAGES = 500
"""Default number of passages. The standard error of the accuracy is then at most 2.2 percentage points."""

PASSAGE_CHARACTERS = 400
"""Default maximum length of a passage in characters, about the length of LAMBADA's passages."""

MIN_LETTERS = 4
"""Minimum number of letters in an answer. Shorter words are mostly grammatical, and can be guessed from the words next
to them."""

_WORD = re.compile(r"\w+")


def main(argv: Sequence[str] | None = None) -> None:
    """Create cloze passages from files of documents, with the settings in `argv` (default: the command line)."""
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
    """Return at most `num_passages` passages of at most `passage_characters`, sampled evenly.

    The last word of a passage, which is the answer, has four letters or more and occurs earlier in the passage. No two
    passages share text. Raises ValueError if the documents contain no suitable passage.
    """
    candidates = [passage for document in documents for passage in _document_passages(document, passage_characters)]
    if not candidates:
        raise ValueError(
            f"the documents offer no passage of {passage_characters} characters whose last word occurs earlier in the "
            "passage; hold out more text"
        )
    count = min(num_passages, len(candidates))
    return [candidates[index * len(candidates) // count] for index in range(count)]


def save_passages(passages: Iterable[str], path: Path) -> None:
    """Write a JSON object {"text": passage} per line into `path`, as in LAMBADA's files."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": passage}) + "\n" for passage in passages), encoding="utf-8")


def _document_passages(document: str, characters: int) -> Iterator[str]:
    """Cut a document into chunks of `characters`, and yield the longest passage of each chunk.

    A passage that fills less than half of its chunk is left out.
    """
    words = list(_WORD.finditer(document))
    by_chunk = groupby(words, key=lambda word: word.start() // characters)
    for chunk, group in by_chunk:
        passage = _longest_passage(document, [word for word in group if word.end() <= (chunk + 1) * characters])
        if passage is not None and len(passage) >= characters // 2:
            yield passage


def _longest_passage(document: str, words: list[re.Match[str]]) -> str | None:
    """Return the text from the first of `words` to the last suitable answer, or None if no word is suitable."""
    first_index: dict[str, int] = {}
    for index, word in enumerate(words):
        first_index.setdefault(word.group(), index)
    for index in reversed(range(len(words))):
        word = words[index]
        if first_index[word.group()] < index and _is_suitable_answer(document, word):
            return document[words[0].start() : word.end()]
    return None


def _is_suitable_answer(document: str, word: re.Match[str]) -> bool:
    """Return True if the word is long enough, consists of letters, and follows a single space.

    The single space excludes words at the start of a line, where lm-eval would count the indentation as a part of the
    answer.
    """
    preceding = document[max(0, word.start() - 2) : word.start()]
    return len(word.group()) >= MIN_LETTERS and word.group().isalpha() and re.fullmatch(r"\S ", preceding) is not None


if __name__ == "__main__":
    main()
