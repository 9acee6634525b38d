"""Train on real lengths of samples within a memory limit: with batches by bytes, and with the largest fixed batches.

python tests/batches                                          # 2,000 steps by bytes; the allocator refuses memory above
python tests/batches --lengths chats.txt --steps 200 --fixed  # also the largest fixed batches, with a table of speeds
"""

import argparse
import multiprocessing
import os
import random
import sys
import tempfile
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "memory_meter"))

from memory_meter import MemoryMeter, environment

FOLDER = Path(__file__).resolve().parent
OFFLINE = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
SAMPLES = 16
"""Samples of an optimizer step."""


def start_metered() -> None:
    """Replace this process by one with the memory meter preloaded."""
    settings = environment() | OFFLINE
    if any(os.environ.get(name) != value for name, value in settings.items()):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **settings})
    del os.environ["LD_PRELOAD"]


def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a batch that is padded to the longest of `rows`."""
    import torch

    ids = torch.zeros(len(rows), max(row["length"] for row in rows), dtype=torch.long)
    for number, row in enumerate(rows):
        ids[number, : row["length"]] = torch.arange(row["length"]) % 63 + 1
    mask = (ids != 0).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def train(lengths: list[int], steps: int, width: int, limit: int, batch_size: int, method: str) -> dict[str, Any]:
    """Train in this process with fixed batches under "checkpointing" or "adacc", or "by bytes". Return peaks, CPU
    seconds, and numbers of samples and padded tokens of each step."""
    import torch
    import transformers
    from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback

    from adacc_hf import AdaccCallback

    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    meter, record = MemoryMeter(), {"peaks": [], "seconds": [], "samples": [], "padded": [], "error": None}
    batches: list[tuple[int, int]] = []

    class Recorder(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.begin = time.process_time()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            record["seconds"].append(time.process_time() - self.begin)
            record["peaks"].append(meter.peak_bytes)
            record["samples"].append([number for number, _ in batches])
            record["padded"].append(sum(number * length for number, length in batches))
            batches.clear()
            meter.reset_peak()

    class Watched(transformers.Trainer):
        def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            batches.append(tuple(inputs["input_ids"].shape))
            return super().compute_loss(model, inputs, *args, **kwargs)

    sizes = {"num_hidden_layers": 4, "hidden_size": width, "intermediate_size": 3 * width, "num_attention_heads": 4}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, pad_token_id=0, max_position_embeddings=4096, **sizes))
    callbacks: list[Any] = [Recorder()]
    if method != "checkpointing":
        settings = {"memory_budget": limit, "exact": True, "batch_by_bytes": method == "by bytes"}
        callbacks.insert(0, AdaccCallback(**settings))
    draw = random.Random(0)
    order = draw.sample(lengths, len(lengths))
    while len(order) < steps * SAMPLES:
        order += draw.sample(lengths, len(lengths))
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder,
            max_steps=steps,
            per_device_train_batch_size=batch_size,
            gradient_accumulation_steps=SAMPLES // batch_size,
            activation_checkpointing=method == "checkpointing",
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            logging_steps=10**6,
            disable_tqdm=True,
            dataloader_pin_memory=False,
            remove_unused_columns=False,
        )
        dataset = [{"input_ids": range(length), "length": length} for length in order[: steps * SAMPLES]]
        trainer = Watched(model, arguments, collate, dataset, callbacks=callbacks)
        trainer.remove_callback(transformers.PrinterCallback)
        meter.limit(limit)
        meter.reset_peak()
        try:
            trainer.train()
        except Exception as error:
            import traceback

            traceback.print_exc()
            record["error"] = f"{type(error).__name__}: {error}"
    record["refusals"] = meter.num_refusals
    record["tokens"] = [sum(order[n * SAMPLES : (n + 1) * SAMPLES]) for n in range(len(record["peaks"]))]
    return record


def train_in_child(*args: Any, **kwargs: Any) -> dict[str, Any]:
    """Run `train` in a forked process, which has the modules of this one and none of its tensors."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
        return pool.submit(train, *args, **kwargs).result()


def largest_fixed(method: str, *run: Any) -> tuple[int, dict[str, Any]] | None:
    """Return the largest fixed batch that trains on all steps, with its record, or None."""
    for size in (16, 8, 4, 2, 1):
        record = train_in_child(*run, size, method)
        if record["error"] is None:
            return size, record
    return None


def line(name: str, record: dict[str, Any], limit: int) -> str:
    """Return a row of the table. Speeds are of the second half of the steps, after profiles and solver runs."""
    half = len(record["peaks"]) // 2
    speed = sum(record["tokens"][half:]) / sum(record["seconds"][half:])
    samples = [number for step in record["samples"][half:] for number in step]
    padding = 1 - sum(record["tokens"][half:]) / sum(record["padded"][half:])
    above = sum(peak > limit for peak in record["peaks"])
    return (
        f"| {name} | {len(record['peaks'])} | {min(samples)} to {max(samples)} | {padding:.0%} | "
        f"{max(record['peaks']) / limit:.3f} | {above} | {record['refusals']} | {speed:.0f} |"
    )


def main() -> None:
    start_metered()
    warnings.filterwarnings("ignore")
    import adacc_hf.callbacks.adacc  # noqa: F401  the children have it too

    parser = argparse.ArgumentParser(prog="python tests/batches", description=__doc__.partition("\n")[0])
    parser.add_argument("--lengths", default="docstrings.txt", help="file with the lengths of samples in this folder")
    parser.add_argument("--longest", type=int, default=512, help="longer samples are truncated")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--width", type=int, default=32, help="hidden size of the model")
    parser.add_argument("--limit", type=int, default=6 * 2**20, help="bytes that the allocator gives in total")
    parser.add_argument("--fixed", action="store_true", help="also train with the largest fixed batches that train")
    options = parser.parse_args()
    lengths = [min(int(number), options.longest) for number in (FOLDER / options.lengths).read_text().split()]
    run = (lengths, options.steps, options.width, options.limit)
    print("| method | steps | samples | padding | largest peak / limit | steps above | refusals | tokens/s |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|", flush=True)
    for method in ("checkpointing", "adacc") if options.fixed else ():
        found = largest_fixed(method, *run)
        if found is None:
            print(f"| fixed, {method} | no batch trains | | | | | | |", flush=True)
        else:
            print(line(f"fixed, {method}, {found[0]}", found[1], options.limit), flush=True)
    record = train_in_child(*run, 1, "by bytes")
    print(record["error"] or line("by bytes", record, options.limit), flush=True)


if __name__ == "__main__":
    main()
