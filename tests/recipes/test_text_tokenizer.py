import os
from pathlib import Path

import pytest
from datasets import Dataset
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from text_tokenizer import trained_tokenizer
from transformers import PreTrainedTokenizerBase


# The fixture is only read, so that one instance can serve every example.
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text())
def test_every_text_survives_the_round_trip(tokenizer: PreTrainedTokenizerBase, text: str):
    ids = tokenizer(text, split_special_tokens=True)["input_ids"]
    assert tokenizer.decode(ids) == text


def test_vocabulary_has_the_asked_size_and_one_special_token(tokenizer: PreTrainedTokenizerBase):
    assert len(tokenizer) == 290
    assert tokenizer.eos_token == tokenizer.bos_token == "<|endoftext|>"
    assert tokenizer("<|endoftext|>")["input_ids"] == [tokenizer.eos_token_id]


def test_a_trained_tokenizer_is_read_from_the_cache(texts: list[str], tmp_path: Path):
    documents = Dataset.from_dict({"text": texts})
    first = trained_tokenizer(documents, "key", 290, 100, tmp_path)
    # Training would fail without documents, so that this tokenizer must come from the cache.
    cached = trained_tokenizer(None, "key", 290, 100, tmp_path)
    assert cached.get_vocab() == first.get_vocab()


@pytest.mark.parametrize("changed_key", [("other", 290, 100), ("key", 280, 100), ("key", 290, 5)])
def test_text_and_settings_are_part_of_the_key(changed_key: tuple[str, int, int], texts: list[str], tmp_path: Path):
    documents = Dataset.from_dict({"text": texts})
    trained_tokenizer(documents, "key", 290, 100, tmp_path)
    trained_tokenizer(documents, *changed_key, tmp_path)
    assert len(os.listdir(tmp_path / "tokenizers")) == 2


def test_a_failed_save_leaves_nothing(texts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(self: object, folder: Path) -> None:
        Path(folder, "tokenizer.json").write_text("half")
        raise OSError("disk full")

    monkeypatch.setattr("transformers.PreTrainedTokenizerFast.save_pretrained", fail)
    with pytest.raises(OSError, match="disk full"):
        trained_tokenizer(Dataset.from_dict({"text": texts}), "key", 290, 100, tmp_path)
    assert os.listdir(tmp_path / "tokenizers") == []
