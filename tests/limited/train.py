"""Train one small model with the Trainer in a metered process, and print the peak of each phase as JSON.

python tests/memory_meter --limit 12MiB tests/limited/train.py gpt2 --budget 12582912
"""

import argparse
import json
import logging
import tempfile
from typing import Any

import numpy as np
import torch
from memory_meter import MemoryMeter
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
)

from adacc_hf import AdaccCallback, InfeasibleBudgetError

STEPS = 8
"""Two steps before there is a policy, two steps that are recorded under the policy, and some more."""
FIRST_STEPS = 2
"""Steps with profiling, which runs during the first or at the end of the second step."""
TOKENS, WORDS = 128, 512
IMAGE = 64


def gpt2() -> PreTrainedModel:
    return GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=64, n_head=4, n_positions=TOKENS, vocab_size=WORDS))


def llama() -> PreTrainedModel:
    sizes = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 4, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, max_position_embeddings=TOKENS, **sizes))


def t5() -> PreTrainedModel:
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}
    return T5ForConditionalGeneration(T5Config(vocab_size=WORDS, decoder_start_token_id=0, **sizes))


def vit() -> PreTrainedModel:
    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
    return ViTForImageClassification(ViTConfig(image_size=IMAGE, patch_size=8, num_labels=10, **sizes))


MODELS = {"gpt2": gpt2, "llama": llama, "t5": t5, "vit": vit}


def rows(name: str, samples: int) -> list[dict[str, Any]]:
    """Return the data set as numpy arrays, which the memory meter does not count."""
    generator = np.random.default_rng(0)
    if name == "vit":
        images = generator.standard_normal((samples * STEPS, 3, IMAGE, IMAGE), dtype=np.float32)
        return [{"pixel_values": image, "labels": index % 10} for index, image in enumerate(images)]
    ids = generator.integers(1, WORDS, (samples * STEPS, TOKENS))
    return [{"input_ids": row, "labels": row} for row in ids]


class Phases(TrainerCallback):
    """Peak of live bytes in each phase of a run."""

    def __init__(self) -> None:
        self.peaks: dict[str, int] = {}
        self._num_steps = 0
        self._meter = MemoryMeter()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._note("between steps")  # including profiling

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self._num_steps += 1
        self._note(f"step {self._num_steps}" if self._num_steps <= FIRST_STEPS else "steps")

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._note("between steps")

    def _note(self, phase: str) -> None:
        self.peaks[phase] = max(self.peaks.get(phase, 0), self._meter.peak_bytes)
        self._meter.reset_peak()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--budget", type=int, help="bytes (default: plain training)")
    parser.add_argument("--codecs", action="store_true", help="allow lossy compression, and a chunked head")
    parser.add_argument("--samples", type=int, default=8, help="batch size")
    options = parser.parse_args()
    logging.basicConfig()
    logging.getLogger("adacc_hf").setLevel(logging.INFO)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    actions = ("retain", "compress", "recompute") if options.codecs else ("retain", "recompute")
    adacc = None
    if options.budget is not None:
        adacc = AdaccCallback(memory_budget=options.budget, actions=actions, min_compress_bytes=1024)
    phases = Phases()
    callbacks = [phases] if adacc is None else [adacc, phases]
    record: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder,
            max_steps=STEPS,
            per_device_train_batch_size=options.samples,
            report_to="none",
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
            use_cpu=True,
        )
        model = MODELS[options.model]()
        trainer = Trainer(
            model=model, args=args, train_dataset=rows(options.model, options.samples), callbacks=callbacks
        )
        try:
            trainer.train()
        except InfeasibleBudgetError as error:
            phases.on_train_end()
            record["floor"] = error.smallest_budget_bytes
    logs = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    print(json.dumps({**record, "steps": trainer.state.global_step, "losses": logs, "peaks": phases.peaks}))


main()
