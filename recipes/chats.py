"""Chats to train on: the rows of a jsonl file; and the demo's tokenizer and tiny model, made on the spot."""

import hashlib
from pathlib import Path

import torch
from datasets import Dataset, load_dataset
from datasets.exceptions import DatasetGenerationError
from text_tokenizer import trained_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase
from trl import is_conversational, is_conversational_from_value

ROWS = '{"messages": [{"role": ..., "content": ...}, ...]}, {"prompt": ..., "completion": ...} or {"text": ...}'
# The demo's tokenizer has one special token. The generation marks are for --assistant_only_loss.
CHAT_TEMPLATE = """{% for message in messages %}{{ message['role'] + ': ' }}\
{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}\
{% else %}{{ message['content'] + eos_token }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"""


def load_chats(path: str, text_field: str) -> Dataset:
    """The rows of a jsonl file. Raises FileNotFoundError or ValueError for what TRL could not train on."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"--chats={path}: no such file; check the path (relative to {Path.cwd()})")
    try:
        rows = load_dataset("json", data_files=path, split="train")
        first = {name: value for name, value in next(iter(rows), {}).items() if value is not None}
    except (DatasetGenerationError, ValueError, StopIteration) as error:  # the last is what an empty file ends in
        reason = str(error.__cause__ or error) or "it is empty"
        raise ValueError(f"--chats={path} is no jsonl file ({reason}); write one row a line: {ROWS}") from error
    kinds = ({"messages"}, {"conversations"}, {"prompt", "completion"}, {text_field})
    kind = next((kind for kind in kinds if kind <= first.keys()), set())
    is_chat = is_conversational(first) or is_conversational_from_value(first)
    if not kind or (kind in kinds[:2] and not is_chat) or (kind == kinds[3] and not isinstance(first[text_field], str)):
        raise ValueError(f"--chats={path} has rows of {sorted(first) or 'nothing'}; write rows {ROWS}")
    if any(rows.data.column(name).null_count for name in kind):
        raise ValueError(
            f"--chats={path} has rows without {' and '.join(sorted(kind))}, which the first has; drop them"
        )
    return rows


def demo_tokenizer(chats: Dataset, cache_dir: Path) -> PreTrainedTokenizerBase:
    """A byte-level BPE of the chats, with a chat template."""
    texts = [text for row in chats for text in strings_in(row)]
    key = hashlib.sha256("\0".join(texts).encode()).hexdigest()
    tokenizer = trained_tokenizer(Dataset.from_dict({"text": texts}), key, 512, len(texts), cache_dir)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def strings_in(part: object) -> list[str]:
    """All strings in a row, however deep."""
    if isinstance(part, (dict, list)):
        return [text for inner in (part.values() if isinstance(part, dict) else part) for text in strings_in(inner)]
    return [part] if isinstance(part, str) else []


def demo_model(tokenizer: PreTrainedTokenizerBase, longest: int, seed: int) -> LlamaForCausalLM:
    """A LLaMA of 0.9 million random weights, with room for `longest` tokens."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        num_hidden_layers=4,
        hidden_size=128,
        intermediate_size=344,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=len(tokenizer),
        max_position_embeddings=longest,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return LlamaForCausalLM(config)
