"""Does `make test` notice? Breaks the product in 30 places, one at a time, and runs the fast tests on each.

    python tests/breakages [NUMBER ...]

Each break is made in a copy of the package, which stands before the installed one. The tests of the broken file's room
run first, then all fast ones; the first failure ends it. Exits with 1 if fewer than 90 % of the breaks are noticed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENOUGH = 0.9

BREAKS: list[tuple[str, str, str]] = [
    # What a step takes, and which policies keep to a budget.
    ("adacc_hf/artifacts/memory_simulator.py", "outside + self.live_bytes, loss", "outside, loss"),
    ("adacc_hf/artifacts/block_walk.py", "get(root, -1), releases.get(slot, math.inf))", "get(root, -1), 0)"),
    ("adacc_hf/artifacts/block_walk.py", "sorted(operators - replayed)", "sorted(operators)"),
    ("adacc_hf/artifacts/size_model.py", "math.ceil(math.log(size", "math.floor(math.log(size"),
    ("adacc_hf/artifacts/config.py", "* (1 - config.memory_margin)", "* (1 + config.memory_margin)"),
    ("adacc_hf/solve/search.py", "_stored_bytes(least) > budget.nbytes", "_stored_bytes(least) >= budget.nbytes"),
    ("adacc_hf/solve/solver.py", "least = min(errors", "least = max(errors"),
    # What is measured.
    ("adacc_hf/price/kind_profile_builder.py", "if error > DEGRADED_ERROR}", "if error > 1e9}"),
    (
        "adacc_hf/price/kind_profile_builder.py",
        "max(block.outliers.get(value, 0) for",
        "min(block.outliers.get(value, 0) for",
    ),
    (
        "adacc_hf/price/cost_model.py",
        "point.max_bytes - point.live_bytes - results",
        "point.max_bytes - point.live_bytes",
    ),
    ("adacc_hf/price/codec_selection.py", "record.nbytes < config.min_compress_bytes", "record.nbytes < 1"),
    ("adacc_hf/price/profiler.py", "(gradient_accumulation_steps - 1 +", "(gradient_accumulation_steps +"),
    ("adacc_hf/price/optimizer_memory.py", "sum(len(slots) * optimizer_copy", "sum(optimizer_copy"),
    ("adacc_hf/torch_glue/memory.py", "maximum = max(maximum, live)", "maximum = live"),
    # What is recorded, replayed and compared.
    ("adacc_hf/tape/replay_check.py", "return same_bits(replayed, recorded)", "return True"),
    (
        "adacc_hf/tape/replay.py",
        "environment[old] = copy_with_storage(at_hand[old])",
        "environment[old] = at_hand[old]",
    ),
    ("adacc_hf/tape/symbolic_tape.py", "if before not in (None, digest):", "if False:"),
    ("adacc_hf/tape/tape_cache.py", "self._refused.setdefault(symbolic_tape.base.structure, set()).update(values)", "pass"),
    ("adacc_hf/run/policy_handle.py", "self._chunk_head(head is not None and head.is_on)", "self._chunk_head(False)"),
    ("adacc_hf/head/chunked_loss.py", "total / (target != ignore_index).sum()", "total / target.numel()"),
    ("adacc_hf/head/chunked_loss.py", "padded[:, classes:] = -torch.inf", "padded[:, classes:] = 0.0"),
    ("adacc_hf/artifacts/profile.py", "return self.head_ms - plain_ms", "return max(0.0, self.head_ms - plain_ms)"),
    # Codecs.
    ("kernels/_symmetric.py", "(magnitude >= TINY_PEAK) &", ""),
    ("kernels/_symmetric.py", "codes[:half] | (codes[half:] << 4)", "codes[half:] | (codes[:half] << 4)"),
    # A run.
    ("adacc_hf/adapt/oom_retry.py", "return int(TIGHTER * min(", "return int(min("),
    ("adacc_hf/adapt/oom_retry.py", "            parameter.grad = gradient\n", "            pass\n"),
    ("adacc_hf/adapt/policy_selection.py", "if gain <= MIN_GAIN * now_ms:", "if gain <= 0:"),
    ("adacc_hf/adapt/diverged_batches.py", "2 * self._num_diverged >", "self._num_diverged >"),
    ("adacc_hf/adapt/full_recompute.py", "if all(gather_from_all_ranks(not skipped_blocks)):", "if True:"),
    # Annexes.
    ("adacc_hf/compiler/knapsack.py", "[(x, -ms) for x, ms", "[(x, ms) for x, ms"),
    ("adacc_hf/compiler/compress_pass.py", ".permute(back),)", ",)"),
    ("adacc_hf/estimate/planning.py", "fits = peak_bytes <= self.request.budget", "fits = True"),
]
"""File, what stands there once, and what is put in its place."""


def main() -> int:
    chosen = [int(text) for text in sys.argv[1:]] or range(1, len(BREAKS) + 1)
    with tempfile.TemporaryDirectory() as folder:
        copy_package(folder)
        failed = first_failure("tests", folder)
    if failed is not None:
        raise SystemExit(f"{failed} fails without any break")
    noticed = [is_noticed(number) for number in chosen]
    print(f"{sum(noticed)} of {len(noticed)} breaks are noticed by the fast tests")
    return 0 if sum(noticed) >= ENOUGH * len(noticed) else 1


def is_noticed(number: int) -> bool:
    path, old, new = BREAKS[number - 1]
    with tempfile.TemporaryDirectory() as folder:
        broken = copy_package(folder) / path.removeprefix("adacc_hf/")
        text = broken.read_text(encoding="utf-8")
        if text.count(old) != 1:
            raise SystemExit(f"break {number}: {old!r} is {text.count(old)} times in {path}, not once: take another")
        broken.write_text(text.replace(old, new), encoding="utf-8")
        for tests in (_room(path), "tests"):
            failed = first_failure(tests, folder)
            if failed is not None:
                print(f"{number:2}. {path}: {old.strip()[:60]!r}: noticed by {failed}", flush=True)
                return True
    print(f"{number:2}. {path}: {old.strip()[:60]!r}: NOT NOTICED", flush=True)
    return False


def copy_package(folder: str) -> Path:
    """A copy of the package in `folder`, with the recipes beside it."""
    package = Path(folder) / "adacc_hf"
    parts = {"adacc_hf": ".", "callbacks": "callbacks", "kernels": "kernels", "eval": "eval", "recipes": "../recipes"}
    for part, place in parts.items():
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / part, package / place, ignore=ignored, dirs_exist_ok=True)
    return package


def _room(path: str) -> str:
    return str(Path("tests") / Path(path).parent)


def first_failure(tests: str, folder: str) -> str | None:
    """The first of the fast tests in `tests` that fails with `folder` first on the path; None if none does."""
    environment = {**os.environ, "PYTHONPATH": folder, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", "-m", "pytest", "-x", "-q", "-n", "2", "--dist", "worksteal", "--tb", "no"]
    done = subprocess.run(
        [*command, "-m", "not slow and not gpu and not others", tests],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode == 0:
        return None
    failed = [line.split()[1] for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0] if failed else f"pytest, which ended with {done.returncode}"


if __name__ == "__main__":
    sys.exit(main())
