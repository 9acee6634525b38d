r"""Train a GPT under a memory budget, by one of the paper's methods.

    accelerate launch recipes/gpt2_pile.py                      the demo: a small GPT-2 on Python's standard library
    accelerate launch recipes/gpt2_pile.py --method compare     the demo by every method, and one table
    accelerate launch recipes/gpt2_pile.py --model gpt2-345m --dataset pile --tokenizer gpt2 --bf16 \
        --per_device_train_batch_size 32 --memory_budget 20GiB

The recipe's own settings come first in the list below, then all of Transformers' TrainingArguments. Invalid settings
end the run with one message and exit status 2.
"""

import sys

from demo_comparison import compare_methods
from recipe_arguments import RecipeArguments, parse_arguments
from training_run import FinishedRun, PreparedRun, prepare_run, save_report, train_once

from adacc_hf.artifacts.errors import AdaccError
from adacc_hf.artifacts.units import format_bytes


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Run the recipe with the settings in `argv` (default: the command line), and return the final metrics."""
    return train(prepare_run(parse_settings(sys.argv[1:] if argv is None else argv)))


def parse_settings(argv: list[str]) -> RecipeArguments:
    """Parse the recipe's command line. Raises ValueError for an invalid setting."""
    return parse_arguments(argv, __doc__)


def train(run: PreparedRun) -> dict[str, float]:
    """Train the recipe's model with the training method in the settings, write the report, and print a summary line."""
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
    """Return a one-line summary of the run: model, method, steps, losses, speed, stored bytes, and output folder."""
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
    """Run the recipe, and return the exit status: 2 after an invalid setting, which is reported in one message."""
    try:
        run = prepare_run(parse_settings(sys.argv[1:]))
    except (ValueError, OSError) as error:
        return _print_recipe_error(error)
    try:
        train(run)
    except AdaccError as error:  # for example: no policy fits the budget, or the model has no blocks
        return _print_recipe_error(error)
    return 0


def _print_recipe_error(error: Exception) -> int:
    print(f"gpt2_pile.py: error: {error}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(command_line())
