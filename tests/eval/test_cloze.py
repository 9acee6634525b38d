"""`adacc eval cloze`: passages of one's own text, asked as LAMBADA's are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from adacc_hf.cli import main
from adacc_hf.eval.cloze import read_documents
from adacc_hf.eval.tasks.lm_eval_tasks import cloze_task
from adacc_hf.eval.tasks.zero_shot import ModelSource, language_model, score


def test_accuracy_is_the_share_of_last_words_guessed(
    offline: None, alphabet_model: PreTrainedModel, byte_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    """After "jazz" AlphabetModel predicts " abcde...", and after "sing" no space: one of three is guessed."""
    words = ["The abcd came with jazz abcd", "The abce came with jazz abce", "The abcd began to sing abcd"]
    passages = tmp_path / "cloze.jsonl"
    passages.write_text("".join(json.dumps({"text": text}) + "\n" for text in words))
    with language_model(ModelSource(model=alphabet_model, tokenizer=byte_tokenizer)) as model:
        assert score(model, cloze_task(passages)).acc == 1 / 3


@pytest.mark.parametrize("made_here", [True, False])
def test_passages_are_made_or_found_in_the_run_folder(
    made_here: bool, offline: None, checkpoint: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out" / "cloze.json"
    command = ["eval", "cloze", "--model", str(checkpoint), "--output", str(output)]
    if made_here:
        documents = tmp_path / "documents.jsonl"
        text = "The river is wide where the bridge stands. " * 30
        documents.write_text(json.dumps({"text": text}) + "\n")
        command += ["--documents", str(documents), "--num_passages", "2"]
    else:
        rows = [{"text": "The river is a river"}, {"text": "No stone is left on any stone"}]
        (checkpoint / "cloze.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(command) == 0
    record = json.loads(output.read_text())
    assert record["results"]["cloze"]["num_samples"] == 2
    assert 0 <= record["results"]["cloze"]["acc"] <= 1
    assert output.with_suffix(".jsonl").is_file() == made_here


def test_no_passages_name_the_way_to_some(
    offline: None, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", "cloze", "--model", str(checkpoint), "--output", str(tmp_path / "cloze.json")]) == 2
    assert "cloze.jsonl does not exist; see `adacc eval cloze --help`" in capsys.readouterr().err


@pytest.mark.parametrize("line", ["text", '["text"]', '{"words": "a"}', '{"text": 3}'])
def test_a_document_without_text_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "documents.jsonl"
    path.write_text(f'{{"text": "a b"}}\n{line}\n')
    with pytest.raises(ValueError, match=r"documents\.jsonl, line 2 is not"):
        list(read_documents(path))
