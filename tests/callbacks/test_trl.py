"""TRL's trainers accept the callback like Transformers' Trainer, and the run is bit-equal to the run without the
callback."""

import random

import pytest
import torch
from transformers import GPT2ForSequenceClassification, PreTrainedTokenizerFast

from adacc_hf import AdaccCallback

trl = pytest.importorskip("trl", reason="the peers' extra installs trl")
datasets = pytest.importorskip("datasets", reason="trl's trainers take data sets of this library")

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning"),  # TRL uses the old names
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),  # peft 0.21 with Transformers 5.23
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),  # GPT-2 has its weights transposed
]

WORDS = ["<pad>", "<eos>", *(f"w{number}" for number in range(95))]


@pytest.fixture(scope="module")
def tokenizer():
    """Return a tokenizer with one token per word. Nothing is downloaded."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    whole_words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<pad>"))
    whole_words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=whole_words, pad_token="<pad>", eos_token="<eos>")


@pytest.fixture(scope="module")
def sentence():
    """Return `sentence(least, most)`, which returns `least` to `most` random words, different ones at each call."""
    draw = random.Random(0)
    return lambda least, most: " ".join(draw.choice(WORDS[2:]) for _ in range(draw.randint(least, most)))


@pytest.fixture
def assert_run_unchanged(tokenizer, make_model, lossless, tmp_path):
    """Return `assert_run_unchanged(trainer_class, config_class, examples, more={}, **arguments)`, which returns the
    callback. It compares losses, weights and all other logged values but times with a run without the callback. `more`
    maps further arguments of the trainer to functions that create them."""

    def run(trainer_class, config_class, examples, callbacks, arguments, more):
        torch.manual_seed(0)
        settings = {
            "output_dir": str(tmp_path),
            "max_steps": 5,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "learning_rate": 1e-2,
            "logging_steps": 1,
            "report_to": [],
            "save_strategy": "no",
            "use_cpu": True,
            "bf16": False,
            "disable_tqdm": True,
        }
        trainer = trainer_class(
            args=config_class(**settings | arguments),
            train_dataset=datasets.Dataset.from_list(examples),
            processing_class=tokenizer,
            callbacks=callbacks,
            **{name: make() for name, make in {"model": make_model, **more}.items()},
        )
        trainer.train()
        logs = [without_times(record) for record in trainer.state.log_history]
        weights = {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}
        return logs, weights

    def check(trainer_class, config_class, examples, more=None, **arguments):
        callback = AdaccCallback(min_compress_bytes=0, **lossless)
        plain_logs, plain = run(trainer_class, config_class, examples, [], arguments, more or {})
        logs, weights = run(trainer_class, config_class, examples, [callback], arguments, more or {})
        assert callback.policy.action_counts()["recompute"] > 0
        assert ["loss" in record for record in logs] == [True] * 5 + [False]
        assert logs == plain_logs
        assert [name for name in plain if not torch.equal(weights[name], plain[name])] == []
        return callback

    return check


def without_times(record):
    """Return the logged values of the training without times."""
    return {
        name: value
        for name, value in record.items()
        if not name.startswith("adacc/") and not name.endswith(("_runtime", "_per_second", "step_time", "total_flos"))
    }


@pytest.mark.parametrize("packing", [True, False], ids=["packed-checkpointing", "padded"])
def test_supervised_fine_tuning(assert_run_unchanged, sentence, packing):
    """Batches are packed to one length, with gradient checkpointing set as well, or have many lengths."""
    texts = [{"text": sentence(5, 24)} for _ in range(32)]
    settings = {"gradient_checkpointing": packing, "packing": packing, "max_length": 32}
    assert_run_unchanged(trl.SFTTrainer, trl.SFTConfig, texts, **settings)


def preferences(sentence):
    return [{"prompt": f"{sentence(3, 6)} ", "chosen": sentence(4, 9), "rejected": sentence(4, 9)} for _ in range(16)]


def adapters():
    return pytest.importorskip("peft").LoraConfig(r=4, target_modules=["c_attn"], lora_dropout=0.1)


def test_preference_training_of_adapters(assert_run_unchanged, sentence):
    """The reference is the same model with its adapters off, called in the middle of the step."""
    more = {"peft_config": adapters}
    callback = assert_run_unchanged(trl.DPOTrainer, trl.DPOConfig, preferences(sentence), more, max_length=32)
    assert len(callback.policy.blocks) == 2


def test_reward_models_log_what_training_alone_gathers(assert_run_unchanged, sentence, make_model):
    """Reward models gather metrics while losses are computed. Profiling computes losses, too."""

    def reward_model():
        return GPT2ForSequenceClassification(make_model(num_labels=1).config)

    assert_run_unchanged(
        trl.RewardTrainer, trl.RewardConfig, preferences(sentence), {"model": reward_model}, max_length=32
    )


def test_reinforcement_learning(assert_run_unchanged, sentence):
    """Batches are generated within the step, in train mode."""
    prompts = [{"prompt": sentence(3, 6)} for _ in range(16)]

    def rewards():
        return lambda completions, **_: [float(len(set(text.split()))) for text in completions]

    generation = {"num_generations": 2, "max_completion_length": 8}
    assert_run_unchanged(trl.GRPOTrainer, trl.GRPOConfig, prompts, {"reward_funcs": rewards}, **generation)
