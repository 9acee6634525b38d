"""`adacc verify`: train a model, or run a training command, without and with a policy from one state, and compare."""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.errors import AdaccError
from adacc_hf.artifacts.policy import Policy
from adacc_hf.artifacts.units import format_bytes
from adacc_hf.estimate.presets import PRESETS, check_model
from adacc_hf.launch import child_environment, run_child
from adacc_hf.reports.text_table import fit_lines, table_lines

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from adacc_hf.torch_glue.fingerprints import Fingerprint

    Record = dict[str, Fingerprint]

NOT_EQUAL = 1
"""Exit status if the policy is not exact, not bit-equal to plain training, or fails."""
SEED = 0
PLAIN, CHECKPOINTING, ADACC = "plain", "gradient checkpointing", "Adacc"
COMMAND = "the command alone"
ALL_METHODS = "plain,checkpointing,reentrant,selective,torch-budget,adacc"


def add_parser(commands: Any) -> None:
    """Add `verify` to the argument parsers of the `adacc` command."""
    parser = commands.add_parser(
        "verify",
        help="train some steps without and with a policy: are the results bit-equal?",
        usage="adacc verify [-h] [options] (--model MODEL | --methods METHODS | -- COMMAND ...)",
        description="With --model, train a model with random weights on random tokens by AdamW: plainly, under "
        "gradient checkpointing and under a policy, from one state. With COMMAND, such as `python train.py`, run it "
        "once as it is and once with AdaccCallback, and end training after --steps; the command writes its files as "
        "usual. Print differences, peak memory and time. With --methods, train small models under several methods, "
        "and print which is exact. The exit status is 0 if training under the policy is bit-equal, else "
        f"{NOT_EQUAL}.",
    )
    parser.add_argument("--model", help=f"preset ({', '.join(PRESETS)}), or hub id or folder of a config.json")
    parser.add_argument(
        "--methods",
        nargs="?",
        const=ALL_METHODS,
        help=f"train small models under these methods, in about 2 minutes on one core (default: {ALL_METHODS}; also "
        "torch-budget-inductor, which takes longer)",
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="with --methods: also write the results as JSON")
    parser.add_argument("--batch-size", type=int, default=4, help="sequences per step (default 4)")
    parser.add_argument("--seq-len", type=int, default=128, help="tokens per sequence (default 128)")
    parser.add_argument("--steps", type=int, default=5, help="steps of each training, at least 2 (default 5)")
    parser.add_argument(
        "--memory-budget",
        default=0.5,
        metavar="SIZE",
        help="peak of a step, such as 20GiB, or a fraction of plain training's activations (default 0.5)",
    )
    parser.add_argument("--exact", action="store_true", help="use no lossy codec, as with AdaccConfig(exact=True)")
    parser.add_argument("--peft", choices=("lora",), help="train LoRA adapters only")
    parser.add_argument("--device", help="cpu or cuda (default: cuda if there is one)")
    parser.add_argument("child", nargs=argparse.REMAINDER, metavar="COMMAND", help="command that trains by a Trainer")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the trainings of `adacc verify`, print the comparison, and return the exit status."""
    command = arguments.child[1:] if arguments.child[:1] == ["--"] else arguments.child
    if arguments.methods is not None and arguments.model is None and not command:
        from adacc_hf.verify_methods import run_methods

        return 0 if run_methods(arguments.methods.split(","), arguments.output) else NOT_EQUAL
    if arguments.methods or arguments.output or (arguments.model is None) == (not command):
        raise ValueError(
            "pass either --model MODEL or -- COMMAND, for example `adacc verify -- python train.py`, or --methods, "
            "with or without --output"
        )
    for option, least in (("batch_size", 1), ("seq_len", 2), ("steps", 2)):  # the first step has no policy yet
        if getattr(arguments, option) < least:
            name = f"--{option.replace('_', '-')}"
            raise ValueError(f"{name}={getattr(arguments, option)} must be at least {least}: choose a larger number")
    config = AdaccConfig(memory_budget=arguments.memory_budget, exact=arguments.exact)
    train: Callable[[str], Outcome]
    methods: tuple[str, ...] = (PLAIN, CHECKPOINTING, ADACC)
    if command:
        train, methods = partial(_run_command, command, arguments.steps, config), (COMMAND, ADACC)
        subject = f"{' '.join(command)}: the first {arguments.steps} steps"
    else:
        check_model(arguments.model)
        trial = Trial.of(arguments, config)
        train, subject = trial.train, trial.title
    outcomes = [train(methods[0])]
    if outcomes[0].failure is not None and not command:  # it may not fit the device
        outcomes.append(train(CHECKPOINTING))
    reference = outcomes[-1]
    if reference.failure is not None:
        raise AdaccError(f"{methods[0]} fails, so nothing can be compared with it: {outcomes[0].failure}")
    outcomes += map(train, methods[len(outcomes) :])
    # With kernels that are not deterministic, two runs without a policy differ too.
    differs = outcomes[-1].failure is None and outcomes[-1].difference_from(reference) is not None
    is_noisy = differs and train(reference.method).difference_from(reference) is not None
    lines = [f"{subject}; {config.describe_changes()}", ""]
    policy = outcomes[-1].policy
    lines += [*_table(outcomes, reference), *([] if policy is None else [f"policy: {policy.summary()}", ""])]
    print(fit_lines("\n".join(lines)))
    verdict, status = _verdict(reference, outcomes[-1], config.exact, is_noisy)
    if outcomes[-1].num_fallbacks:
        verdict += f" Steps that did not follow the policy (the log has the reasons): {outcomes[-1].num_fallbacks}."
    print(fit_lines(verdict))
    return status


@dataclass
class Outcome:
    """Results of one training."""

    method: str
    records: list[Record] = field(default_factory=list)
    """For each step, the fingerprints of the loss and of the gradients. At the end, those of the weights."""
    step_ms: list[float] = field(default_factory=list)
    peak_bytes: int | None = None
    policy: Policy | None = None
    num_fallbacks: int = 0
    """Number of steps that did not follow the policy."""
    failure: str | None = None

    def difference_from(self, plain: Outcome) -> str | None:
        """Return where the training first differs from `plain`, or None if it is bit-equal.

        In the first step that differs, the loss is named, or else the gradient nearest to the output.
        """
        if len(self.records) != len(plain.records):
            return f"the number of steps: {len(self.records) - 1} instead of {len(plain.records) - 1}"
        for number, (record, expected) in enumerate(zip(self.records, plain.records, strict=True), 1):
            where = f"step {number}" if number < len(plain.records) else "the weights after the last step"
            if record.keys() != expected.keys():
                return f"{where}: other tensors, such as the {min(record.keys() ^ expected.keys())}"
            different = [name for name in record if record[name].digest != expected[name].digest]
            if different:
                name = different[0] if different[0] == "loss" else different[-1]
                return (
                    f"{where}: {name}, relative error {record[name].relative_error(expected[name]):.2g}, largest "
                    f"difference {record[name].largest_difference(expected[name]):.2g}; {len(different)} of "
                    f"{len(record)} tensors differ"
                )
        return None


@dataclass(frozen=True)
class Trial:
    """Model, batches and settings that all trainings of one comparison share."""

    build: Callable[[], PreTrainedModel]
    """Function that returns the model with the same weights at each call."""
    batches: Sequence[dict[str, torch.Tensor]]
    config: AdaccConfig
    title: str

    @classmethod
    def of(cls, arguments: argparse.Namespace, config: AdaccConfig) -> Trial:
        """Return the trial for the options of `adacc verify`. Raises ValueError for a wrong option."""
        import torch

        from adacc_hf.estimate.presets import checked_seq_len, is_classifier, load_config

        device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        model_config = load_config(arguments.model)
        text_config = model_config.get_text_config()
        generator = torch.Generator().manual_seed(SEED)
        shape = (arguments.batch_size, checked_seq_len(arguments.seq_len, model_config, "--seq-len"))

        def batch() -> dict[str, torch.Tensor]:
            ids = torch.randint(text_config.vocab_size, shape, generator=generator).to(device)
            return {"input_ids": ids, "labels": ids[:, 0] % 2 if is_classifier(model_config) else ids.clone()}

        title = f"{arguments.model}: {arguments.steps} steps of {shape[0]} x {shape[1]} tokens on {device}"
        batches = [batch() for _ in range(arguments.steps)]
        return cls(lambda: _build(model_config, arguments.peft, device), batches, config, title)

    def train(self, method: str) -> Outcome:
        """Train a new model under `method`. Every training starts with the same weights and random state."""
        import torch

        outcome = Outcome(method)
        try:
            model = self.build()
            optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
            torch.manual_seed(SEED)
            with _installed(method, model, optimizer, self.config, outcome) as step_context:
                for batch in self.batches:
                    self._step(model, optimizer, batch, step_context, outcome)
            self._end(model, optimizer, outcome)
        except Exception as error:  # of a model's own code, for example, which must not end the comparison
            outcome.failure = f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"
        gc.collect()
        return outcome

    def _step(
        self,
        model: PreTrainedModel,
        optimizer: torch.optim.Optimizer,
        batch: dict[str, torch.Tensor],
        step_context: Callable[[Any], AbstractContextManager[Any]],
        outcome: Outcome,
    ) -> None:
        """Train one step, and record its loss, gradients and time without the time of recording."""
        from adacc_hf.price.timing import seconds_at
        from adacc_hf.torch_glue.fingerprints import fingerprint, gradient_fingerprints
        from adacc_hf.torch_glue.memory import backward, forward_loss

        start = seconds_at(model.device)
        with step_context(batch):
            loss = forward_loss(model, batch)
            backward(loss)
            paused = seconds_at(model.device)
            outcome.records.append({"loss": fingerprint(loss), **gradient_fingerprints(model.named_parameters())})
            paused = seconds_at(model.device) - paused
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        outcome.step_ms.append(1e3 * (seconds_at(model.device) - start - paused))

    def _end(self, model: PreTrainedModel, optimizer: torch.optim.Optimizer, outcome: Outcome) -> None:
        """Record the weights, and the peak of a further forward and backward in the steady state."""
        from adacc_hf.run.policy_handle import apply_policy
        from adacc_hf.torch_glue.fingerprints import fingerprint
        from adacc_hf.torch_glue.memory import backward, forward_loss, measure_step

        outcome.records.append({f"weight {name}": fingerprint(p) for name, p in model.named_parameters()})
        batch, policy = self.batches[-1], outcome.policy
        with nullcontext() if policy is None else apply_policy(model, policy, self.config):
            for _ in range(2):  # the first calls at a shape are recorded
                backward(forward_loss(model, batch))
                optimizer.zero_grad(set_to_none=True)
            outcome.peak_bytes = measure_step(model, batch, optimizer).peak_bytes


def _build(model_config: Any, peft: str | None, device: torch.device) -> PreTrainedModel:
    """Return a model in train mode, with random weights that depend on SEED alone."""
    import torch

    from adacc_hf.estimate.presets import fresh_model

    torch.manual_seed(SEED)
    model: Any = fresh_model(model_config, None)
    for module in model.modules():  # T5's decoder, for example, has a config of its own
        if hasattr(module, "config"):
            module.config.use_cache = False
    if peft is not None:
        try:
            from peft import LoraConfig, get_peft_model
        except ImportError as error:
            raise AdaccError("--peft=lora needs the package peft: pip install peft") from error
        task = "SEQ_2_SEQ_LM" if model_config.is_encoder_decoder else "CAUSAL_LM"
        with warnings.catch_warnings():  # PEFT reads a property that Transformers renames: irrelevant to users
            warnings.simplefilter("ignore", FutureWarning)
            model = get_peft_model(model, LoraConfig(task_type=task))
    return model.to(device).train()


@contextmanager
def _installed(
    method: str, model: PreTrainedModel, optimizer: torch.optim.Optimizer, config: AdaccConfig, outcome: Outcome
) -> Iterator[Callable[[Any], AbstractContextManager[Any]]]:
    """Install `method` on `model` inside the `with` block. Yield the context manager of a step on a batch."""
    from adacc_hf.adapt.session import AdaccSession
    from adacc_hf.torch_glue.compat import switch_checkpointing

    if method == ADACC:
        session = AdaccSession(model, optimizer, config)
        try:
            yield session.step
            outcome.policy = session.policy
            outcome.num_fallbacks = int(session.metrics().get("adacc/fallback_steps", 0))
        finally:
            session.close()
    else:
        if method == CHECKPOINTING:
            switch_checkpointing(model, True, {"use_reentrant": False})
        yield lambda batch: nullcontext()


def _run_command(command: Sequence[str], num_steps: int, config: AdaccConfig, method: str) -> Outcome:
    """Run the user's command, with AdaccCallback if `method` is ADACC, and read what its Trainer recorded."""
    with TemporaryDirectory(prefix="adacc-verify-") as folder:
        verify = {"folder": folder, "num_steps": num_steps, "is_plain": method != ADACC}
        settings = json.dumps(config.changed_settings | {"verify": verify})
        status = run_child(command, child_environment(os.environ, settings, folder))
        ranks = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("rank-*.json"))]
    if not ranks or status:
        reason = "" if ranks else ", and no Trainer trained"
        return Outcome(method, failure=f"the command ended with status {status}{reason}")
    from adacc_hf.torch_glue.fingerprints import Fingerprint

    outcome = Outcome(method, step_ms=ranks[0]["step_ms"], peak_bytes=ranks[0]["peak_bytes"])
    for steps in zip(*(rank["records"] for rank in ranks), strict=True):
        named = {
            f"rank {rank}, {name}" if rank else name: v for rank, one in enumerate(steps) for name, v in one.items()
        }
        outcome.records.append({name: Fingerprint(*values) for name, values in named.items()})
    policy = ranks[0]["policy"]
    outcome.policy = None if policy is None else Policy.from_json(policy, "the policy of the command")
    return outcome


def _table(outcomes: Sequence[Outcome], reference: Outcome) -> list[str]:
    rows = [("method", "step's peak", "share", "step", "first step", "result")]
    for outcome in outcomes:
        if outcome.failure is not None:
            rows.append((outcome.method, "", "", "", "", "fails"))
            continue
        difference = outcome.difference_from(reference)
        result = "reference" if outcome is reference else "bit-equal" if difference is None else "differs"
        later_ms = statistics.median(outcome.step_ms[1:] or outcome.step_ms)
        peak, share = "not measured", ""
        if outcome.peak_bytes and reference.peak_bytes:
            peak, share = format_bytes(outcome.peak_bytes), f"{outcome.peak_bytes / reference.peak_bytes:.0%}"
        times = (f"{later_ms:.0f} ms", f"{outcome.step_ms[0]:.0f} ms")
        rows.append((outcome.method, peak, share, *times, result))
    failures = [f"{outcome.method} fails: {outcome.failure}" for outcome in outcomes if outcome.failure is not None]
    return [*table_lines(rows, right=(1, 2, 3, 4)), "", *failures, *[""] * bool(failures)]


def _verdict(plain: Outcome, outcome: Outcome, is_exact: bool, is_noisy: bool) -> tuple[str, int]:
    """Return the last line of the comparison, and the exit status."""
    difference = outcome.difference_from(plain)
    if outcome.failure is not None:
        return "Not verified, because training under the policy fails.", NOT_EQUAL
    if difference is None:
        num_gradients = len(plain.records[0]) - 1
        text = (
            f"Bit-equal: the losses and {num_gradients} gradients of {len(plain.step_ms)} steps, and the weights after "
            f"them, equal those of {plain.method}."
        )
        return text, 0
    if is_noisy:
        advice = "two runs without a policy differ as well: seed random numbers, or use deterministic kernels"
    elif is_exact:
        advice = "this is a fault of adacc_hf: please report it with this output"
    else:
        advice = "the policy is approximate: add --exact for one that is bit-equal"
    return f"Not bit-equal. First difference in {difference}. {advice[0].upper()}{advice[1:]}.", NOT_EQUAL
