"""Memory limits from the command line, and Adacc's budget under such a limit."""

from __future__ import annotations

import argparse

from adacc_hf.eval.trials.limits import add_limit, budget_bytes, limit_bytes


def parse(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_limit(parser)
    parser.set_defaults(device="cpu")
    return parser.parse_args(argv)


def test_a_limit_is_a_size() -> None:
    assert limit_bytes(parse("--limit", "16GiB")) == 16 * 2**30
    assert limit_bytes(parse()) == 256 * 2**20


def test_only_a_gpu_needs_a_margin() -> None:
    assert budget_bytes(1000, "cpu") == 1000
    assert budget_bytes(1000, "cuda") == 950
