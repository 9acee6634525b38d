"""Mutation test of `make test`: break the product in about 30 places, one at a time, and run the fast tests on each.

    python tests/breakages [NUMBER ...]

Each break is applied to a copy of the package, which precedes the installed package on the path. The tests of the
broken file's folder run first, then all fast tests, until the first failure. The exit status is 1 if the tests detect
fewer than 90 % of the breaks.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MIN_DETECTED = 0.9

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
    (
        "adacc_hf/price/training_step.py",
        "(self.gradient_accumulation_steps - 1 +",
        "(self.gradient_accumulation_steps +",
    ),
    ("adacc_hf/price/optimizer_memory.py", "sum(len(slots) * optimizer_copy", "sum(optimizer_copy"),
    ("adacc_hf/torch_glue/memory.py", "maximum = max(maximum, live)", "maximum = live"),
    # What is recorded, replayed and compared.
    ("adacc_hf/tape/replay_check.py", "return same_bits(replayed, recorded)", "return True"),
    (
        "adacc_hf/tape/replay.py",
        "environment[old] = copy_with_storage(bases[old])",
        "environment[old] = bases[old]",
    ),
    ("adacc_hf/tape/symbolic_tape.py", "if before not in (None, digest):", "if False:"),
    (
        "adacc_hf/tape/tape_cache.py",
        "self._refused.setdefault(symbolic_tape.base.structure, set()).update(values)",
        "pass",
    ),
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
    ("adacc_hf/adapt/fallback_stats.py", "2 * self._num_diverged >", "self._num_diverged >"),
    (
        "adacc_hf/adapt/phases.py",
        "set().union(*gather_from_all_ranks(installation.skipped_blocks()))",
        "set(installation.skipped_blocks())",
    ),
    # Annexes.
    ("adacc_hf/compiler/knapsack.py", "[(x, -ms) for x, ms", "[(x, ms) for x, ms"),
    ("adacc_hf/compiler/compress_pass.py", ".permute(inverse_order),)", ",)"),
    ("adacc_hf/estimate/planning.py", "fits = peak_bytes <= self.request.budget", "fits = True"),
]
"""(file, text that occurs once in the file, replacement)."""


def main() -> int:
    numbers = [int(text) for text in sys.argv[1:]] or range(1, len(BREAKS) + 1)
    with tempfile.TemporaryDirectory() as folder:
        copy_package(folder)
        failed_test = first_failure("tests", folder)
    if failed_test is not None:
        raise SystemExit(f"{failed_test} fails without any break: fix the test first")
    detected = [is_detected(number) for number in numbers]
    print(f"the fast tests detect {sum(detected)} of {len(detected)} breaks")
    return 0 if sum(detected) >= MIN_DETECTED * len(detected) else 1


def is_detected(number: int) -> bool:
    """Return True if a fast test fails with break `number`."""
    path, old, new = BREAKS[number - 1]
    with tempfile.TemporaryDirectory() as folder:
        file = copy_package(folder) / path.removeprefix("adacc_hf/")
        text = file.read_text(encoding="utf-8")
        if text.count(old) != 1:
            raise SystemExit(
                f"break {number}: {old!r} occurs {text.count(old)} times in {path}, not once: update BREAKS"
            )
        file.write_text(text.replace(old, new), encoding="utf-8")
        for tests in (_test_folder(path), "tests"):
            failed_test = first_failure(tests, folder)
            if failed_test is not None:
                print(f"{number:2}. {path}: {old.strip()[:60]!r}: detected by {failed_test}", flush=True)
                return True
    print(f"{number:2}. {path}: {old.strip()[:60]!r}: NOT DETECTED", flush=True)
    return False


def copy_package(folder: str) -> Path:
    """Copy the package into `folder`, with the recipes next to it, and return the copy's path."""
    package = Path(folder) / "adacc_hf"
    targets = {"adacc_hf": ".", "callbacks": "callbacks", "kernels": "kernels", "eval": "eval", "recipes": "../recipes"}
    for source, target in targets.items():
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / source, package / target, ignore=ignored, dirs_exist_ok=True)
    return package


def _test_folder(path: str) -> str:
    return str(Path("tests") / Path(path).parent)


def first_failure(tests: str, folder: str) -> str | None:
    """Run the fast tests in `tests` with `folder` first on the path. Return the first failed test, or None."""
    environment = {**os.environ, "PYTHONPATH": folder, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", "-m", "pytest", "-x", "-q", "-n", "2", "--dist", "worksteal", "--tb", "no"]
    process = subprocess.run(
        [*command, "-m", "not slow and not gpu and not others", tests],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if process.returncode == 0:
        return None
    failed_tests = [line.split()[1] for line in process.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed_tests[0] if failed_tests else f"pytest, which ended with {process.returncode}"


if __name__ == "__main__":
    sys.exit(main())
