"""Table that compares training methods: as text, as Markdown, and as JSON with the settings and versions."""

from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from recipe_arguments import RecipeArguments

from adacc_hf.artifacts.files import write_json
from adacc_hf.artifacts.units import format_bytes
from adacc_hf.reports.run_record import Settings, Spread, make_record, markdown_table

PEAK = "peak of the step"
"""Heading of the column with the peak over a whole training step. The report's table of predictions uses it too."""


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
            PEAK: format_bytes(self.step_peak_bytes),
            "tokens/s relative to plain": self.relative_throughput.text(2),
            "final training loss": f"{self.final_train_loss:.4f}",
            "validation loss": f"{self.validation_loss:.4f}",
        }

    def report_cells(self) -> dict[str, str]:
        """Return the formatted cells for a report, which shows only one of the peaks: the peak of the step."""
        return {name: cell for name, cell in self.cells().items() if name == PEAK or not name.startswith("peak of")}

    def numbers(self) -> dict[str, float]:
        """Return the numbers of this row, by column name."""
        return {
            "activation_bytes": self.activation_bytes,
            "peak_bytes": self.peak_bytes,
            "step_peak_bytes": self.step_peak_bytes,
            "relative_throughput": self.relative_throughput.median,
            "final_train_loss": self.final_train_loss,
            "validation_loss": self.validation_loss,
        }


def table_text(rows: list[ComparisonRow]) -> str:
    """Return the comparison as a Markdown table with aligned columns, which is readable in a terminal too."""
    return markdown_table([row.cells() for row in rows])


def save_comparison(rows: list[ComparisonRow], folder: Path, args: RecipeArguments) -> None:
    """Write comparison.md and comparison.json into `folder`. The JSON file is in the format of records of `adacc
    eval`."""
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
    note = f"{_conditions(args, record['meta_info']['device'])}. Tokens/s: median (20th to 80th percentile) of whole "
    note += "training steps, with the methods in turn."
    write_json(settings.output, record)
    (folder / "comparison.md").write_text(f"{table_text(rows)}\n\n{note}\n", encoding="utf-8")


def _conditions(args: RecipeArguments, device: str) -> str:
    training = args.training
    return (
        f"{args.model.model} on {args.data.dataset}, {training.max_steps} steps of "
        f"{training.per_device_train_batch_size} sequences, seed {training.seed}, {device}, "
        f"{torch.get_num_threads()} threads, torch {torch.__version__}"
    )
