"""The paper's Table 4 (arXiv 2508.00806): zero-shot accuracy in percent after training on the Pile."""

from __future__ import annotations

from adacc_hf.reports.run_record import markdown_table

PAPER_METHODS = {
    "none": "Baseline",
    "quantization": "Quantization",
    "adacc": "Adacc",
    "adacc_no_outlier": "Adacc w/o outlier",
}
"""The paper's titles by our method names. The paper has no row for full checkpointing, which changes no gradient."""

PAPER_COLUMNS = ("lambada_openai", "arc_easy", "sciq", "swag", "Ave.")

PAPER_TABLE4: dict[tuple[str, int], dict[str, tuple[float | None, ...]]] = {
    ("117M", 32): {
        "none": (53.46, 39.56, 71.80, 37.46, 50.57),
        "quantization": (2.77, 25.08, None, 24.66, 13.13),
        "adacc": (53.13, 39.1, 70.80, 37.22, 50.06),
        "adacc_no_outlier": (53.03, 39.18, 69.90, 36.98, 49.77),
    },
    ("117M", 64): {
        "none": (54.76, 42.05, 72.60, 38.19, 51.90),
        "quantization": (3.14, 25.08, None, 24.66, 13.22),
        "adacc": (54.82, 41.04, 71.80, 38.09, 51.44),
        "adacc_no_outlier": (54.7, 39.77, 71.80, 38.09, 51.03),
    },
    ("345M", 8): {
        "none": (56.97, 42.85, 72.50, 39.49, 52.95),
        "quantization": (43.1, 25.08, None, 24.66, 23.21),
        "adacc": (56.29, 42.55, 72.70, 39.26, 52.7),
        "adacc_no_outlier": (56.06, 41.79, 71.60, 39.12, 52.14),
    },
    ("345M", 16): {
        "none": (58.06, 44.65, 76.20, 40.88, 54.95),
        "quantization": (50.45, 25.08, None, 24.65, 25.05),
        "adacc": (57.67, 44.53, 76.60, 40.79, 54.90),
        "adacc_no_outlier": (57.32, 43.77, 75.10, 40.17, 54.09),
    },
}
"""Accuracies by model and batch size, in the order of PAPER_COLUMNS. None where the paper prints a dash.

The paper's mean counts a dash as 0.
"""


def paper_figures() -> dict[str, dict[str, dict[str, float | None]]]:
    """Return the paper's table for a record: by model and batch size, by method, by column."""
    return {
        f"{size}, batch {batch}": {
            method: dict(zip(PAPER_COLUMNS, values, strict=True)) for method, values in methods.items()
        }
        for (size, batch), methods in PAPER_TABLE4.items()
    }


def paper_table_text() -> str:
    """Return the paper's table as Markdown."""
    return markdown_table(
        [
            {"paper": f"{size}, batch {batch}, {PAPER_METHODS[method]}"}
            | {
                name: "-" if value is None else f"{value:.2f}"
                for name, value in zip(PAPER_COLUMNS, values, strict=True)
            }
            for (size, batch), methods in PAPER_TABLE4.items()
            for method, values in methods.items()
        ]
    )
