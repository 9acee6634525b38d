"""The comparison as a table: printed, as Markdown, and as JSON with the settings and versions it was made with."""

import json
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers
from recipe_arguments import RecipeArguments

from adacc_hf import __version__
from adacc_hf.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class Spread:
    """The 20th, 50th and 80th percentile of something measured several times."""

    low: float
    median: float
    high: float


@dataclass(frozen=True, kw_only=True)
class ComparisonRow:
    """What one method costs and reaches."""

    title: str
    folder: str
    """The run's folder within the comparison's."""
    activation_bytes: int
    """What forward leaves behind for backward: the peak of stored activations."""
    peak_bytes: int
    """Peak of live tensor bytes over forward and backward, parameters and gradients included."""
    relative_throughput: Spread
    """Tokens per second divided by plain training's, round by round."""
    final_train_loss: float
    validation_loss: float

    def cells(self) -> dict[str, str]:
        """The row as a reader sees it, by column heading."""
        speed = self.relative_throughput
        return {
            "method": self.title,
            "peak activation bytes": format_bytes(self.activation_bytes),
            "peak live tensor bytes": format_bytes(self.peak_bytes),
            "tokens/s relative to plain": f"{speed.median:.2f} ({speed.low:.2f} to {speed.high:.2f})",
            "final training loss": f"{self.final_train_loss:.4f}",
            "validation loss": f"{self.validation_loss:.4f}",
        }

    def numbers(self) -> dict[str, float]:
        """The row's figures by column."""
        return {
            "activation_bytes": self.activation_bytes,
            "peak_bytes": self.peak_bytes,
            "relative_throughput": self.relative_throughput.median,
            "final_train_loss": self.final_train_loss,
            "validation_loss": self.validation_loss,
        }


def table_text(rows: list[ComparisonRow]) -> str:
    """The table as Markdown with aligned columns, which reads well in a terminal too."""
    cells = [row.cells() for row in rows]
    widths = {name: max(len(name), *(len(cell[name]) for cell in cells)) for name in cells[0]}
    # Text to the left, figures to the right.
    align = {name: str.ljust if name == "method" else str.rjust for name in widths}
    lines = [[align[name](name, width) for name, width in widths.items()]]
    lines.append(["-" * width if name == "method" else "-" * (width - 1) + ":" for name, width in widths.items()])
    lines += [[align[name](cell[name], width) for name, width in widths.items()] for cell in cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def save_comparison(rows: list[ComparisonRow], folder: Path, args: RecipeArguments) -> None:
    """Writes comparison.md and comparison.json into `folder`."""
    record = {
        "run_info": {
            "model": asdict(args.model),
            "data": asdict(args.data),
            "training": args.training.to_sanitized_dict(),
        },
        "rows": [asdict(row) for row in rows],
        "meta_info": _meta_info(args),
    }
    note = f"{_conditions(args)}. Tokens/s: median (20th to 80th percentile) of whole training steps taken in turn."
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "comparison.md").write_text(f"{table_text(rows)}\n\n{note}\n", encoding="utf-8")
    (folder / "comparison.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def _conditions(args: RecipeArguments) -> str:
    training = args.training
    return (
        f"{args.model.model} on {args.data.dataset}, {training.max_steps} steps of "
        f"{training.per_device_train_batch_size} sequences, seed {training.seed}, {_meta_info(args)['device']}, "
        f"torch {torch.__version__}"
    )


def _meta_info(args: RecipeArguments) -> dict[str, Any]:
    device = args.training.device
    is_gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if is_gpu else f"{torch.get_num_threads()} CPU threads",
        "adacc_hf": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "accelerate": accelerate.__version__,
        "python": platform.python_version(),
    }
