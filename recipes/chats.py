"""Training chats from a jsonl file, and the demo's tokenizer and tiny model."""

import hashlib
from pathlib import Path

import torch
from datasets import Dataset, load_dataset
from datasets.exceptions import DatasetGenerationError
from text_tokenizer import trained_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase
from trl import is_conversational, is_conversational_from_value

ROWS = '{"messages": [{"role": ..., "content": ...}, ...]}, {"prompt": ..., "completion": ...} or {"text": ...}'
# The demo's tokenizer has one special token. --assistant_only_loss needs the generation marks.
CHAT_TEMPLATE = """{% for message in messages %}{{ message['role'] + ': ' }}\
{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}\
{% else %}{{ message['content'] + eos_token }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"""


def load_chats(path: str, text_field: str) -> Dataset:
    """Load the rows of a chat dataset from a jsonl file. Raises FileNotFoundError, or ValueError if TRL cannot train on
    the rows."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"--chats={path}: no such file; check the path (relative to {Path.cwd()})")
    try:
        rows = load_dataset("json", data_files=path, split="train")
        first = {name: value for name, value in next(iter(rows), {}).items() if value is not None}
    except (DatasetGenerationError, ValueError, StopIteration) as error:  # StopIteration if the file is empty
        reason = str(error.__cause__ or error) or "it is empty"
        raise ValueError(f"--chats={path} is not a jsonl file ({reason}); write one row per line: {ROWS}") from error
    schemas = ({"messages"}, {"conversations"}, {"prompt", "completion"}, {text_field})
    schema = next((schema for schema in schemas if schema <= first.keys()), set())
    is_chat = is_conversational(first) or is_conversational_from_value(first)
    has_chat_key, has_text_key = schema in schemas[:2], schema == schemas[3]
    if not schema or (has_chat_key and not is_chat) or (has_text_key and not isinstance(first[text_field], str)):
        raise ValueError(f"--chats={path} has rows with the keys {sorted(first) or '(none)'}; write rows {ROWS}")
    if any(rows.data.column(name).null_count for name in schema):
        raise ValueError(
            f"--chats={path} has rows without {' and '.join(sorted(schema))}, which the first row has; remove these "
            f"rows"
        )
    return rows


def demo_tokenizer(chats: Dataset, cache_dir: Path) -> PreTrainedTokenizerBase:
    """Return a byte-level BPE tokenizer that is trained on the chats, with a chat template."""
    texts = [text for row in chats for text in strings_in(row)]
    key = hashlib.sha256("\0".join(texts).encode()).hexdigest()
    tokenizer = trained_tokenizer(Dataset.from_dict({"text": texts}), key, 512, len(texts), cache_dir)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def strings_in(part: object) -> list[str]:
    """Return all strings in a row of the chat dataset, at any depth of nesting."""
    if isinstance(part, (dict, list)):
        return [text for inner in (part.values() if isinstance(part, dict) else part) for text in strings_in(inner)]
    return [part] if isinstance(part, str) else []


def demo_model(tokenizer: PreTrainedTokenizerBase, context_length: int, seed: int) -> LlamaForCausalLM:
    """Return a LLaMA model with 0.9 million random weights and a context of `context_length` tokens."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        num_hidden_layers=4,
        hidden_size=128,
        intermediate_size=344,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=len(tokenizer),
        max_position_embeddings=context_length,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return LlamaForCausalLM(config)
