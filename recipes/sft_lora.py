"""Teach a language model to chat by LoRA or QLoRA under a memory budget: TRL's SFTTrainer with one callback more.

    python recipes/sft_lora.py                                  the demo: a tiny LLaMA, under a minute on a CPU
    accelerate launch recipes/sft_lora.py --model_name_or_path meta-llama/Llama-3.1-8B-Instruct --dtype bfloat16 \
        --chats my_chats.jsonl --max_length 4096 --per_device_train_batch_size 4 --memory_budget 24GiB

`--load_in_4bit` makes it QLoRA, `--use_peft false` trains all weights. Every setting of TRL's SFTConfig and ModelConfig
may be given, on the command line or as `--config settings.yaml`. Settings that cannot work end the run with one message
and exit status 2. It takes pip install 'adacc-hf[recipes,sft]', and bitsandbytes for QLoRA.
"""

import hashlib
import importlib.util
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
from datasets import Dataset, load_dataset
from datasets.exceptions import DatasetGenerationError
from text_tokenizer import trained_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase, TrainerCallback
from trl import (
    ModelConfig,
    SFTConfig,
    SFTTrainer,
    TrlParser,
    get_peft_config,
    get_quantization_config,
    is_conversational,
    is_conversational_from_value,
)

from adacc_hf import AdaccCallback
from adacc_hf.artifacts.errors import AdaccError
from adacc_hf.artifacts.units import format_bytes
from adacc_hf.eval.trials.train_methods import parse_budget
from adacc_hf.torch_glue.compat import CHECKPOINTING

ROWS = '{"messages": [{"role": ..., "content": ...}, ...]}, {"prompt": ..., "completion": ...} or {"text": ...}'
# The demo's tokenizer has one special token. The generation marks are for --assistant_only_loss.
CHAT_TEMPLATE = """{% for message in messages %}{{ message['role'] + ': ' }}\
{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}\
{% else %}{{ message['content'] + eos_token }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"""


@dataclass(kw_only=True)
class RecipeArguments:
    """What TRL's own settings do not say."""

    chats: str = field(
        default=str(Path(__file__).parent / "data" / "chats.jsonl"),
        metadata={"help": f"A jsonl file with rows {ROWS}."},
    )
    memory_budget: str = field(
        default="auto",
        metadata={
            "help": "auto (what the device has), a size such as 20GiB for the peak of a step, or a fraction of plain "
            "training's activation bytes such as 0.5 (the demo's)."
        },
    )
    actions: str = field(
        default="retain,compress,recompute",
        metadata={"help": "What may be done with activations; retain,recompute is bit-equal to plain training."},
    )
    cache_dir: str = field(default="runs/cache", metadata={"help": "Folder for the demo's tokenizer; safe to delete."})


Settings = tuple[RecipeArguments, SFTConfig, ModelConfig]
DEFAULTS = {
    "output_dir": "runs/sft-lora",
    "use_peft": True,
    "packing": True,
    "bf16": torch.cuda.is_available(),
    "dataloader_pin_memory": torch.cuda.is_available(),  # the Trainer warns where there is no device to pin for
    # TRL switches torch's checkpointing on. The callback decides in its place; off, no log line has to say so.
    CHECKPOINTING: False,
}
DEMO_DEFAULTS = {
    "memory_budget": "0.5",
    "max_length": 256,
    # TRL packs chats as they fit and puts the rows of a batch end to end. Padded, batches have one size and one policy.
    "pad_to_multiple_of": "256",
    "dataloader_drop_last": True,
    "max_steps": 30,
    "per_device_train_batch_size": 2,
    "learning_rate": 1e-2,
    "lora_target_modules": "all-linear",
    "report_to": "none",
}


def parse_settings(argv: list[str]) -> Settings:
    """The settings on the command line or in `--config`. Raises ValueError for one that cannot be."""
    parser = TrlParser((RecipeArguments, SFTConfig, ModelConfig), description=__doc__, allow_abbrev=False)
    is_demo = not any(text.partition("=")[0] in ("--model_name_or_path", "--config") for text in argv)
    parser.set_defaults(**DEFAULTS, **(DEMO_DEFAULTS if is_demo else {}))
    return parser.parse_args_and_config(argv)


def make_callback(recipe: RecipeArguments) -> AdaccCallback:
    """The one line that this recipe adds to a usual one. Raises ValueError for a budget or action that there is not."""
    return AdaccCallback(memory_budget=parse_budget(recipe.memory_budget), actions=tuple(recipe.actions.split(",")))


def make_trainer(settings: Settings, callbacks: list[TrainerCallback]) -> SFTTrainer:
    """TRL's trainer on the chats. Raises ValueError or OSError for what cannot work, before anything is trained."""
    recipe, training, model = settings
    check_quantization(model)
    chats = load_chats(recipe.chats, training.dataset_text_field)
    if model.model_name_or_path is None:
        with training.main_process_first(desc="training the tokenizer"):
            tokenizer = demo_tokenizer(chats, Path(recipe.cache_dir))
        start = {"model": demo_model(tokenizer, training), "processing_class": tokenizer}
    else:
        loading = {
            "revision": model.model_revision,
            "dtype": model.dtype,
            "attn_implementation": model.attn_implementation,
        }
        quantization = get_quantization_config(model)
        loading |= {} if quantization is None else {"quantization_config": quantization}
        training.model_init_kwargs = loading | (training.model_init_kwargs or {})
        start = {"model": model.model_name_or_path}
    try:
        return SFTTrainer(
            **start, args=training, train_dataset=chats, peft_config=get_peft_config(model), callbacks=callbacks
        )
    except OSError as error:
        raise ValueError(f"--model_name_or_path={model.model_name_or_path} could not be loaded: {error}") from error


def check_quantization(model: ModelConfig) -> None:
    """Raises ValueError where weights cannot be quantized."""
    name = "--load_in_4bit" if model.load_in_4bit else "--load_in_8bit"
    if not (model.load_in_4bit or model.load_in_8bit):
        return
    if model.model_name_or_path is None:
        raise ValueError(f"{name} quantizes the weights of a hub id or folder; name one with --model_name_or_path")
    if not model.use_peft:
        raise ValueError(
            f"{name} freezes the weights, and --use_peft=False leaves nothing to train; leave out one of them"
        )
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ValueError(f"{name} needs bitsandbytes: pip install bitsandbytes, or leave it out to train by LoRA")


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


def demo_model(tokenizer: PreTrainedTokenizerBase, training: SFTConfig) -> LlamaForCausalLM:
    """A LLaMA with random weights, and with room for one packed sequence."""
    torch.manual_seed(training.seed)
    config = LlamaConfig(
        num_hidden_layers=4,
        hidden_size=128,
        intermediate_size=344,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=len(tokenizer),
        max_position_embeddings=training.max_length or 1024,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return LlamaForCausalLM(config)


def train(trainer: SFTTrainer, callback: AdaccCallback) -> SFTTrainer:
    """Trains, saves the adapter (or the model), and prints one closing line."""
    resumed = trainer.args.resume_from_checkpoint
    seconds = trainer.train(resume_from_checkpoint=resumed).metrics["train_runtime"]
    trainer.save_model()
    if trainer.is_world_process_zero():
        print(closing_line(trainer, callback, seconds))
    return trainer


def closing_line(trainer: SFTTrainer, callback: AdaccCallback, seconds: float) -> str:
    """What was reached at which speed, what was decided, and what that stores."""
    logs = trainer.state.log_history
    losses = [entry["loss"] for entry in logs if "loss" in entry] or [logs[-1]["train_loss"]]
    tokens = max((entry["num_tokens"] for entry in logs if "num_tokens" in entry), default=0)
    line = (
        f"{trainer.state.global_step} steps, loss {losses[0]:.3f} to {losses[-1]:.3f}, {tokens / seconds:.0f} tokens/s"
    )
    policy, profile = callback.policy, callback.profile
    if policy is not None:
        line += f"; {policy.summary()}"
    if policy is not None and profile is not None:
        share = policy.predicted_stored_bytes / profile.plain_stored_bytes
        line += f"; that is {share:.0%} of the {format_bytes(profile.plain_stored_bytes)} that plain training stores"
    return f"{line}; saved in {trainer.args.output_dir}"


def command_line() -> int:
    """Runs the recipe; the exit status is 2 after an error in the settings, told in one message."""
    try:
        settings = parse_settings(sys.argv[1:])
        callback = make_callback(settings[0])
        trainer = make_trainer(settings, [callback])
    except (ValueError, OSError) as error:
        return tell(error)
    try:
        train(trainer, callback)
    except AdaccError as error:  # a budget that no policy fits, or a model without blocks: known only now
        return tell(error)
    return 0


def tell(error: Exception) -> int:
    """Prints the error as one message."""
    print(f"sft_lora.py: error: {error}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(command_line())
