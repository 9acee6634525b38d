"""Mutation test of the gate: break the product in 63 places, one at a time, and run the tests on each.

    python tests/breakages [NUMBER ...]

Each break is applied to a copy of the package, which precedes the installed package on the path. noticed_by.txt names a
test of the gate for each break. If this test does not fail, the tests of the broken file's folder run, and then the
whole gate (all tests that `make test-all` runs), until the first failure, which is written into that file. The exit
status is 1 if the gate misses a break.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NOTICED_BY = Path(__file__).with_name("noticed_by.txt")
"""Lines of a test, and the file and the replaced text of the break that it notices, separated by tabs."""
MARKERS = "not nightly and not gpu and not others"
"""Expression for pytest's option -m that selects the tests of the gate, as in `make test-all`."""

BREAKS: list[tuple[str, str, str]] = [
    # What a step takes, and which policies keep to a budget.
    ("adacc_hf/artifacts/memory_simulator.py", "outside + self.live_bytes, loss", "outside, loss"),
    ("adacc_hf/artifacts/block_walk.py", "get(root, -1), self._release(slot))", "get(root, -1), 0)"),
    ("adacc_hf/artifacts/block_walk.py", "sorted(operators - replayed)", "sorted(operators)"),
    ("adacc_hf/artifacts/size_model.py", "math.ceil(math.log(size", "math.floor(math.log(size"),
    ("adacc_hf/artifacts/config.py", "* (1 - config.memory_margin)", "* (1 + config.memory_margin)"),
    ("adacc_hf/solve/search.py", "return budget.nbytes - self._fixed_bytes", "return budget.nbytes"),
    ("adacc_hf/solve/solver.py", "if search.head_ms >= most_ms:", "if search.head_ms < most_ms:"),
    # What is measured.
    ("adacc_hf/price/kind_profile_builder.py", "if error > DEGRADED_ERROR}", "if error > 1e9}"),
    ("adacc_hf/price/kind_profile_builder.py", "max(block.outliers.get(index", "min(block.outliers.get(index"),
    ("adacc_hf/price/measurement.py", "max_bytes - point.live_bytes - results", "max_bytes - point.live_bytes"),
    ("adacc_hf/price/codec_selection.py", "record.nbytes < config.min_compress_bytes", "record.nbytes < 1"),
    ("adacc_hf/price/batch.py", "gradient_accumulation_steps - 1 +", "gradient_accumulation_steps +"),
    ("adacc_hf/adapt/corrections.py", "if self.static_bytes else corrected", "if False else corrected"),
    ("adacc_hf/torch_glue/meters.py", "maximum = max(maximum, live)", "maximum = live"),
    # What is recorded, replayed and compared.
    ("adacc_hf/tape/replay_check.py", "return same_bits(replayed, recorded)", "return True"),
    ("adacc_hf/tape/replay.py", "environment[old] = copy_with_storage(bases[old])", "environment[old] = bases[old]"),
    ("adacc_hf/tape/symbolic_tape.py", "if before not in (None, digest):", "if False:"),
    ("adacc_hf/tape/tape_cache.py", "tape.verified - tape.decisions()", "tape.verified"),
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
    ("adacc_hf/adapt/policy_choice.py", "0 if is_new or uses_up(", "0 if is_new or not uses_up("),
    ("adacc_hf/adapt/policy_choice.py", "2 * self._num_diverged >", "self._num_diverged >"),
    ("adacc_hf/adapt/phases.py", "gather_from_all_ranks(installation", "(lambda value: [value])(installation"),
    # Annexes.
    ("adacc_hf/artifacts/exact_recompute_rules.py", "results if any(map(is_index, results)) else ()", "()"),
    ("adacc_hf/compiler/compress_pass.py", ".permute(inverse_order),)", ",)"),
    ("adacc_hf/estimate/planning.py", "fits=peak <= self.request.budget", "fits=True"),
    # Files whose tests were thinned.
    ("adacc_hf/adapt/policy_choice.py", "bounds is None or fits_in(other, bounds)", "bounds is None"),
    ("adacc_hf/adapt/policy_checks.py", "if needed > allowed:", "if needed > 2 * allowed:"),
    ("adacc_hf/adapt/policy_fit.py", "host_bytes <= config.host_limit(", "host_bytes <= 10**15 + config.host_limit("),
    ("adacc_hf/adapt/corrections.py", "max(count, counts.get(self._name, 0))", "count"),
    ("adacc_hf/adapt/loop_hooks.py", "if self.num_forwards or not self._hooks:", "if True:"),
    ("adacc_hf/artifacts/budget_values.py", "<= num_bytes <= MAX_BYTES:", "<= num_bytes:"),
    ("adacc_hf/artifacts/plans.py", "in allowed and value.recomputable:", "in allowed:"),
    ("adacc_hf/artifacts/polynomials.py", "self.num_calls < 2 * num_terms - 1", "self.num_calls < num_terms"),
    ("adacc_hf/artifacts/tiles.py", "PASSES_PER_TILE - 1 if", "PASSES_PER_TILE if"),
    ("adacc_hf/tape/guards.py", "self._num_short_lives >= MOST_SHORT_LIVES", "False"),
    ("adacc_hf/tape/recorder.py", "== storage and share_elements(ref, write) for write", "== -1 for write"),
    ("adacc_hf/tape/tiled_rows.py", "or tuple(result.shape[:-1]) != expected:", ":"),
    ("adacc_hf/tape/guards.py", "return key._replace(layout=self._layout)", "return key"),
    ("adacc_hf/torch_glue/dynamo.py", "self.properties.append(_ENVIRONMENT)", "pass"),
    ("adacc_hf/run/blocks.py", "self._without_calls_since(dict.fromkeys(self.blocks, 0))", "[]"),
    ("adacc_hf/run/checkpointed_call.py", "and version_of(tensor) == versions[place]:", ":"),
    ("adacc_hf/integrations/lightning.py", "if interval and trainer.global_step % interval == 0:", "if interval:"),
    ("kernels/_triton.py", "is_aligned = addresses % ALIGNMENT == 0", "is_aligned = True"),
    # What the front ends and the compiled step promise.
    (
        "adacc_hf/run/entries.py",
        "put_latest(self.recorded, key, entry, MAX_SHAPES)",
        "put_latest(self.recorded, key, entry, 512)",
    ),
    ("adacc_hf/run/call.py", "if version_of(content) != version:", "if False:"),
    ("adacc_hf/compiler/compiled_run.py", "if peak_bytes > budget_bytes:", "if False:"),
    ("adacc_hf/compiler/partitioner.py", "allowed_bytes is not None and allowed_bytes >= plan.plain_bytes", "False"),
    ("adacc_hf/compact/optimizer.py", "layer.weight.mul_(1.0 - decay)", "pass"),
    ("adacc_hf/head/lazy_logits.py", "lazy if target == lazy.dtype else", "lazy if True else"),
    ("adacc_hf/torch_glue/function_calls.py", "            _thread.set_up = self.function\n", "            pass\n"),
    ("callbacks/trainer_guard.py", "                    on_failure()\n", "                    pass\n"),
    ("callbacks/trainer_mixin.py", "        refuse_second_callback(callback, self)\n", ""),
    ("kernels/fp8.py", "-(-columns // self.group_size),)", "(columns // self.group_size),)"),
    ("kernels/_host_pool.py", "self.nbytes and not self.live_bytes:", "self.nbytes:"),
    ("kernels/outlier_int4.py", "if expected != actual:", "if False:"),
    ("eval/trials/trial.py", "if not error <= max_error:", "if False:"),
]
"""(file, text that occurs once in the file, replacement)."""
ALL_NUMBERS = range(1, len(BREAKS) + 1)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python tests/breakages", description="Does the gate notice each break?")
    parser.add_argument("numbers", nargs="*", type=int, metavar="NUMBER", help="a break; all by default")
    numbers = parser.parse_args().numbers or ALL_NUMBERS
    if not set(numbers) <= set(ALL_NUMBERS):
        parser.error(f"breaks have the numbers 1 to {len(BREAKS)}")
    tests_by_break = noticed_by()
    with tempfile.TemporaryDirectory() as folder:
        copy_package(folder)
        known_tests = {tests_by_break[key_of(number)] for number in numbers} - {""}
        if known_tests and (failed_test := first_failure(folder, *sorted(known_tests))):
            raise SystemExit(f"{failed_test} fails without any break: fix the test first")
    num_missed = 0
    for number in numbers:
        tests_by_break[key_of(number)] = noticing_test(number, tests_by_break[key_of(number)])
        print(f"{number:2}. {BREAKS[number - 1][0]}: {tests_by_break[key_of(number)] or 'NOT NOTICED'}", flush=True)
        num_missed += not tests_by_break[key_of(number)]
        lines = [f"{tests_by_break[key_of(each)]}\t{key_of(each)}\n" for each in ALL_NUMBERS]
        NOTICED_BY.write_text("".join(lines), encoding="utf-8")
    print(f"the gate notices {len(numbers) - num_missed} of {len(numbers)} breaks")
    return 1 if num_missed else 0


def key_of(number: int) -> str:
    """Return the file and the replaced text of a break: its number changes when BREAKS does."""
    path, old, _ = BREAKS[number - 1]
    return f"{path}\t{' '.join(old.split())}"


def noticed_by() -> dict[str, str]:
    """Return the test that notices each break, by the key of the break, or "" for a new break."""
    lines = NOTICED_BY.read_text(encoding="utf-8").splitlines()
    tests = {key: test for test, _, key in (line.partition("\t") for line in lines)}
    return {key: tests.get(key, "") for key in map(key_of, ALL_NUMBERS)}


def noticing_test(number: int, test: str) -> str:
    """Return a test of the gate that fails with break `number`, `test` if that fails, or "" if none does."""
    path, _, _ = BREAKS[number - 1]
    with tempfile.TemporaryDirectory() as folder:
        (copy_package(folder) / path.removeprefix("adacc_hf/")).write_text(broken_text(number), encoding="utf-8")
        places = [*([test] if test else []), folder_of_tests(number), "tests"]
        return next(filter(None, (first_failure(folder, place) for place in places)), "")


def broken_text(number: int) -> str:
    """Return the text of the file of break `number` with the break applied."""
    path, old, new = BREAKS[number - 1]
    text = (ROOT / path).read_text(encoding="utf-8")
    if (count := text.count(old)) != 1:
        raise SystemExit(f"break {number}: {old!r} occurs {count} times in {path}, not once: update BREAKS")
    return text.replace(old, new)


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


def first_failure(folder: str, *places: str) -> str:
    """Run the gate with `folder` first on the path until a test fails. Return its name without parameters, if any."""
    settings = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    workers = ["-n", "2", "--dist", "worksteal"] if "::" not in "".join(places) or len(places) > 1 else []
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-x", *workers, "--tb", "no", "-m", MARKERS, *places]
    environment = os.environ | settings | {"PYTHONPATH": folder}
    process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if process.returncode in (0, 5):  # 5: the gate has no test there
        return ""
    if process.returncode < 0 and len(places) == 1:  # the break ended the process, as a write out of bounds does
        return places[0]
    lines = [line for line in process.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    if not lines:
        output = process.stdout[-2000:] + process.stderr[-1000:]
        raise SystemExit(f"pytest ended with {process.returncode} and names no failed test:\n{output}")
    return lines[0].split()[1].partition("[")[0]


if __name__ == "__main__":
    sys.exit(main())
