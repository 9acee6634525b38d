"""The `adacc` command: plan runs, look into policy files, report on them, list the codecs, measure."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from adacc_hf import __version__, cli_eval, cli_plan, cli_policy, cli_profiles
from adacc_hf.errors import AdaccError
from adacc_hf.units import format_bytes

USER_ERROR = 2
"""Exit status for what the user can mend; argparse's own."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0, or 2 after a one-line message on stderr."""
    arguments = _parser().parse_args(argv)
    try:
        if arguments.command == "eval":
            return cli_eval.run(arguments)
        _print(arguments.run(arguments))
    except BrokenPipeError:  # the reader, `head` say, has seen enough; the interpreter must not flush to it at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (AdaccError, ValueError, OSError) as error:
        return _refuse(arguments.command, error)
    except ImportError as error:
        if error.name != "matplotlib":
            raise  # a fault of this package, not a missing extra
        return _refuse(arguments.command, error)
    return 0


def _print(text: str) -> None:
    """Print `text`; where stdout has no letter of its encoding for one in a path, say, escape it as stderr does."""
    try:
        print(text, flush=True)
    except UnicodeEncodeError as error:
        print(text.encode(error.encoding, "backslashreplace").decode(error.encoding), flush=True)


def _refuse(command: str, error: Exception) -> int:
    print(f"adacc {command}: error: {' '.join(str(error).split())}", file=sys.stderr)
    return USER_ERROR


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="adacc", description=__doc__)
    parser.add_argument("--version", action="version", version=f"adacc_hf {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    cli_policy.add_parsers(commands)
    cli_plan.add_parser(commands)
    cli_profiles.add_parser(commands)

    codecs = commands.add_parser("codecs", help="list the codecs, with the bytes that they keep of a tensor")
    codecs.set_defaults(run=_codecs)

    cli_eval.add_parser(commands)
    return parser


def _codecs(_: argparse.Namespace) -> str:
    """One line per codec: name, whether it is lossless, the share of a tensor's bytes that it keeps, its options."""
    import torch

    from adacc_hf.kernels.codecs import get_codec, list_codecs

    shape, dtype = (8, 1024, 1024), torch.float32
    plain_bytes = 8 * 1024 * 1024 * dtype.itemsize
    lines = [f"kept bytes are of a float32 tensor of 8 x 1024 x 1024 ({format_bytes(plain_bytes)})"]
    for name in list_codecs():
        codec = get_codec(name)
        share = f"{100 * codec.predicted_bytes(shape, dtype) / plain_bytes:.1f} %"
        options = ", ".join(f"{option}={value!r}" for option, value in codec.options.items())
        lines.append(f"{name:16} {'lossless' if codec.lossless else 'lossy':8} {share:>7}  {options or 'no options'}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
