"""Train a GPT under a memory budget, by one of the paper's methods.

    accelerate launch recipes/gpt2_pile.py                      the demo: a small GPT-2 on Python's standard library
    accelerate launch recipes/gpt2_pile.py --method compare     the same by every method, and one table
    accelerate launch recipes/gpt2_pile.py --model gpt2-345m --dataset pile --tokenizer gpt2 --bf16 \
        --per_device_train_batch_size 32 --memory_budget 20GiB

Settings that cannot work end the run with one message and exit status 2.
"""

import sys

from demo_comparison import compare_methods
from recipe_arguments import parse_arguments
from training_run import FinishedRun, PreparedRun, prepare_run, save_report, train_once

from adacc_hf.artifacts.errors import AdaccError
from adacc_hf.artifacts.units import format_bytes


def main(argv: list[str] | None = None) -> dict[str, float]:
    """The final metrics of the run that `argv` (default: the command line) asks for."""
    return train(prepare_run(parse_arguments(sys.argv[1:] if argv is None else argv)))


def train(run: PreparedRun) -> dict[str, float]:
    """Trains by the method of the settings, reports, and prints one closing line."""
    method, output_dir = run.args.method, run.args.training.output_dir
    if method.method == "compare":
        return compare_methods(run)
    finished = train_once(run, method.method, method.memory_budget, output_dir)
    if run.args.training.process_index == 0:
        if finished.callback is not None and method.report:
            save_report(finished, output_dir)
        print(closing_line(run, finished))
    return finished.metrics


def closing_line(run: PreparedRun, finished: FinishedRun) -> str:
    """What was trained, what it reached, and where it lies."""
    metrics = finished.metrics
    parts = [
        f"{run.args.model.model}, {run.args.method.method}: {metrics['steps']} steps",
        f"training loss {metrics['final_train_loss']:.3f}",
        f"validation loss {metrics['eval_loss']:.3f}",
        f"{metrics['train_samples_per_second'] * run.seq_len:.0f} tokens/s",
    ]
    if finished.callback is not None:
        parts.append(f"{format_bytes(finished.callback.policy.predicted_stored_bytes)} stored for backward")
    return f"{', '.join(parts)}; saved in {run.args.training.output_dir}"


def command_line() -> int:
    """Runs the recipe; the exit status is 2 after an error in the settings, told in one message."""
    try:
        run = prepare_run(parse_arguments(sys.argv[1:]))
    except (ValueError, OSError) as error:
        return _tell(error)
    try:
        train(run)
    except AdaccError as error:  # a budget that no policy fits, or a model without blocks: known only now
        return _tell(error)
    return 0


def _tell(error: Exception) -> int:
    print(f"gpt2_pile.py: error: {error}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(command_line())
