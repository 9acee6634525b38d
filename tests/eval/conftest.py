"""Tiny models and a few rows of every data set for lm-eval."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel, PreTrainedTokenizerFast
from transformers.modeling_outputs import CausalLMOutput

import adacc_hf

ROOT = Path(adacc_hf.__file__).resolve().parents[1]

Rows = dict[str, list[dict[str, Any]]]

END_OF_TEXT = "<|endoftext|>"
LETTERS = "abcdefghijklmnopqrstuvwxyz "
LETTER_LOGIT = 8.0


@pytest.fixture(scope="session")
def checkout() -> None:
    """Return the source checkout."""
    if not (ROOT / "recipes").is_dir() or not (ROOT / "tests").is_dir():
        pytest.skip("adacc_hf is not imported from a source checkout")


def _arc(question: str, labels: str, answer: str, *choices: str) -> dict[str, Any]:
    return {
        "id": question,
        "question": question,
        "choices": {"text": list(choices), "label": list(labels)},
        "answerKey": answer,
    }


def _sciq(question: str, support: str, answer: str, *distractors: str) -> dict[str, Any]:
    wrong = {f"distractor{place}": choice for place, choice in enumerate(distractors, start=1)}
    return {"question": question, "support": support, "correct_answer": answer, **wrong}


def _swag(startphrase: str, label: int, *endings: str) -> dict[str, Any]:
    return {
        "startphrase": startphrase,
        "label": label,
        **{f"ending{place}": ending for place, ending in enumerate(endings)},
    }


# The comment of each row counts the letters of each choice, or of the last word, that AlphabetModel does not expect.
# The space before a choice counts: only "z" is followed by a space.
ROWS: Rows = {
    "lambada_openai/test": [
        {"text": "All that jazz abc"},  # 0, so that this is the greedy continuation
        {"text": "A buzz, a buzz abd"},  # 1
        {"text": "Once more we sing abc"},  # 1
        {"text": "They waltz a"},  # 0
    ],
    "arc_easy/test": [
        _arc("Which?", "ABC", "B", "zz", "abc", "q"),  # 3 1 2
        _arc("Who?", "12", "2", "abcd", "zap"),  # 1 4
        _arc("Why?", "1234", "4", "no", "it", "at", "ab"),  # 2 3 2 1
    ],
    "sciq/test": [
        _sciq("What?", " It is.", "abc", "x", "yy", "z"),  # 1, and 2 3 2
        _sciq("How?", "", "cold", "ab", "so", "no"),  # 5, and 1 3 2
    ],
    "swag/validation": [
        _swag("He runs and", 3, "falls.", "abcdefgh", "sits.", "a"),  # 7 1 6 1
        _swag("She has", 2, "a dog.", "it.", "no.", "him."),  # 6 4 3 4
        _swag("They", 1, "xy", "ab", "za", "fg"),  # 2 1 3 2
        _swag("We go", 2, "abc", "bbb", "ccc", "ddd"),  # 1 4 4 4
    ],
}


class AlphabetModel(PreTrainedModel):
    """A byte model that expects the next letter after each, " " after "z", "a" after " ". All other bytes are equally
    unlikely.

    The log-likelihood of a text is therefore known without running the model.
    """

    config_class = GPT2Config

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        size = len(tokenizer)
        super().__init__(GPT2Config(vocab_size=size, n_positions=1024, eos_token_id=tokenizer.eos_token_id))
        self.logits = torch.nn.Parameter(torch.zeros(size, size))
        letters = [tokenizer.encode(letter)[0] for letter in LETTERS]
        with torch.no_grad():
            self.logits[letters, [*letters[1:], letters[0]]] = LETTER_LOGIT

    def forward(self, input_ids: torch.Tensor, **_: Any) -> CausalLMOutput:
        return CausalLMOutput(logits=self.logits[input_ids])  # [B, T, V]

    def loglikelihood(self, context: str, text: str) -> float:
        """Return the log-likelihood of ASCII text."""
        size = self.config.vocab_size
        total = 0.0
        for previous, letter in zip(context[-1] + text[:-1], text, strict=True):
            place = LETTERS.find(previous)
            if place < 0:
                total -= math.log(size)
            else:
                expected = LETTERS[(place + 1) % len(LETTERS)] == letter
                total += expected * LETTER_LOGIT - math.log(math.exp(LETTER_LOGIT) + size - 1)
        return total


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Make the hub unreachable, and put datasets' cache into the test's own folder."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets-cache")


@pytest.fixture(scope="session")
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte and an end-of-text token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), END_OF_TEXT]
    bpe = Tokenizer(models.BPE(vocab={token: place for place, token in enumerate(tokens)}, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT)


@pytest.fixture
def alphabet_model(byte_tokenizer: PreTrainedTokenizerFast) -> AlphabetModel:
    return AlphabetModel(byte_tokenizer)


@pytest.fixture
def tiny_gpt2(byte_tokenizer: PreTrainedTokenizerFast) -> GPT2LMHeadModel:
    """Return a GPT-2 in train mode with dropout, and with random weights large enough for its choices to differ."""
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2,
        n_embd=32,
        n_head=2,
        n_positions=128,
        vocab_size=len(byte_tokenizer),
        bos_token_id=byte_tokenizer.bos_token_id,
        eos_token_id=byte_tokenizer.eos_token_id,
        initializer_range=0.3,
    )
    return GPT2LMHeadModel(config).train()


@pytest.fixture
def checkpoint(tiny_gpt2: GPT2LMHeadModel, byte_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Path:
    """Return a folder with `tiny_gpt2` and its tokenizer."""
    folder = tmp_path / "checkpoint"
    tiny_gpt2.save_pretrained(folder)
    byte_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def rows() -> Rows:
    """Return a few rows of every data set, in the hub's schema, by name and split."""
    return ROWS


@pytest.fixture
def data_dir(offline: None, rows: Rows, tmp_path: Path) -> Path:
    """Return a folder with `rows`, in the layout of --data_dir."""
    folder = tmp_path / "data"
    for name, lines in rows.items():
        path = folder / f"{name}.jsonl"
        path.parent.mkdir(parents=True)
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return folder


@pytest.fixture(autouse=True, scope="module")
def _restore_threads() -> Iterator[None]:
    """Restore the number of torch's threads, which runners set for the whole process."""
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)
