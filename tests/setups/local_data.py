"""Random texts, images and sounds of varying length, and a tokenizer. Nothing is downloaded.

All data are lists and numpy arrays: the memory meter counts only torch's tensors, so that data sets are not counted.
"""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = ["<pad>", "<eos>", "<bos>", "<unk>", "<user>", "<assistant>", "<end>", "<image>"]
VOCABULARY_SIZE = 1000
NUM_ROWS = 600
"""Rows per data set: more than 30 steps of 16 samples."""
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<' + message['role'] + '> ' + message['content'] + ' <end> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant> ' }}{% endif %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per word."""
    words = [*SPECIAL_TOKENS, *(f"w{number}" for number in range(VOCABULARY_SIZE - len(SPECIAL_TOKENS)))]
    word_level = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    word_level.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=word_level,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        unk_token="<unk>",
        additional_special_tokens=SPECIAL_TOKENS[4:],
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


class Draw:
    """Random samples from a fixed seed."""

    def __init__(self) -> None:
        self._random = random.Random(0)
        self._numpy = np.random.default_rng(0)

    def ids(self, shortest: int, longest: int) -> list[int]:
        """Return a random number of random token ids."""
        length = self._random.randint(shortest, longest)
        return [self._random.randrange(len(SPECIAL_TOKENS), VOCABULARY_SIZE) for _ in range(length)]

    def text(self, shortest: int, longest: int) -> str:
        """Return a text of a random number of words, one token each."""
        return " ".join(f"w{index - len(SPECIAL_TOKENS)}" for index in self.ids(shortest, longest))

    def array(self, *shape: int) -> np.ndarray:
        """Return a random array: an image, or the features of a sound."""
        return self._numpy.standard_normal(shape, dtype=np.float32)

    def label(self, num_labels: int) -> int:
        return self._random.randrange(num_labels)


def rows(make_row: Callable[[Draw], dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a data set: `make_row` is called once for each row."""
    draw = Draw()
    return [make_row(draw) for _ in range(NUM_ROWS)]
