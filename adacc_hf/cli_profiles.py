"""`adacc profiles`: what the database of profiles holds."""

from __future__ import annotations

import argparse
from typing import Any

from adacc_hf.profiling.profile_store import VARIABLE, ProfileStore, Row
from adacc_hf.units import format_bytes


def add_parser(commands: Any) -> None:
    """Add `profiles` to the commands of `adacc`."""
    parser = commands.add_parser(
        "profiles",
        help="list, show or clear the prices that profiling keeps",
        description=f"File: profiles.sqlite3 in $XDG_CACHE_HOME/adacc_hf, or in ~/.cache/adacc_hf; ${VARIABLE} names "
        "another.",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    actions.add_parser("list", help="one line per profiled tape, the newest first").set_defaults(run=_list)
    show = actions.add_parser("show", help="the prices of one tape")
    show.add_argument("name", help="its name in the list, or the beginning of it")
    show.set_defaults(run=_show)
    actions.add_parser("clear", help="remove all; sets aside a file that cannot be read").set_defaults(run=_clear)


def _list(_: argparse.Namespace) -> str:
    store = ProfileStore()
    rows = store.list()
    if not rows:
        return f"no profiles in {store.path}"
    return "\n".join(_line(row) for row in rows)


def _line(row: Row) -> str:
    operators = row.prices["operators"]
    total_ms = sum(operator["ms"] for operator in operators)
    return (
        f"{row.key.name}  {row.block_class:24} {len(operators):4} operators {total_ms:10.3f} ms  {row.key.dtype}  "
        f"{row.key.device}  torch {row.key.torch}  {row.created}"
    )


def _show(arguments: argparse.Namespace) -> str:
    row = ProfileStore().find(arguments.name)
    lines = [_line(row), f"tape {row.key.tape}, shapes {row.key.shapes}, settings {row.key.settings}", "operators"]
    lines += [f"  {operator['ms']:10.4f} ms  {operator['name']}" for operator in row.prices["operators"]]
    lines.append("activations")
    for activation in row.prices["activations"]:
        lines.append(f"  {format_bytes(activation['nbytes']):>12}  {activation['name']}")
        lines += [
            f"    {option['codec']}: {format_bytes(option['nbytes'])}, encode {option['encode_ms']:.4f} ms, decode "
            f"{option['decode_ms']:.4f} ms, error {option['error']:.4f}"
            for option in activation["codecs"]
        ]
    return "\n".join(lines)


def _clear(_: argparse.Namespace) -> str:
    store = ProfileStore()
    removed = store.clear()
    if removed is None:
        return f"moved {store.path}, which could not be read, to {store.aside}"
    return f"removed {removed} profiles from {store.path}"
