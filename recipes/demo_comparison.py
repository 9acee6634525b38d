"""Comparison of all training methods on the same model, seed and data: one table of memory, speed and losses.

The losses come from one training run per method, one after the other. Bytes and speed are measured afterwards on the
trained models: bytes on one batch, speed on whole training steps. Each round of the timing runs one step of every
method, so that a busy machine slows all methods alike.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from recipe_arguments import RecipeArguments
from text_data import stack_sequences
from training_run import FinishedRun, PreparedRun, save_report, train_once
from transformers import PreTrainedModel

from adacc_hf import apply_policy
from adacc_hf.artifacts.files import write_json
from adacc_hf.artifacts.units import format_bytes
from adacc_hf.price.timing import seconds_of
from adacc_hf.reports.run_record import Settings, Spread, make_record, markdown_table
from adacc_hf.torch_glue.compat import switch_checkpointing
from adacc_hf.torch_glue.memory import StepMemory, measure_step, static_bytes
from adacc_hf.torch_glue.meters import MemoryMeter

Batch = dict[str, torch.Tensor]
WARMUP_ROUNDS, TIMED_ROUNDS = 2, 7


@dataclass(frozen=True, kw_only=True)
class Contender:
    """Training method with its budget, and the folder of its run: one row of the comparison."""

    title: str
    folder: str
    method: str
    memory_budget: str = "auto"


CONTENDERS = (
    Contender(title="plain", folder="plain", method="none"),
    Contender(title="HF gradient checkpointing", folder="checkpointing", method="full"),
    Contender(title="naive quantization", folder="quantization", method="quantization"),
    Contender(title="Adacc at 50 % of plain", folder="adacc-50", method="adacc", memory_budget="0.5"),
    Contender(title="Adacc at 25 % of plain", folder="adacc-25", method="adacc", memory_budget="0.25"),
)
BASELINE = "plain"  # folder of the row that throughput is relative to
REPORTED = "adacc-50"  # folder of the row whose policy the report shows


@dataclass(frozen=True, kw_only=True)
class ComparisonRow:
    """Memory, speed and losses of one training method in the recipe's comparison."""

    title: str
    folder: str
    """Name of the folder of the method's run, inside the folder of the comparison."""
    activation_bytes: int
    """Largest number of bytes of the activations that forward stores for backward."""
    peak_bytes: int
    """Peak of live tensor bytes over forward and backward, including parameters and gradients."""
    step_peak_bytes: int
    """Peak of live tensor bytes over a whole training step, including the optimizer's state. Predicted peaks of
    policies are defined in the same way."""
    relative_throughput: Spread
    """Tokens per second, divided by the tokens per second of plain training in the same round of timing."""
    final_train_loss: float
    validation_loss: float

    def cells(self) -> dict[str, str]:
        """Return the formatted cells of this row, by column heading."""
        return {
            "method": self.title,
            "peak activation bytes": format_bytes(self.activation_bytes),
            "peak of forward and backward": format_bytes(self.peak_bytes),
            "peak of the step": format_bytes(self.step_peak_bytes),
            "tokens/s relative to plain": self.relative_throughput.text(2),
            "final training loss": f"{self.final_train_loss:.4f}",
            "validation loss": f"{self.validation_loss:.4f}",
        }

    def numbers(self) -> dict[str, float]:
        """Return the numbers of this row, by column name."""
        numbers = {name: value for name, value in vars(self).items() if name not in ("title", "folder")}
        return {**numbers, "relative_throughput": self.relative_throughput.median}


def compare_methods(run: PreparedRun) -> dict[str, float]:
    """Train and measure every method of CONTENDERS, print the table, and save it in the run folder. Return the numbers
    of the table as a dict with the keys "<folder>/<column>"."""
    output_dir = Path(run.args.training.output_dir)
    finished = {}
    for contender in CONTENDERS:
        print(f"\nTraining: {contender.title}")
        folder = str(output_dir / contender.folder)
        finished[contender.folder] = train_once(run, contender.method, contender.memory_budget, folder)
    rows = measured_rows(finished, example_batch(run))
    text = save_comparison(rows, output_dir, run.args)
    if run.args.method.report:
        save_report(finished[REPORTED], str(output_dir), [row.cells() for row in rows])
    print(f"\n{text}\n\nsaved in {output_dir}")
    return {f"{row.folder}/{name}": value for row in rows for name, value in row.numbers().items()}


def example_batch(run: PreparedRun) -> Batch:
    """Return a training batch in the Trainer's format: ids and labels [B, T], and the number of labels."""
    training = run.args.training
    batch = stack_sequences(list(run.data.train.take(training.per_device_train_batch_size)))
    batch["num_items_in_batch"] = torch.tensor(batch["labels"][:, 1:].numel())
    return {name: tensor.to(training.device) for name, tensor in batch.items()}


def measured_rows(finished: dict[str, FinishedRun], batch: Batch) -> list[ComparisonRow]:
    """Measure the memory and speed of each finished run. Return the rows of the comparison, in the order of
    CONTENDERS."""
    memory = {folder: step_memory(result, batch) for folder, result in finished.items()}
    step_peaks = {folder: step_peak_bytes(result, batch) for folder, result in finished.items()}
    throughput = relative_throughput(finished, batch)
    return [
        ComparisonRow(
            title=contender.title,
            folder=contender.folder,
            activation_bytes=memory[contender.folder].stored_bytes,
            peak_bytes=memory[contender.folder].peak_bytes,
            step_peak_bytes=step_peaks[contender.folder],
            relative_throughput=throughput[contender.folder],
            final_train_loss=finished[contender.folder].metrics["final_train_loss"],
            validation_loss=finished[contender.folder].metrics["eval_loss"],
        )
        for contender in CONTENDERS
    ]


def step_memory(result: FinishedRun, batch: Batch) -> StepMemory:
    """Measure the bytes of one forward and backward of a trained model, after warm-up steps."""
    with training_method(result) as model:
        for _ in range(WARMUP_ROUNDS):
            model(**batch).loss.backward()
            model.zero_grad(set_to_none=True)
        return measure_step(model, batch)


def step_peak_bytes(result: FinishedRun, batch: Batch) -> int:
    """Measure the peak of live bytes over a whole training step with AdamW, after warm-up steps."""
    with training_method(result) as model:
        optimizer = adamw(model)
        step = training_step(model, batch, optimizer)
        for _ in range(WARMUP_ROUNDS):  # the first step allocates the optimizer's state
            step()
        live_bytes = static_bytes(model, batch, optimizer)
        with MemoryMeter.for_device(batch["input_ids"].device) as meter:
            meter.mark(("step",))
            step()
        return live_bytes + meter.peak_bytes


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
        steps = {name: training_step(model, batch, adamw(model)) for name, model in models.items()}
        device = batch["input_ids"].device
        rounds = [
            {name: seconds_of(step, device) for name, step in steps.items()}
            for _ in range(WARMUP_ROUNDS + TIMED_ROUNDS)
        ]
    timed = rounds[WARMUP_ROUNDS:]
    return {name: Spread.of([seconds[BASELINE] / seconds[name] for seconds in timed]) for name in finished}


def adamw(model: PreTrainedModel) -> torch.optim.Optimizer:
    """Return the AdamW optimizer with which the comparison measures training steps."""
    return torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)


def training_step(model: PreTrainedModel, batch: Batch, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Return a function that runs one training step: forward, backward, and optimizer step."""

    def step() -> None:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def save_comparison(rows: list[ComparisonRow], folder: Path, args: RecipeArguments) -> str:
    """Write comparison.md and comparison.json into `folder`, and return the table. The JSON file is in the format of
    records of `adacc eval`."""
    settings = Settings(
        runner="demo_comparison",
        seed=args.training.seed,
        threads=torch.get_num_threads(),
        device=args.training.device.type,
        output=folder / "comparison.json",
    )
    run_info = {"model": asdict(args.model), "data": asdict(args.data), "training": args.training.to_sanitized_dict()}
    points = {row.folder: asdict(row) for row in rows}
    record = make_record(settings, run_info, {"points": points}, "complete")
    training = args.training
    note = (
        f"{args.model.model} on {args.data.dataset}, {training.max_steps} steps of "
        f"{training.per_device_train_batch_size} sequences, seed {training.seed}, {record['meta_info']['device']}, "
        f"{torch.get_num_threads()} threads, torch {torch.__version__}. Tokens/s: median (20th to 80th percentile) of "
        f"whole training steps, with the methods in turn."
    )
    write_json(settings.output, record)
    text = markdown_table([row.cells() for row in rows])
    (folder / "comparison.md").write_text(f"{text}\n\n{note}\n", encoding="utf-8")
    return text
