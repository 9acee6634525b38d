"""`adacc eval cloze`: passages of a user's text as questions in LAMBADA's form."""

from __future__ import annotations

import json
from pathlib import Path

from adacc_hf.cli import main
from adacc_hf.eval.tasks.lm_eval_tasks import CLOZE_FILE, cloze_task
from adacc_hf.eval.tasks.zero_shot import ModelSource, language_model, score


def test_accuracy_is_the_share_of_last_words_guessed(offline, alphabet_model, byte_tokenizer, tmp_path):
    """After "jazz" AlphabetModel predicts " abcde...", and after "sing" no space, so that one of three words is
    correct."""
    words = ["The abcd came with jazz abcd", "The abce came with jazz abce", "The abcd began to sing abcd"]
    passages = tmp_path / "cloze.jsonl"
    passages.write_text("".join(json.dumps({"text": text}) + "\n" for text in words))
    with language_model(ModelSource(model=alphabet_model, tokenizer=byte_tokenizer)) as model:
        assert score(model, cloze_task(passages)).acc == 1 / 3


def test_passages_are_found_in_the_run_folder(offline: None, checkpoint: Path, tmp_path: Path) -> None:
    output = tmp_path / "out" / "cloze.json"
    rows = [{"text": "The river is a river"}, {"text": "No stone is left on any stone"}]
    (checkpoint / CLOZE_FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["eval", "cloze", "--model", str(checkpoint), "--output", str(output)]) == 0
    record = json.loads(output.read_text())
    assert record["results"]["cloze"]["num_samples"] == 2
    assert 0 <= record["results"]["cloze"]["acc"] <= 1


def test_no_passages_name_the_way_to_some(offline, checkpoint, tmp_path, capsys):
    assert main(["eval", "cloze", "--model", str(checkpoint), "--output", str(tmp_path / "cloze.json")]) == 2
    assert "cloze.jsonl does not exist; see `adacc eval cloze --help`" in capsys.readouterr().err
