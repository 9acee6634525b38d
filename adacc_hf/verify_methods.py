"""`adacc verify --methods`: train small models under methods that save memory, and compare with plain training.

A method is exact in a case if all losses and gradients are bit-equal to plain training's, and also the weights,
buffers, counters and random states after the last step.
"""

from __future__ import annotations

import logging
import random
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from tqdm import tqdm

from adacc_hf.adapt.session import AdaccSession
from adacc_hf.artifacts.errors import InfeasibleBudgetError
from adacc_hf.artifacts.files import write_json
from adacc_hf.reports.run_record import Settings, make_record, markdown_table
from adacc_hf.reports.text_table import fit_lines, table_lines
from adacc_hf.torch_glue.compat import switch_checkpointing
from adacc_hf.verify_cases import CASES, VOCABULARY, Case, Model

NUM_STEPS = 5
SEED = 0
BUDGET = 0.75
"""`memory_budget` of Adacc. A case in which no exact policy meets it gets 1.0, plain training's memory."""
TORCH_BUDGET = 0.5
"""torch's `activation_memory_budget`."""
PRODUCTS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default]
"""Operators whose results selective checkpointing stores."""
END = "after the last step: "
"""Prefix of the names of tensors that are compared only after the last step."""
LEGEND = (
    "exact: bit-equal to plain training. N off: differs without a message; N is the largest relative error of a loss "
    "or gradient. state off: only weights, buffers, counters or random states after the last step differ."
)

Tensors = dict[str, Tensor | None]
Point = Mapping[str, Any]
"""Comparison of one training with plain training, as in the record. `status` is "measured", or "error" with a `reason`.
`differs` is the first tensor that differs, or "". `relative_error` is None if it is not finite."""
Enter = Callable[[Any], AbstractContextManager[Any]]
Installed = tuple[Callable[..., Tensor], Enter, Enter]
"""Function to call in place of the model, and the context managers of a step and of one of its micro-batches."""
Install = Callable[[Model, torch.optim.Optimizer, ExitStack], Installed]


def _checkpointing(model: Model, _: torch.optim.Optimizer, __: ExitStack, **torch_options: Any) -> Installed:
    switch_checkpointing(model, True, torch_options)
    if torch_options["use_reentrant"]:
        model.enable_input_require_grads()  # else a frozen embedding leaves all blocks without gradients
    return model, nullcontext, nullcontext


def _torch_budget(model: Model, _: torch.optim.Optimizer, stack: ExitStack, backend: str) -> Installed:
    from adacc_hf.compiler.functorch import functorch_config

    stack.enter_context(functorch_config.patch(activation_memory_budget=TORCH_BUDGET))
    return torch.compile(model, backend=backend), nullcontext, nullcontext


def _adacc(model: Model, optimizer: torch.optim.Optimizer, stack: ExitStack, budget: float) -> Installed:
    session = AdaccSession(model, optimizer, memory_budget=budget, exact=True)
    stack.callback(session.close)
    return model, session.step, session.micro_batch


_SELECTIVE = partial(create_selective_checkpoint_contexts, PRODUCTS)
METHODS: dict[str, Install] = {
    "plain": lambda model, optimizer, stack: (model, nullcontext, nullcontext),
    "checkpointing": partial(_checkpointing, use_reentrant=False),
    "reentrant": partial(_checkpointing, use_reentrant=True),
    "selective": partial(_checkpointing, use_reentrant=False, context_fn=_SELECTIVE),
    "torch-budget": partial(_torch_budget, backend="aot_eager"),
    "torch-budget-inductor": partial(_torch_budget, backend="inductor"),
    "adacc": partial(_adacc, budget=BUDGET),
}
"""Functions that install a method on a model, by the method's name."""


def train(case: Case, install: Install) -> Tensors:
    """Train the model of `case` for some steps, always from the same state. Return all losses and gradients by name,
    and the state after the last step."""
    torch.compiler.reset()
    _seed(SEED)
    model, tensors = case.make().train(), Tensors()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    generator = torch.Generator().manual_seed(SEED)
    with ExitStack() as stack:
        call, enter_step, enter_micro_batch = install(model, optimizer, stack)
        _seed(SEED + 1)
        for step in range(1, NUM_STEPS + 1):
            batches = [{"ids": torch.randint(VOCABULARY, size, generator=generator)} for size in model.sizes]
            is_whole = len(batches) == 1
            with enter_step(batches[0] if is_whole else None):
                for number, batch in enumerate(batches, 1):
                    with nullcontext() if is_whole else enter_micro_batch(batch):
                        loss = call(**batch)
                        tensors[f"step {step}: loss {number}"] = loss.detach()
                        try:
                            loss.backward()
                        except RuntimeError as error:  # plain autograd refuses saved tensors that were changed
                            if not re.search("in.?place", str(error)):
                                raise
                            return tensors | {f"step {step}: backward is refused": loss.detach()}
                for name, parameter in model.named_parameters():
                    gradient = parameter.grad
                    tensors[f"step {step}: gradient of {name}"] = None if gradient is None else gradient.clone()
                optimizer.step()
                optimizer.zero_grad()
    return tensors | {END + name: tensor for name, tensor in _state(model)}


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)


def _state(model: Model) -> Iterator[tuple[str, Tensor]]:
    """Yield copies of the weights, buffers, numbers and generators of the model, and of the global random states."""
    yield from ((name, tensor.detach().clone()) for name, tensor in model.state_dict().items())
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, (int, float)):
                yield f"{path}.{name}", torch.tensor(float(value))
            elif isinstance(value, torch.Generator):
                yield f"{path}.{name}", value.get_state()
    yield "torch's random state", torch.get_rng_state()
    yield "Python's random state", torch.tensor(random.getstate()[1])
    numpy_state: Any = numpy.random.get_state()
    yield "numpy's random state", torch.tensor([*map(int, numpy_state[1]), numpy_state[2]])


def compared(case: Case, method: str, plain: Tensors) -> Point:
    """Train `case` under `method`, and compare with plain training. An error of the training is a result too."""
    try:
        try:
            tensors = train(case, METHODS[method])
        except InfeasibleBudgetError:
            tensors = train(case, partial(_adacc, budget=1.0))
    except Exception as error:
        return {
            "status": "error",
            "reason": f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}",
        }
    errors = {name: _relative_error(tensors.get(name), expected) for name, expected in plain.items()}
    different = [name for name, error in errors.items() if error]
    largest = max((errors[name] for name in different if not name.startswith(END)), default=0.0)
    first = different[0] if different else ""
    return {"status": "measured", "differs": first, "relative_error": None if largest == inf else largest}


def _relative_error(tensor: Tensor | None, expected: Tensor | None) -> float:
    if tensor is None or expected is None or tensor.shape != expected.shape:
        return 0.0 if tensor is expected else inf
    if torch.equal(tensor, expected):
        return 0.0
    error = float((tensor.double() - expected.double()).norm() / expected.double().norm())
    return error if error < inf else inf


def cell(point: Point) -> str:
    """Return the text of a comparison for a table."""
    if point["status"] == "error" or not point["differs"]:
        return "error" if point["status"] == "error" else "exact"
    error = inf if point["relative_error"] is None else point["relative_error"]
    return f"{error:.2g} off" if error else "state off"


def table_and_notes(points: Mapping[str, Point]) -> tuple[list[dict[str, str]], list[str]]:
    """Return the rows of the table of a record's points, and the lines below the table. Plain training, compared with
    itself, has no column."""
    rows: dict[str, dict[str, str]] = {}
    for key, point in points.items():
        name, _, method = key.partition(": ")
        rows.setdefault(name, {"case": name})[method] = cell(point)
    methods = [method for method in next(iter(rows.values())) if method != "case"]
    counts = [f"{method} {sum(row[method] == 'exact' for row in rows.values())}" for method in methods]
    errors = [f"{key}: {point['reason']}" for key, point in points.items() if point["status"] == "error"]
    columns = ["case", *(method for method in methods if method != "plain")]
    last = f"Exact in {len(rows)} cases: {', '.join(counts)}."
    return [{column: row[column] for column in columns} for row in rows.values()], [*errors, LEGEND, last]


def report_text(points: Mapping[str, Point]) -> str:
    """Return the record's points as Markdown."""
    rows, notes = table_and_notes(points)
    for row in rows:
        project, _, number = CASES[row["case"]].thread.partition("#")
        row["thread"] = f"[{project}#{number}](https://github.com/{project}/issues/{number})"
    return "\n\n".join([markdown_table(rows), *notes]) + "\n"


def run_methods(methods: Sequence[str], output: Path | None = None, cases: Sequence[str] = tuple(CASES)) -> bool:
    """Train all `cases` in one thread under `methods`, and print a table. Return True if Adacc, if among them, is exact
    in each case.

    With `output`, also write the record as JSON. Raise ValueError for an unknown method.
    """
    unknown = [method for method in methods if method not in METHODS]
    if unknown:
        raise ValueError(f"--methods: unknown method {unknown[0]!r}; choose from {', '.join(METHODS)}")
    points: dict[str, Point] = {}
    with ExitStack() as stack:  # hides warnings of the methods
        stack.callback(logging.disable, logging.root.manager.disable)
        stack.enter_context(warnings.catch_warnings())
        logging.disable(logging.WARNING)
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        for name in (progress := stack.enter_context(tqdm(cases, unit="case"))):
            progress.set_description(name)
            plain = train(CASES[name], METHODS["plain"])
            points |= {f"{name}: {method}": compared(CASES[name], method, plain) for method in methods}
    rows, notes = table_and_notes(points)
    table = [[*rows[0]], *([*row.values()] for row in rows)]
    print(fit_lines("\n".join([*table_lines(table), "", *notes])))
    if output is not None:
        settings = Settings(runner="verify_methods", seed=SEED, output=output)
        write_json(output, make_record(settings, {"num_steps": NUM_STEPS}, {"points": points}, "complete"))
    return all(cell(point) == "exact" for key, point in points.items() if key.endswith(": adacc"))
