"""trl's trainers, which take the callback as Transformers' own does: the run is bit for bit the one without."""

import random

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from adacc_hf.callbacks import AdaccCallback

trl = pytest.importorskip("trl", reason="the peers' extra installs trl")
datasets = pytest.importorskip("datasets", reason="trl's trainers take data sets of this library")

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*gradient_checkpointing:FutureWarning"
)  # the old names, which trl uses

WORDS = ["<pad>", "<eos>", *(f"w{number}" for number in range(95))]


@pytest.fixture(scope="module")
def tokenizer():
    """One token per word, made here: nothing is fetched."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    whole_words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<pad>"))
    whole_words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=whole_words, pad_token="<pad>", eos_token="<eos>")


@pytest.fixture(scope="module")
def sentence():
    """`sentence(least, most)`: as many random words; another one at each call."""
    draw = random.Random(0)
    return lambda least, most: " ".join(draw.choice(WORDS[2:]) for _ in range(draw.randint(least, most)))


@pytest.fixture
def assert_run_unchanged(tokenizer, make_model, lossless, tmp_path):
    """`assert_run_unchanged(trainer_class, config_class, examples, more=(), **arguments)`: as without callback.

    `more` names the other models that the trainer takes.
    """

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
            model=make_model(),
            args=config_class(**settings | arguments),
            train_dataset=datasets.Dataset.from_list(examples),
            processing_class=tokenizer,
            callbacks=callbacks,
            **{name: make_model() for name in more},
        )
        trainer.train()
        losses = [record["loss"] for record in trainer.state.log_history if "loss" in record]
        return losses, {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}

    def check(trainer_class, config_class, examples, more=(), **arguments):
        plain_losses, plain = run(trainer_class, config_class, examples, [], arguments, more)
        callback = AdaccCallback(min_compress_bytes=0, **lossless)
        losses, weights = run(trainer_class, config_class, examples, [callback], arguments, more)
        assert callback.policy.action_counts()["recompute"] > 0
        assert len(losses) == 5
        assert losses == plain_losses
        assert [name for name in plain if not torch.equal(weights[name], plain[name])] == []

    return check


@pytest.mark.parametrize("packing", [True, False], ids=["packed-checkpointing", "padded"])
def test_supervised_fine_tuning(assert_run_unchanged, sentence, packing):
    """Packed into batches of one length, with gradient checkpointing set too; and in batches of many lengths."""
    texts = [{"text": sentence(5, 24)} for _ in range(32)]
    settings = {"gradient_checkpointing": packing, "packing": packing, "max_length": 32}
    assert_run_unchanged(trl.SFTTrainer, trl.SFTConfig, texts, **settings)


def test_preference_training(assert_run_unchanged, sentence):
    """The reference model's forward comes before each of the trained one's."""
    pairs = [{"prompt": f"{sentence(3, 6)} ", "chosen": sentence(4, 9), "rejected": sentence(4, 9)} for _ in range(16)]
    assert_run_unchanged(trl.DPOTrainer, trl.DPOConfig, pairs, more=("ref_model",), max_length=32)
