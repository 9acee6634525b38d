r"""Train the same model with the same seed and data by every method, and print one table of memory, speed and losses.

    accelerate launch --num_processes 1 recipes/demo_comparison.py --output_dir runs/demo

The settings are those of gpt2_pile.py. The losses come from one training run per method, one after the other. Bytes and
speed are measured afterwards on the trained models. Each round of the timing runs one step of every method, so that a
busy machine slows all methods alike.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from gpt2_pile import FinishedRun, PreparedRun, exit_status, prepare_run, save_report, train_once
from text_data import stack_sequences
from transformers import PreTrainedModel

from adacc_hf import apply_policy
from adacc_hf.artifacts.files import write_json
from adacc_hf.artifacts.units import format_bytes
from adacc_hf.price.timing import seconds_of
from adacc_hf.reports.run_record import Settings, Spread, make_record, markdown_table
from adacc_hf.torch_glue.compat import switch_checkpointing
from adacc_hf.torch_glue.memory import measure_step

Batch = dict[str, torch.Tensor]
WARMUP_ROUNDS, TIMED_ROUNDS = 2, 7
CONTENDERS = {
    "plain": ("plain", "none", "auto"),
    "checkpointing": ("HF gradient checkpointing", "full", "auto"),
    "quantization": ("naive quantization", "quantization", "auto"),
    "adacc-50": ("Adacc at 50 % of plain", "adacc", "0.5"),
    "adacc-25": ("Adacc at 25 % of plain", "adacc", "0.25"),
}
"""Methods of the comparison, by the folder of their run: (title, --method, --memory_budget)."""
BASELINE = "plain"  # folder of the row that throughput is relative to
REPORTED = "adacc-50"  # folder of the row whose policy the report shows


@dataclass(frozen=True, kw_only=True)
class ComparisonRow:
    """Memory, speed and losses of one training method."""

    title: str
    activation_bytes: int
    """Largest number of bytes of the activations that forward stores for backward."""
    step_peak_bytes: int
    """Peak of live tensor bytes over a step, including the optimizer's state, as policies predict it."""
    relative_throughput: Spread
    """Tokens per second, divided by the tokens per second of plain training in the same round of timing."""
    final_train_loss: float
    validation_loss: float

    def cells(self) -> dict[str, str]:
        """Return the formatted cells of this row, by column heading."""
        return {
            "method": self.title,
            "peak activation bytes": format_bytes(self.activation_bytes),
            "peak of the step": format_bytes(self.step_peak_bytes),
            "tokens/s relative to plain": self.relative_throughput.text(2),
            "final training loss": f"{self.final_train_loss:.4f}",
            "validation loss": f"{self.validation_loss:.4f}",
        }


def main(argv: list[str] | None = None) -> dict[str, ComparisonRow]:
    """Train and measure every method of CONTENDERS, print the table, and save it in the run folder. Return the rows by
    the folder of their run."""
    run = prepare_run(sys.argv[1:] if argv is None else argv)
    if run.training.world_size > 1 or run.training.resume_from_checkpoint is not None:
        raise ValueError(
            "every method is trained from the start in one process: launch with --num_processes 1, and drop "
            "--resume_from_checkpoint"
        )
    output_dir = Path(run.training.output_dir)
    finished = {}
    for folder, (title, method, budget) in CONTENDERS.items():
        print(f"\nTraining: {title}")
        finished[folder] = train_once(run, method, budget, str(output_dir / folder))
    rows = measured_rows(finished, example_batch(run))
    text = save_comparison(rows, output_dir, run)
    if run.args.report:
        save_report(finished[REPORTED], str(output_dir), [row.cells() for row in rows.values()])
    print(f"\n{text}\n\nsaved in {output_dir}")
    return rows


def example_batch(run: PreparedRun) -> Batch:
    """Return a training batch in the Trainer's format: ids and labels [B, T], and the number of labels."""
    batch = stack_sequences(list(run.data.train.take(run.training.per_device_train_batch_size)))
    batch["num_items_in_batch"] = torch.tensor(batch["labels"][:, 1:].numel())
    return {name: tensor.to(run.training.device) for name, tensor in batch.items()}


def measured_rows(finished: dict[str, FinishedRun], batch: Batch) -> dict[str, ComparisonRow]:
    """Measure the memory and speed of each finished run, and return the rows of the comparison."""
    memory = {}
    for folder, result in finished.items():
        with training_method(result) as model:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
            for _ in range(WARMUP_ROUNDS):  # the first step allocates the optimizer's state
                training_step(model, batch, optimizer)()
            memory[folder] = measure_step(model, batch, optimizer)
    throughput = relative_throughput(finished, batch)
    return {
        folder: ComparisonRow(
            title=CONTENDERS[folder][0],
            activation_bytes=memory[folder].stored_bytes,
            step_peak_bytes=memory[folder].peak_bytes,
            relative_throughput=throughput[folder],
            final_train_loss=result.metrics["final_train_loss"],
            validation_loss=result.metrics["eval_loss"],
        )
        for folder, result in finished.items()
    }


@contextmanager
def training_method(result: FinishedRun) -> Iterator[PreTrainedModel]:
    """Put a trained model into training mode, and train it as in its run, inside the `with` block. The model runs under
    its policy, under gradient checkpointing, or plainly."""
    model = result.model
    model.train()
    model.zero_grad(set_to_none=True)
    if result.callback is not None:
        with apply_policy(model, result.callback.policy):
            yield model
    elif result.checkpointed:
        switch_checkpointing(model, on=True)
        yield model
        switch_checkpointing(model, on=False)
    else:
        yield model


def relative_throughput(finished: dict[str, FinishedRun], batch: Batch) -> dict[str, Spread]:
    """Return each method's tokens per second, divided by the tokens per second of plain training in the same round."""
    with ExitStack() as stack:
        models = {name: stack.enter_context(training_method(result)) for name, result in finished.items()}
        optimizers = {name: torch.optim.AdamW(m.parameters(), lr=1e-5, fused=True) for name, m in models.items()}
        steps = {name: training_step(model, batch, optimizers[name]) for name, model in models.items()}
        device = batch["input_ids"].device
        rounds = [
            {name: seconds_of(step, device) for name, step in steps.items()}
            for _ in range(WARMUP_ROUNDS + TIMED_ROUNDS)
        ]
    timed = rounds[WARMUP_ROUNDS:]
    return {name: Spread.of([seconds[BASELINE] / seconds[name] for seconds in timed]) for name in finished}


def training_step(model: PreTrainedModel, batch: Batch, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Return a function that runs one training step: forward, backward, and optimizer step."""

    def step() -> None:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def save_comparison(rows: dict[str, ComparisonRow], folder: Path, run: PreparedRun) -> str:
    """Write comparison.md and comparison.json into `folder`, and return the table. The JSON file is in the format of
    records of `adacc eval`."""
    training = run.training
    settings = Settings(
        runner="demo_comparison",
        seed=training.seed,
        threads=torch.get_num_threads(),
        device=training.device.type,
        output=folder / "comparison.json",
    )
    run_info = {"recipe": asdict(run.args), "training": training.to_sanitized_dict()}
    points = {name: asdict(row) for name, row in rows.items()}
    record = make_record(settings, run_info, {"points": points}, "complete")
    note = (
        f"{run.args.model} on {run.args.dataset}, {training.max_steps} steps of "
        f"{training.per_device_train_batch_size} sequences, seed {training.seed}, {record['meta_info']['device']}, "
        f"{torch.get_num_threads()} threads, torch {torch.__version__}. Tokens/s: median (20th to 80th percentile) of "
        f"whole training steps, with the methods in turn."
    )
    write_json(settings.output, record)
    text = markdown_table([row.cells() for row in rows.values()])
    (folder / "comparison.md").write_text(f"{text}\n\n{note}\n", encoding="utf-8")
    return text


if __name__ == "__main__":
    sys.exit(exit_status(main))
