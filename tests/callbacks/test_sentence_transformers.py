"""Embedding models, whose loss calls the model once for every column. Skipped where sentence-transformers is
missing."""

import random

import pytest
import torch
from transformers import BertConfig, BertModel, BertTokenizerFast

from adacc_hf import AdaccCallback

sentence_transformers = pytest.importorskip("sentence_transformers")
WORDS = [f"w{number}" for number in range(100)]


def texts(num_texts, longest, seed):
    choose = random.Random(seed)
    return [" ".join(choose.choices(WORDS, k=choose.randint(5, longest))) for _ in range(num_texts)]


@pytest.fixture
def model_folder(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
    BertTokenizerFast(str(folder / "vocab.txt"), model_max_length=48).save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        num_hidden_layers=3, hidden_size=64, num_attention_heads=4, intermediate_size=256, vocab_size=105
    )
    BertModel(config).save_pretrained(folder)
    return folder


def train(model_folder, output_dir, callbacks):
    """Return the losses of a run on pairs of texts of any length."""
    from datasets import Dataset
    from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, losses, models
    from sentence_transformers import SentenceTransformerTrainingArguments as Arguments

    torch.manual_seed(0)
    transformer = models.Transformer(str(model_folder), max_seq_length=48)
    pooling = models.Pooling(transformer.get_embedding_dimension())
    model = SentenceTransformer(modules=[transformer, pooling], device="cpu")
    trainer = SentenceTransformerTrainer(
        model=model,
        args=Arguments(
            str(output_dir),
            max_steps=8,
            per_device_train_batch_size=8,
            use_cpu=True,
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_dict({"anchor": texts(64, 15, 0), "positive": texts(64, 45, 1)}),
        loss=losses.MultipleNegativesRankingLoss(model),
        callbacks=callbacks,
    )
    trainer.train()
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


@pytest.mark.filterwarnings("default")  # warnings of the package's own renamed modules
def test_both_columns_have_their_plans_and_the_losses_are_those_without_us(model_folder, tmp_path):
    callback = AdaccCallback(memory_budget=0.4, actions=("retain", "recompute"), min_compress_bytes=0)
    plain = train(model_folder, tmp_path / "plain", [])
    assert train(model_folder, tmp_path / "ours", [callback]) == plain
    assert len(callback.policy.blocks) == 2 * 3
    assert callback.policy.predicted_overhead_ms > 0  # some activations were recomputed
