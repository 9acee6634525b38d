"""The comparison that `make demo` leaves, as a table for readers."""

from __future__ import annotations

from adacc_hf.artifacts.units import format_bytes
from adacc_hf.eval.records.ledger import Ledger
from adacc_hf.reports.run_record import Spread, markdown_table


def report_text(ledger: Ledger) -> str:
    """One line per method, as Markdown."""
    rows = [
        {
            "method": row["title"],
            "stored for backward": format_bytes(row["activation_bytes"]),
            "peak of live bytes": format_bytes(row["peak_bytes"]),
            "tokens/s relative to plain": Spread(**row["relative_throughput"]).text(2),
            "validation loss": f"{row['validation_loss']:.4f}",
        }
        for row in ledger.points.values()
    ]
    return f"{markdown_table(rows)}\n"
