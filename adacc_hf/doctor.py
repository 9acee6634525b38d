"""`adacc doctor`: what this machine has, what of it Adacc can use, what is slow here and why, and what to change."""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

OPERATORS = 200
"""That are launched one after the other, to tell how long the host takes for one."""
SLOW_HOST_US = 20.0
"""A host that takes longer for an operator is busy elsewhere, or slow."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    what: str
    found: str
    advice: str | None = None
    """What to change where something is slow or missing; None where all is well."""


def add_parser(commands: Any) -> None:
    """Add `doctor` to the commands of `adacc`."""
    parser = commands.add_parser("doctor", help="print what this machine has, what is slow here, and what to change")
    parser.add_argument(
        "folder", type=Path, nargs="?", metavar="RUN", help="a run's folder: which of its blocks cost more, and why"
    )
    parser.set_defaults(run=_doctor)


def _doctor(arguments: argparse.Namespace) -> str:
    findings = [*examine(), *(() if arguments.folder is None else examine_blocks(arguments.folder))]
    width = max(len(finding.what) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{'ok' if finding.advice is None else '!!'}  {finding.what:{width}}  {finding.found}")
        if finding.advice is not None:
            lines.append(f"{'':{width + 4}}  {finding.advice}")
    advised = sum(finding.advice is not None for finding in findings)
    lines.append(f"{advised} of {len(findings)} could be better" if advised else "nothing to change")
    return "\n".join(lines)


def examine() -> list[Finding]:
    """Everything that is looked at, in the order in which it is told."""
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_device = _on_gpu(device) if device.type == "cuda" else _on_cpu()
    return [*_packages(), *on_device, _launches(device), _tracing(), _prices(), _pictures()]


def examine_blocks(run: Path) -> list[Finding]:
    """Return a finding for each kind of blocks in the profile of a run.

    Raises FileNotFoundError if the folder has no profile.
    """
    from adacc_hf.artifacts.files import PROFILE_FILE
    from adacc_hf.artifacts.profile import Profile
    from adacc_hf.reports.explain import describe_calls

    profile = Profile.load(run / PROFILE_FILE)
    findings = []
    for index, kind in enumerate(profile.kinds):
        names = [block.name for block in profile.blocks if block.kind == index]
        notes = describe_calls(kind)
        found = f"{kind.block_class}, {names[0]} and {len(names) - 1} others: {'; '.join(notes) or 'guarded by Dynamo'}"
        advice = "rewrite what is named there, or leave the class out with AdaccConfig(block_classes=...)"
        findings.append(Finding("blocks", found, advice if notes else None))
    return findings


def _tracing() -> Finding:
    """Whether Dynamo can trace, which the guards of a block come from."""
    import torch

    from adacc_hf.torch_glue.dynamo import NotTraceableError, trace

    begin = time.perf_counter()
    try:
        trace({"call": torch.sin, "args": (torch.ones(2),), "kwargs": {}})
    except NotTraceableError as error:
        return Finding(
            "guards",
            f"no block can be traced: {error}",
            "unset TORCHDYNAMO_DISABLE and set_stance: until then each call is compared with its tape, which takes "
            "some 10 us an operator",
        )
    return Finding("guards", f"traced by Dynamo; its import and first trace took {time.perf_counter() - begin:.1f} s")


def _packages() -> Iterator[Finding]:
    """The versions that are installed; of what is missing, those that this package asks for."""
    yield Finding("python", platform.python_version())
    asked = {requirement.name: requirement for requirement in map(Requirement, requires("adacc_hf") or ())}
    for name in ("torch", "transformers", "accelerate", "pulp", "highspy"):
        try:
            yield Finding(name, version(name))
        except PackageNotFoundError:
            yield Finding(name, "not installed", f"pip install '{asked[name]}'")


def _on_gpu(device: Any) -> Iterator[Finding]:
    import torch

    from adacc_hf.torch_glue.memory import FRAGMENTS_HINT, segments_expand

    properties = torch.cuda.get_device_properties(device)
    gib = properties.total_memory / 2**30
    yield Finding("device", f"{properties.name}, {gib:.0f} GiB; not yet measured on a GPU")
    torch.empty(1, device=device)  # there is a segment to look at
    expands = segments_expand()
    yield Finding(
        "allocator",
        "expandable segments" if expands else "segments of fixed sizes",
        None if expands else FRAGMENTS_HINT,
    )
    has_triton = find_spec("triton") is not None
    yield Finding(
        "codecs",
        "Triton kernels" if has_triton else "no Triton: the first tensor to be compressed ends training",
        None if has_triton else 'pip install triton, or leave "compress" out of actions',
    )
    plans = properties.major >= 9 and torch.backends.cuda.cudnn_sdp_enabled()
    yield Finding(
        "attention",
        "cuDNN's may be taken, which plans anew for each length" if plans else "does not plan for each length",
        "where lengths change, torch.backends.cuda.enable_cudnn_sdp(False), or pad to few lengths "
        "(pad_to_multiple_of); where they do not, leave it"
        if plans
        else None,
    )


def _on_cpu() -> Iterator[Finding]:
    import torch

    from adacc_hf.kernels import _cpu

    yield Finding("device", f"CPU, {torch.get_num_threads()} threads of {os.cpu_count()} processors; no GPU is seen")
    is_built = _cpu.library() is not None
    yield Finding(
        "codecs",
        "C++ kernels" if is_built else "plain torch, ten and more times slower: their C++ could not be built",
        None if is_built else _cpu.TO_BUILD,
    )


def _launches(device: Any) -> Finding:
    """How long the host takes to ask for an operator: what small models wait for."""
    import torch

    tensor = torch.zeros(1, device=device)
    microseconds = []
    for _ in range(5):
        begin = time.perf_counter()
        for _ in range(OPERATORS):
            tensor.add_(1)
        microseconds.append((time.perf_counter() - begin) / OPERATORS * 1e6)
    least = min(microseconds)
    return Finding(
        "host",
        f"{least:.1f} us an operator: a model whose operators take less waits for the host",
        f"more than {SLOW_HOST_US:.0f} us: other programs are at work, or the processor saves power; larger batches or "
        "torch_compile=True hide it"
        if least > SLOW_HOST_US
        else None,
    )


def _prices() -> Finding:
    """Whether what is measured can be kept for `reuse_prices=True`."""
    from adacc_hf.artifacts.files import PROFILES_VARIABLE
    from adacc_hf.price.profile_cache import ProfileCache

    folder = ProfileCache().folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return Finding("prices", f"{folder} cannot be written ({error.strerror})", f"set {PROFILES_VARIABLE} to one")
    return Finding("prices", str(folder))


def _pictures() -> Finding:
    has_matplotlib = find_spec("matplotlib") is not None
    return Finding(
        "pictures",
        "matplotlib" if has_matplotlib else "no matplotlib: `adacc report` cannot draw",
        None if has_matplotlib else "pip install 'adacc_hf[plot]'",
    )
