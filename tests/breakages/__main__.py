"""Mutation test of the gate: break the product in 63 places, one at a time, and run the tests on each.

    python tests/breakages [--matrix] [NUMBER ...]

The gate is all tests that `make test-all` runs. Each break is applied to a copy of the package, which precedes the
installed package on the path. The tests of the broken file's folder run first, then the whole gate, until the first
failure. The exit status is 1 if the gate misses a break.

With `--matrix`, matrix.md lists the tests that notice each break. To save time, only the tests of the broken file's
folder and FRONT_DOORS run, all of them. If none of these tests fails, the gate runs until the first failure. A row is
written when its break is done, and the rows of other breaks are kept.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MATRIX = Path(__file__).with_name("matrix.md")
MARKERS = "not nightly and not gpu and not others"
"""Expression for pytest's option -m that selects the tests of the gate, as in `make test-all`."""
FRONT_DOORS = ("tests/adacc_hf/test_exactness.py", "tests/callbacks/test_adacc.py")
"""Tests of the public interface, which run for each row of the matrix."""
MIN_DETECTED = 1.0
NAMES_IN_ROW = 4

BREAKS: list[tuple[str, str, str]] = [
    # What a step takes, and which policies keep to a budget.
    ("adacc_hf/artifacts/memory_simulator.py", "outside + self.live_bytes, loss", "outside, loss"),
    ("adacc_hf/artifacts/block_walk.py", "get(root, -1), releases.get(slot, math.inf))", "get(root, -1), 0)"),
    ("adacc_hf/artifacts/block_walk.py", "sorted(operators - replayed)", "sorted(operators)"),
    ("adacc_hf/artifacts/size_model.py", "math.ceil(math.log(size", "math.floor(math.log(size"),
    ("adacc_hf/artifacts/config.py", "* (1 - config.memory_margin)", "* (1 + config.memory_margin)"),
    ("adacc_hf/solve/search.py", "return budget.nbytes - self._fixed_bytes", "return budget.nbytes"),
    ("adacc_hf/solve/solver.py", "if search.head_ms >= most_ms:", "if search.head_ms < most_ms:"),
    # What is measured.
    ("adacc_hf/price/kind_profile_builder.py", "if error > DEGRADED_ERROR}", "if error > 1e9}"),
    ("adacc_hf/price/kind_profile_builder.py", "max(block.outliers.get(value", "min(block.outliers.get(value"),
    ("adacc_hf/price/cost_model.py", "max_bytes - point.live_bytes - results", "max_bytes - point.live_bytes"),
    ("adacc_hf/price/codec_selection.py", "record.nbytes < config.min_compress_bytes", "record.nbytes < 1"),
    ("adacc_hf/price/batch.py", "gradient_accumulation_steps - 1 +", "gradient_accumulation_steps +"),
    ("adacc_hf/adapt/corrections.py", "if self.static_bytes else corrected", "if False else corrected"),
    ("adacc_hf/torch_glue/meters.py", "maximum = max(maximum, live)", "maximum = live"),
    # What is recorded, replayed and compared.
    ("adacc_hf/tape/replay_check.py", "return same_bits(replayed, recorded)", "return True"),
    ("adacc_hf/tape/replay.py", "environment[old] = copy_with_storage(bases[old])", "environment[old] = bases[old]"),
    ("adacc_hf/tape/symbolic_tape.py", "if before not in (None, digest):", "if False:"),
    ("adacc_hf/tape/tape_cache.py", "tape.base.structure, set()).update(values)", "tape.base.structure, set())"),
    ("adacc_hf/run/policy_handle.py", 'self._chunk_head(plans.policy.head == "chunked")', "self._chunk_head(False)"),
    ("adacc_hf/head/chunked_loss.py", "total / (target != ignore_index).sum()", "total / target.numel()"),
    ("adacc_hf/head/chunked_loss.py", "padded[:, classes:] = -torch.inf", "padded[:, classes:] = 0.0"),
    ("adacc_hf/artifacts/profile.py", "return self.head_ms - plain_ms", "return max(0.0, self.head_ms - plain_ms)"),
    # Codecs.
    ("kernels/_symmetric.py", "(magnitude >= TINY_PEAK) &", ""),
    ("kernels/_symmetric.py", "codes[:half] | (codes[half:] << 4)", "codes[half:] | (codes[:half] << 4)"),
    # A run.
    ("adacc_hf/adapt/oom_retry.py", "return int(TIGHTER * min(", "return int(min("),
    ("adacc_hf/adapt/oom_retry.py", "            parameter.grad = gradient\n", "            pass\n"),
    ("adacc_hf/adapt/policy_fit.py", "SAME_ACTIONS, not uses_up(", "SAME_ACTIONS, uses_up("),
    ("adacc_hf/adapt/policy_choice.py", "2 * self._num_diverged >", "self._num_diverged >"),
    ("adacc_hf/adapt/phases.py", "gather_from_all_ranks(installation", "(lambda value: [value])(installation"),
    # Annexes.
    ("adacc_hf/artifacts/exact_recompute_rules.py", "results if any(map(is_index, results)) else ()", "()"),
    ("adacc_hf/compiler/compress_pass.py", ".permute(inverse_order),)", ",)"),
    ("adacc_hf/estimate/planning.py", "fits = peak_bytes <= self.request.budget", "fits = True"),
    # Files whose tests were thinned.
    ("adacc_hf/adapt/policy_choice.py", "is not None and fits_in(other, sizes)", "is not None and False"),
    ("adacc_hf/adapt/policy_checks.py", "if needed > allowed:", "if needed > 2 * allowed:"),
    ("adacc_hf/adapt/policy_fit.py", "host_bytes <= config.host_limit(", "host_bytes <= 10**15 + config.host_limit("),
    ("adacc_hf/adapt/outlier_tracking.py", "max(count, self.num_outliers.get(key, 0))", "count"),
    ("adacc_hf/adapt/session.py", "if self.hooks.num_forwards == 0:", "if False:"),
    ("adacc_hf/artifacts/budget_values.py", "<= num_bytes <= MAX_BYTES:", "<= num_bytes:"),
    ("adacc_hf/artifacts/plans.py", "in allowed and value.recomputable:", "in allowed:"),
    ("adacc_hf/artifacts/polynomials.py", "self.num_calls < 2 * num_terms - 1", "self.num_calls < num_terms"),
    ("adacc_hf/artifacts/tiles.py", "PASSES_PER_TILE - 1 if", "PASSES_PER_TILE if"),
    ("adacc_hf/tape/guards.py", "self._num_short_lives >= MOST_SHORT_LIVES", "False"),
    ("adacc_hf/tape/recorder.py", "== storage and share_elements(ref, write) for write", "== -1 for write"),
    ("adacc_hf/tape/tiled_rows.py", "or tuple(result.shape[:-1]) != expected:", ":"),
    ("adacc_hf/tape/call_key.py", "return self._num_layouts >= MANY_LAYOUTS and", "return False and"),
    ("adacc_hf/torch_glue/dynamo.py", "and self._raw_environment != _raw_environment()", "and False"),
    ("adacc_hf/run/blocks.py", "if function.num_calls == 0]", "if False]"),
    ("adacc_hf/run/checkpointed_call.py", "if version_of(tensor) == versions[place]:", "if True:"),
    ("adacc_hf/integrations/lightning.py", "if interval and trainer.global_step % interval == 0:", "if interval:"),
    ("kernels/_triton.py", "is_aligned = addresses % ALIGNMENT == 0", "is_aligned = True"),
    # What the front ends and the compiled step promise.
    ("adacc_hf/run/entries.py", "entry, MAX_SHAPES)\n        self.known", "entry, 512)\n        self.known"),
    ("adacc_hf/run/call.py", "if version_of(content) != version:", "if False:"),
    ("adacc_hf/compiler/compiled_run.py", "if peak_bytes > budget_bytes:", "if False:"),
    ("adacc_hf/compiler/partitioner.py", "allowed_bytes is not None and allowed_bytes >= plan.plain_bytes", "False"),
    ("adacc_hf/compact/optimizer.py", "layer.weight.mul_(1.0 - decay)", "pass"),
    ("adacc_hf/head/lazy_logits.py", "lazy if target == lazy.dtype else", "lazy if True else"),
    ("adacc_hf/torch_glue/function_calls.py", "            _thread.set_up = self.function\n", "            pass\n"),
    ("callbacks/trainer_guard.py", "                    on_failure()\n", "                    pass\n"),
    ("callbacks/trainer_mixin.py", "checkpoint = get_last_checkpoint(self.args.output_dir)", "checkpoint = None"),
    ("kernels/fp8.py", "-(-columns // self.group_size) *", "columns // self.group_size *"),
    ("kernels/_host_pool.py", "self.nbytes and not self.live_bytes:", "self.nbytes:"),
    ("kernels/outlier_int4.py", "if expected != actual:", "if False:"),
    ("eval/trials/trial.py", "if not error <= max_error:", "if False:"),
]
"""(file, text that occurs once in the file, replacement)."""
ALL_NUMBERS = range(1, len(BREAKS) + 1)

HEADING = """# Tests that notice each break

`python tests/breakages --matrix` writes this table. It counts the test functions that fail, of the broken file's folder
and of FRONT_DOORS (`__main__.py`). "1 or more": none of these fails, and the gate was run until the first failure.

| break | file | replaced text | tests | the first of these tests |
|---|---|---|---|---|
"""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python tests/breakages", description="Does the gate notice each break?")
    parser.add_argument("numbers", nargs="*", type=int, metavar="NUMBER", help="a break; all by default")
    parser.add_argument("--matrix", action="store_true", help=f"list the tests that notice a break in {MATRIX.name}")
    options = parser.parse_args()
    numbers = options.numbers or ALL_NUMBERS
    if not set(numbers) <= set(ALL_NUMBERS):
        parser.error(f"breaks have the numbers 1 to {len(BREAKS)}")
    check_unbroken(*sorted(set(map(folder_of_tests, numbers))), *(FRONT_DOORS if options.matrix else ()))
    num_noticed = sum(is_noticed(number, options.matrix) for number in numbers)
    print(f"the gate notices {num_noticed} of {len(numbers)} breaks")
    return 0 if num_noticed >= MIN_DETECTED * len(numbers) else 1


@cache
def check_unbroken(*tests: str) -> None:
    """Exit if one of the tests fails without any break."""
    with tempfile.TemporaryDirectory() as folder:
        copy_package(folder)
        if failed_tests := run_tests(folder, "-x", *tests):
            raise SystemExit(f"{failed_tests[0]} fails without any break: fix the test first")


def is_noticed(number: int, is_matrix: bool) -> bool:
    """Return True if a test of the gate fails with break `number`. Print its name, and write the row of the matrix."""
    path, _, _ = BREAKS[number - 1]
    with tempfile.TemporaryDirectory() as folder:
        (copy_package(folder) / path.removeprefix("adacc_hf/")).write_text(broken_text(number), encoding="utf-8")
        failed_tests = run_tests(folder, folder_of_tests(number), *(FRONT_DOORS if is_matrix else ["-x"]))
        count = str(len(failed_tests))
        if not failed_tests:
            failed_tests = run_tests(folder, "-x", "tests")[:1]
            count = "1 or more" if failed_tests else "NONE"
    if count == "1 or more":
        check_unbroken("tests")
    if is_matrix:
        write_row(number, count, failed_tests)
    result = f"noticed by {failed_tests[0]}" if failed_tests else "NOT NOTICED by the gate"
    print(f"{number:2}. {path}: {shortened(number)!r}: {result}", flush=True)
    return bool(failed_tests)


def broken_text(number: int) -> str:
    """Return the text of the file of break `number` with the break applied."""
    path, old, new = BREAKS[number - 1]
    text = (ROOT / path).read_text(encoding="utf-8")
    if (count := text.count(old)) != 1:
        raise SystemExit(f"break {number}: {old!r} occurs {count} times in {path}, not once: update BREAKS")
    return text.replace(old, new)


def shortened(number: int) -> str:
    return " ".join(BREAKS[number - 1][1].split())[:60]


def write_row(number: int, count: str, failed_tests: list[str]) -> None:
    """Write the row of break `number` into the matrix. Rows of breaks that BREAKS no longer has are left out."""
    names = [f"`{test.rpartition('/')[2]}`" for test in failed_tests[:NAMES_IN_ROW]]
    lines = MATRIX.read_text(encoding="utf-8").splitlines() if MATRIX.exists() else []
    rows = [f"{row_key(number)}{count} | {', '.join(names)} |", *(line.partition(" | ")[2] for line in lines)]
    # Rows are found by file and text, because numbers change when BREAKS does. The new row precedes the old one.
    latest = {other: [row for row in rows if row.startswith(row_key(other))][:1] for other in ALL_NUMBERS}
    table = [f"| {other} | {row}\n" for other in latest for row in latest[other]]
    MATRIX.write_text("".join([HEADING, *table]), encoding="utf-8")


def row_key(number: int) -> str:
    """Return the cells with the file and the text of break `number`."""
    text = shortened(number).replace("|", r"\|")
    return f"{BREAKS[number - 1][0]} | `{text}` | "


def copy_package(folder: str) -> Path:
    """Copy the package into `folder`, with the recipes next to it, and return the copy's path."""
    package = Path(folder) / "adacc_hf"
    targets = {"adacc_hf": ".", "callbacks": "callbacks", "kernels": "kernels", "eval": "eval", "recipes": "../recipes"}
    for source, target in targets.items():
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / source, package / target, ignore=ignored, dirs_exist_ok=True)
    return package


def folder_of_tests(number: int) -> str:
    return str(Path("tests") / Path(BREAKS[number - 1][0]).parent)


def run_tests(folder: str, *arguments: str) -> list[str]:
    """Run tests of the gate with `folder` first on the path. Return those that failed, without their parameters."""
    settings = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-n", "2", "--dist", "worksteal", "--tb", "no"]
    process = subprocess.run(
        [*command, "--continue-on-collection-errors", "-m", MARKERS, *arguments],
        cwd=ROOT, env=os.environ | settings | {"PYTHONPATH": folder}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if process.returncode == 0:
        return []
    lines = [line for line in process.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    if not lines:
        output = process.stdout[-2000:] + process.stderr[-1000:]
        raise SystemExit(f"pytest ended with {process.returncode} and names no failed test:\n{output}")
    return sorted({line.split()[1].partition("[")[0] for line in lines})


if __name__ == "__main__":
    sys.exit(main())
