"""Checks of this machine's packages, devices and speed (`adacc doctor`), with advice on missing or slow parts."""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from typing import Any

from packaging.requirements import Requirement

NUM_LAUNCHES = 200
"""Number of operator launches that are timed together, to measure the host's time per launch."""
SUBJECT_WIDTH = len("transformers")
"""Width in characters of the longest subject of a finding."""
SLOW_HOST_US = 20.0
"""Maximum time in microseconds that the host should take per operator launch. If a launch takes longer, the host is
slow or busy with other programs."""


@dataclass(frozen=True)
class Finding:
    """Result of one check of `adacc doctor`."""

    subject: str
    status: str
    advice: str | None = None
    """Suggested change if the check found something missing or slow. None if the check passed."""


def add_parser(commands: Any) -> None:
    """Add `doctor` to the argument parsers of the `adacc` command."""
    parser = commands.add_parser("doctor", help="check packages, devices and speed of this machine, and give advice")
    parser.set_defaults(run=_doctor_command)


def _doctor_command(_: argparse.Namespace) -> Iterator[str]:
    num_findings = num_advised = 0
    for finding in examine():
        yield f"{'ok' if finding.advice is None else '!!'}  {finding.subject:{SUBJECT_WIDTH}}  {finding.status}"
        if finding.advice is not None:
            yield f"{'':{SUBJECT_WIDTH + 4}}  {finding.advice}"
        num_findings += 1
        num_advised += finding.advice is not None
    yield f"{num_advised} of {num_findings} checks have advice" if num_advised else "all checks passed"


def examine() -> Iterator[Finding]:
    """Run all checks of this machine, and yield their findings in the order of printing.

    The versions of packages come first, because torch is imported only after them.
    """
    yield from _check_packages()
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    yield from examine_gpu(device) if device.type == "cuda" else _check_cpu()
    yield _launch_overhead(device)
    yield _check_tracing()
    yield _check_plotting()


def _check_tracing() -> Finding:
    """Check that Dynamo can trace. Dynamo finds the guards (conditions) under which a block's recorded operators are
    valid."""
    import torch

    from adacc_hf.torch_glue.dynamo import NotTraceableError, trace

    begin = time.perf_counter()
    try:
        trace({"call": torch.sin, "args": (torch.ones(2),), "kwargs": {}})
    except NotTraceableError as error:
        return Finding(
            "guards",
            "Dynamo cannot trace, so each block runs plainly or under torch's checkpoint",
            str(error),
        )
    return Finding("guards", f"traced by Dynamo; its import and first trace took {time.perf_counter() - begin:.1f} s")


def _check_packages() -> Iterator[Finding]:
    yield Finding("python", platform.python_version())
    try:
        declared = requires("adacc_hf") or []
    except PackageNotFoundError:
        yield Finding(
            "adacc_hf",
            "not installed, so the releases of the packages below are not checked",
            "run pip install -e . in the checkout",
        )
        declared = []
    requirements = {requirement.name: requirement for requirement in map(Requirement, declared)}
    for name in ("torch", "transformers", "accelerate", "pulp", "highspy"):
        requirement = requirements.get(name, Requirement(name))
        try:
            installed = version(name)
        except PackageNotFoundError:
            yield Finding(name, "not installed", f"pip install '{requirement}'")
            continue
        is_supported = requirement.specifier.contains(installed, prereleases=True)
        yield Finding(name, installed, None if is_supported else f"pip install '{requirement}'")


def examine_gpu(device: Any) -> Iterator[Finding]:
    """Check the GPU, and the codecs' kernels for it, for `adacc doctor`."""
    import torch

    from adacc_hf.torch_glue.memory import FRAGMENTATION_HINT, has_expandable_segments

    properties = torch.cuda.get_device_properties(device)
    gib = properties.total_memory / 2**30
    yield Finding("device", f"{properties.name}, {gib:.0f} GiB; not yet measured on a GPU")
    torch.empty(1, device=device)  # allocate a segment, so that its kind can be read
    expands = has_expandable_segments()
    yield Finding(
        "allocator",
        "expandable segments" if expands else "segments of fixed sizes",
        None if expands else FRAGMENTATION_HINT,
    )
    has_triton = find_spec("triton") is not None
    yield Finding(
        "codecs",
        "Triton kernels" if has_triton else "no Triton: training fails at the first tensor to compress",
        None if has_triton else 'pip install triton, or leave "compress" out of actions',
    )
    may_use_cudnn = properties.major >= 9 and torch.backends.cuda.cudnn_sdp_enabled()
    yield Finding(
        "attention",
        "torch may choose cuDNN's kernel, which makes a new plan for each sequence length"
        if may_use_cudnn
        else "kernels without a plan for each sequence length",
        "if sequence lengths vary, call torch.backends.cuda.enable_cudnn_sdp(False), or pad to few lengths "
        "(pad_to_multiple_of); if all sequences have one length, change nothing"
        if may_use_cudnn
        else None,
    )


def _check_cpu() -> Iterator[Finding]:
    import torch

    from adacc_hf.kernels import _cpu

    yield Finding("device", f"CPU, {torch.get_num_threads()} threads of {os.cpu_count()} processors; torch sees no GPU")
    is_built = _cpu.library() is not None
    yield Finding(
        "codecs",
        "C++ kernels" if is_built else "plain torch, at least ten times slower: the C++ kernels could not be built",
        None if is_built else _cpu.TO_BUILD,
    )


def _launch_overhead(device: Any) -> Finding:
    import torch

    tensor = torch.zeros(1, device=device)
    microseconds = []
    for _ in range(5):
        begin = time.perf_counter()
        for _ in range(NUM_LAUNCHES):
            tensor.add_(1)
        microseconds.append((time.perf_counter() - begin) / NUM_LAUNCHES * 1e6)
    fastest = min(microseconds)
    return Finding(
        "host",
        f"{fastest:.1f} us to launch an operator; models with shorter operators wait for the host",
        f"the launch takes more than {SLOW_HOST_US:.0f} us: other programs are running, or the processor saves power; "
        "larger batches or torch_compile=True hide the overhead"
        if fastest > SLOW_HOST_US
        else None,
    )


def _check_plotting() -> Finding:
    has_matplotlib = find_spec("matplotlib") is not None
    return Finding(
        "pictures",
        "matplotlib" if has_matplotlib else "no matplotlib: `adacc report` cannot draw pictures",
        None if has_matplotlib else "pip install 'adacc_hf[plot]'",
    )
