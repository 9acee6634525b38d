"""Guarantees of passages of any text: the last word is a question that the passage itself answers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from cloze_passages import CLOZE_FILE, cloze_passages, main, save_passages
from hypothesis import given
from hypothesis import strategies as st

from adacc_hf.eval.tasks import lm_eval_tasks

# The texts have letters, digits, indentation, punctuation and a letter outside ASCII, in words that repeat often.
DOCUMENTS = st.lists(
    st.lists(st.sampled_from(["self", "table", "née_", "zwölf", "x1", "if", "(", ".", "\n    "])).map(" ".join)
)


def test_ends_in_the_last_word_that_occurs_before() -> None:
    document = "The table stood near the door, so she moved the table away."
    assert cloze_passages([document], 5, 60) == ["The table stood near the door, so she moved the table"]


@pytest.mark.parametrize(
    "document",
    [
        "The table stood near the door, so she moved the chair",  # no word comes twice
        "The cat stood near the door, so she moved the cat",  # the word is too short
        "tables stood near the door, so she moved the table",  # a part of another word
        "table; it stood near the door, so she moved it;\n    table",  # indented
        "table; it stood near the door, so she moved it (table)",  # no space before the word
    ],
    ids=["new", "short", "part", "indented", "no-space"],
)
def test_what_cannot_be_asked_is_left_out(document: str) -> None:
    with pytest.raises(ValueError, match="offer no passage of 60 characters"):
        cloze_passages([document], 5, 60)


@given(documents=DOCUMENTS, characters=st.integers(min_value=10, max_value=80), num=st.integers(1, 9))
def test_every_passage_keeps_its_promise(documents: list[str], characters: int, num: int) -> None:
    try:
        passages = cloze_passages(documents, num, characters)
    except ValueError:
        passages = []
    assert len(passages) <= num
    for passage in passages:
        context, space, word = passage.rpartition(" ")
        assert space
        assert not context[-1].isspace()
        assert len(word) >= 4
        assert word.isalpha()
        assert word in re.findall(r"\w+", context)
        assert characters // 2 <= len(passage) <= characters
        assert any(passage in document for document in documents)
    # No two passages share text.
    assert sum(map(len, passages)) <= sum(map(len, documents))


def test_passages_are_taken_from_the_whole_text() -> None:
    documents = [f"The number is {word}, and again the number is {word}" for word in ("five", "nine", "zero", "four")]
    every = cloze_passages(documents, 9, 60)
    assert [passage.rpartition(" ")[2] for passage in every] == ["five", "nine", "zero", "four"]
    assert cloze_passages(documents, 2, 60) == [every[0], every[2]]


def test_saved_as_lambada_is(tmp_path: Path) -> None:
    path = tmp_path / "new" / "cloze.jsonl"
    save_passages(["ein\nWort", "zwölf"], path)
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"text": "ein\nWort"}, {"text": "zwölf"}]


def test_the_script_makes_them_of_a_file(tmp_path: Path) -> None:
    documents = tmp_path / "documents.jsonl"
    documents.write_text(json.dumps({"text": "The river is wide where the bridge stands. " * 30}) + "\n")
    output = tmp_path / CLOZE_FILE
    main(["--dataset", str(documents), "--output", str(output), "--num_passages", "2"])
    assert len(output.read_text().splitlines()) == 2


def test_the_name_is_what_eval_looks_for() -> None:
    assert CLOZE_FILE == lm_eval_tasks.CLOZE_FILE
