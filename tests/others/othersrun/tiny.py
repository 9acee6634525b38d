"""Tiny models, a tokenizer and data with the hub names that other packages' code uses. Nothing is downloaded.

The files are created once, in the layout of the hub's cache (HF_HOME), so that `from_pretrained` works offline.
"""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

VOCABULARY = 300
LENGTH = 256
REVISION = "0" * 40

CHAT = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
WORDS = [
    "the", "cat", "sat", "on", "a", "mat", "and", "saw", "two", "dogs", "run", "by", "late", "in", "blue", "green",
    "old",
]  # fmt: skip

MODELS = {
    "hf-internal-testing/tiny-random-gpt2": "gpt2",
    "trl-internal-testing/tiny-random-LlamaForCausalLM": "llama",
    "trl-internal-testing/tiny-Qwen2ForCausalLM-2.5": "qwen2",
    "trl-internal-testing/tiny-Qwen2ForSequenceClassification-2.5": "qwen2 reward",
}
"""Type of each model in Transformers, followed by its head if that is not the default."""


def make(folder: Path) -> Path:
    """Create models and data in `folder`, which is used as HF_HOME, unless they are up to date. Return `folder`."""
    source = Path(__file__).read_text()
    stamp = folder / "made-by.txt"
    if not stamp.exists() or stamp.read_text() != source:
        shutil.rmtree(folder, ignore_errors=True)
        for name, kind in MODELS.items():
            make_model(snapshot(folder, name), kind)
        for name, rows in DATA.items():
            write_rows(folder / "data" / name, rows)
        stamp.write_text(source)
    return folder


def snapshot(folder: Path, name: str) -> Path:
    """Return the folder of a model's files in the hub's cache."""
    base = folder / "hub" / f"models--{name.replace('/', '--')}"
    (base / "refs").mkdir(parents=True)
    (base / "refs" / "main").write_text(REVISION)
    return base / "snapshots" / REVISION


def tokenizer() -> Any:
    """Return a tokenizer with one token per byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
    vocabulary = {token: number for number, token in enumerate([*special, *letters])}
    bytewise = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=bytewise,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        unk_token="<unk>",
        additional_special_tokens=special[4:],
        model_max_length=LENGTH,
    )
    wrapped.chat_template = CHAT
    return wrapped


def make_model(target: Path, kind: str) -> None:
    """Save two layers of width 64, with weights from a fixed seed, and the tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    type_name, _, head = kind.partition(" ")
    small = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    grouped = {**small, "num_key_value_heads": 2, "max_position_embeddings": LENGTH}
    settings: dict[str, Any] = {
        "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": LENGTH},
    }.get(type_name, grouped)
    if head:
        settings = {**settings, "num_labels": 1}
    tokens = {"vocab_size": VOCABULARY, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
    config = AutoConfig.for_model(type_name, **settings, **tokens)
    maker = AutoModelForSequenceClassification if head else AutoModelForCausalLM
    torch.manual_seed(0)
    model = maker.from_config(config, dtype=torch.float32)
    model.save_pretrained(target)
    tokenizer().save_pretrained(target)


def _sentences(least: int, most: int) -> Callable[[], str]:
    draw = random.Random(0)
    return lambda: " ".join(draw.choice(WORDS) for _ in range(draw.randint(least, most)))


def _rows(num_rows: int, **columns: Any) -> list[dict[str, Any]]:
    """Return rows whose columns are created by functions."""
    return [{name: make_value() for name, make_value in columns.items()} for _ in range(num_rows)]


_short, _long = _sentences(2, 5), _sentences(4, 9)
_draw = random.Random(1)


def _asked() -> list[dict[str, str]]:
    return [{"role": "user", "content": _short()}]


def _answered() -> list[dict[str, str]]:
    return [{"role": "assistant", "content": _long()}]


DATA: dict[str, list[dict[str, Any]]] = {
    "text": _rows(18, text=_sentences(6, 14)),
    "preferences": _rows(18, prompt=lambda: f"{_short()} ", chosen=_long, rejected=_long),
    "triples": _rows(18, prompt=lambda: f"{_short()} ", reference=_long, chosen=_long, rejected=_long),
    "judged": _rows(18, prompt=lambda: f"{_short()} ", completion=_long, label=lambda: _draw.random() < 0.5),
    "prompts": _rows(18, prompt=_short),
    "chats": _rows(18, messages=lambda: _asked() + _answered()),
    "chat prompts": _rows(18, prompt=_asked),
}


def write_rows(target: Path, rows: list[dict[str, Any]]) -> None:
    """Write a folder for `load_dataset` with a training split, and an evaluation split with two names."""
    target.mkdir(parents=True)
    training, evaluation = rows[: len(rows) * 2 // 3], rows[len(rows) * 2 // 3 :]
    for split, part in {"train": training, "validation": evaluation, "test": evaluation}.items():
        (target / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
