"""Tracing of Python code by Dynamo, torch.compile's front end, for its guards alone.

Every private name of Dynamo that the package uses stands in this file and in `dynamo_gaps`. Dynamo is imported when a
block is first traced, since the import takes about a second.
"""

from __future__ import annotations

import builtins
import logging
import os
import re
import types
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from threading import RLock
from typing import Any

import torch
from torch._C import _len_torch_dispatch_stack as num_dispatch_modes
from torch.utils._python_dispatch import _disable_current_modes

from adacc_hf.torch_glue.dynamo_gaps import ClassReads, classes_noted, dict_order_noted, identities_guarded, name_of

Scope = dict[str, Any]
"""The local variables of a traced call: `call`, `args` and `kwargs`."""


_TRACING = RLock()
"""Held while Dynamo is set up to trace: the set-up is of the process, not of a thread."""


class NotTraceableError(Exception):
    """Dynamo cannot trace the code whole; the message is the reason in one line."""


class TracedGuards:
    """Guards of one traced call, and readers of the numbers and tensors that no guard compares."""

    def __init__(self, manager: Any, global_scope: dict[str, Any], inputs: _Inputs, died: _Died) -> None:
        self._check = manager.check
        variables = {**manager.closure_vars, "G": global_scope}
        self.numbers = _reader(inputs.numbers, variables)
        """Function of the local variables that returns the numbers among the inputs of the graph."""
        self.tensors = _reader(inputs.tensors, variables)
        """Function of the local variables that returns the tensors among the inputs that are neither arguments nor
        reached by the names of modules."""
        self._environment = dict(_environment()) if inputs.reads_environment else None
        self._classes = ClassReads(inputs.class_reads)
        self._died = died
        self._manager = manager

    @property
    def is_alive(self) -> bool:
        """False once an object has died whose address a guard compares. Another object may lie there by now."""
        return not self._died

    def hold(self, scope: Scope) -> bool:
        """Return True if a call with these local variables takes the traced path.

        Dispatch modes that only observe, such as a memory meter, are left out of the check.
        """
        if not self.is_alive:
            return False
        if self._environment is not None and self._environment != _environment():
            return False  # Dynamo guards a variable that was there, and none that was not
        if not self._classes.are_current():
            return False
        if not num_dispatch_modes():
            return self._check(scope)
        with _disable_current_modes():
            return self._check(scope)

    def first_failure(self, scope: Scope) -> str:
        """Return the first guard that a call with these local variables fails, in Dynamo's words; "" if none fails."""
        parts = self._manager.check_verbose(scope).verbose_code_parts
        return str(parts[0]).partition("#")[0].strip() if parts else ""


def trace(scope: Scope, ignored: Iterable[Callable[..., Any]] = ()) -> TracedGuards:
    """Trace `call(*args, **kwargs)` without running its operators, and return its guards.

    Calls of loggers, of `warnings.warn` and of the `ignored` functions, which return nothing, are left out of the
    trace. Sizes of tensors are symbols, and sizes that happen to be equal get different symbols. Code that asks whether
    it is being compiled is told no, since the traced path has to be the one that runs. Raises NotTraceableError if
    Dynamo cannot trace all of the call.
    """
    dynamo = _dynamo()
    inputs = _Inputs()

    def backend(graph: Any, example_inputs: Any) -> Callable[..., Any]:
        inputs.note_inputs(graph)
        return _stop

    # Each trace has a code object of its own, since Dynamo keeps a limited number of traces for each.
    probe = types.FunctionType(_probe.__code__.replace(), _probe_globals(dynamo.is_traced))
    try:
        with _TRACING, dynamo.tracing(ignored, inputs) as died:
            options: dict[str, Any] = {"guard_filter_fn": inputs.filter_guards}
            torch.compile(probe, backend=backend, dynamic=True, fullgraph=True, options=options)(**scope)
    except _StoppedError:
        pass
    except _NotTracedError as error:
        raise NotTraceableError("Dynamo is switched off (TORCHDYNAMO_DISABLE, torch.compiler.set_stance)") from error
    except Exception as error:  # Dynamo raises whatever its own code or the traced code runs into
        inner = getattr(error, "inner_exception", None)  # of the backend
        raise NotTraceableError(str(inner) if type(inner) is NotTraceableError else _in_one_line(error)) from error
    entries = dynamo.cache_entries(probe.__code__)
    if len(entries) != 1:
        raise NotTraceableError("Dynamo finds no tensor operator in it")
    return TracedGuards(entries[0].guard_manager, probe.__globals__, inputs, died)


def _probe_globals(is_traced: Callable[[], bool]) -> dict[str, Any]:
    return {"__builtins__": builtins, "is_traced": is_traced, "NotTraced": _NotTracedError}


_LOGGERS = ("torch._dynamo", "torch._guards", "torch._subclasses", "torch.fx", "torch.__trace")
_IGNORED = "ignore_logging_functions"
"""Dynamo's setting for functions that it leaves out of a trace."""
_METHODS = ("debug", "info", "warning", "error", "critical", "log", "warning_once", "warning_advice", "info_once")
"""Methods of loggers. The last three are Transformers' own."""
_UNUSED_GUARDS = ("._backward_hooks", "._backward_pre_hooks", "_hooks_with_kwargs")
"""Ends of the names of guards on module attributes that change no operator of forward: hooks on backward, and how hooks
on forward are called, which matters only if there are such hooks, and they have guards of their own."""


def _messages() -> Iterator[Callable[..., Any]]:
    """Yield the functions that write messages. Transformers adds some to loggers when it is imported."""
    yield warnings.warn
    yield from (getattr(logging.Logger, name) for name in _METHODS if hasattr(logging.Logger, name))


class _StoppedError(Exception):
    """Raised in place of running a traced graph."""


class _NotTracedError(Exception):
    """Raised if Python runs the probe, since Dynamo did not trace it."""


def _stop(*_: Any) -> Any:
    raise _StoppedError


def _probe(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not is_traced():  # type: ignore[name-defined]  # noqa: F821  # a global that `trace` gives each copy
        raise NotTraced  # type: ignore[name-defined]  # noqa: F821
    return call(*args, **kwargs)


class _Died(list[Any]):
    """References to the watched objects that have died."""

    def __init__(self) -> None:
        super().__init__()
        self._watched: dict[int, Callable[[], Any]] = {}

    def watch(self, obj: Any) -> None:
        """Watch `obj`. Keep it alive if it cannot be weakly referenced."""
        try:
            self._watched.setdefault(id(obj), weakref.ref(obj, self.append))
        except TypeError:
            self._watched.setdefault(id(obj), lambda: obj)


def _reader(names: Sequence[str], variables: dict[str, Any]) -> Callable[[Scope], tuple[Any, ...]]:
    """Return a function of the local variables `L` that evaluates Dynamo's expressions."""
    items = "".join(f"{name}, " for name in dict.fromkeys(names))
    return eval(f"lambda L: ({items})", variables)


_NAMED = re.compile(r"L\['(args'\]\[0\]|call'\]\.__self__)(\._modules\['[^']*'\])*\._(parameters|buffers)\['[^']*'\]$")
"""The expression of a parameter or buffer that is reached by the names of modules."""
_ARGUMENT = re.compile(r"L\['(args|kwargs)'\](\[[^\]]*\])*$")


class _Inputs:
    """Inputs of a traced graph that no guard compares, as Dynamo's expressions."""

    def __init__(self) -> None:
        self.numbers: list[str] = []
        """Places of inputs that are neither tensors nor their sizes, and of what no guard compares: the sign of a zero,
        a list in a tuple, the order of a dict."""
        self.tensors: list[str] = []
        """Tensors that are neither arguments nor reached by the names of modules."""
        self.reads_environment = False
        """Whether the path reads `os.environ`."""
        self.class_reads: dict[tuple[type, str], None] = {}
        """(class, name) of what was looked up on classes."""

    def filter_guards(self, guards: Sequence[Any]) -> list[bool]:
        """Return for each guard whether it is checked. Half of all guards say that a module has no hooks."""
        for guard in guards:
            self.reads_environment |= ".environ" in guard.name
            name = guard.orig_guard.name
            if name and guard.guard_type in _EQUAL and _may_equal_another(guard.value):
                self.numbers.append(name)
        return [not guard.name.endswith(_UNUSED_GUARDS) for guard in guards]

    def note_inputs(self, graph: Any) -> None:
        """Note the inputs of a traced graph."""
        from torch._dynamo import source as sources

        for node in graph.graph.nodes:
            argument: Any = node.meta.get("grapharg") if node.op == "placeholder" else None
            source = getattr(argument, "source", None)
            if source is None or isinstance(source, sources.TensorPropertySource):
                continue
            if isinstance(source, sources.RandomValueSource):
                raise NotTraceableError("a number is drawn from Python's random generator")
            if isinstance(source, (sources.NumpyTensorSource, sources.FloatTensorSource)):
                self.numbers.append(name_of(source.base))
            elif argument.pass_arg_as_tensor or isinstance(argument.example, torch.SymInt | int | float):
                self.numbers.append(name_of(source))
            elif not (_NAMED.match(name_of(source)) or _ARGUMENT.match(name_of(source))):
                self.tensors.append(name_of(source))


def _environment() -> dict[Any, Any]:
    """Return the variables of the environment as Python keeps them: decoding them takes longer than all guards."""
    variables: Any = os.environ
    return getattr(variables, "_data", variables)


_EQUAL = ("CONSTANT_MATCH", "EQUALS_MATCH")
"""Guards that compare a value with what it was, by `==`, and its type."""


def _may_equal_another(value: Any) -> bool:
    """Return True for a value that is equal to one of other bits or types, or to itself after a change."""
    if isinstance(value, tuple | frozenset):
        return any(isinstance(item, bool | float | list | dict | set) or _may_equal_another(item) for item in value)
    if isinstance(value, complex):
        return 0 in (value.real, value.imag)
    return isinstance(value, list | dict | set) or (isinstance(value, float) and value == 0)


def _in_one_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}"[:200] if lines else type(error).__name__


@cache
def _dynamo() -> Any:
    """Import Dynamo, and return the functions that `trace` needs of it."""
    import torch._dynamo
    from torch._dynamo import config
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list
    from torch._dynamo.guards import CheckFunctionManager
    from torch._dynamo.variables.torch import tracing_state_functions
    from torch._guards import TracingContext
    from torch.fx.experimental import _config as shape_config

    settings = {
        # A float would be an input in place of a guard, and so would its effect on what is compared.
        "specialize_float": True,
        # Hooks run with the block; FSDP2's modules have attributes as others do.
        "skip_nnmodule_hook_guards": False,
        "skip_fsdp_guards": False,
        # Guards of attributes are checked one by one. The version of a dict, which would be checked in their place,
        # misses a write to an object that is reached in two ways.
        "use_recursive_dict_tags_for_guards": False,
        # DDP's buckets would cut the graph.
        "optimize_ddp": False,
        "suppress_errors": False,
    }
    settings = {name: value for name, value in settings.items() if hasattr(config, name)}

    @contextmanager
    def tracing(ignored: Iterable[Callable[..., Any]], inputs: _Inputs) -> Iterator[list[Any]]:
        """While open, Dynamo traces as `trace` says.

        Yield a list that is filled when an object dies whose address a guard compares.
        """
        died = _Died()
        original = CheckFunctionManager.id_ref

        def id_ref(self: Any, obj: Any, *args: Any) -> int:
            died.watch(obj)
            return original(self, obj, *args)

        states = tracing_state_functions()
        before = dict(states)
        with ExitStack() as stack:
            stack.enter_context(config.patch(settings | {_IGNORED: {*_messages(), *ignored}}))
            stack.enter_context(shape_config.patch(use_duck_shape=False))  # type: ignore[attr-defined]
            stack.enter_context(_disable_current_modes())
            stack.enter_context(_quiet())
            stack.enter_context(_grouped_products_of_any_dtype())
            stack.enter_context(identities_guarded(inputs.numbers))
            stack.enter_context(classes_noted(inputs.class_reads, inputs.numbers))
            stack.enter_context(dict_order_noted(inputs.numbers))
            CheckFunctionManager.id_ref = id_ref  # type: ignore[method-assign,assignment]
            states.update({question: False for question, answer in before.items() if answer is True})
            try:
                yield died
            finally:
                states.update(before)
                CheckFunctionManager.id_ref = original  # type: ignore[method-assign]

    @torch._dynamo.assume_constant_result
    def is_traced() -> bool:
        return TracingContext.try_get() is not None

    return types.SimpleNamespace(tracing=tracing, is_traced=is_traced, cache_entries=_debug_get_cache_entry_list)


@contextmanager
def _grouped_products_of_any_dtype() -> Iterator[None]:
    """While open, torch infers the shape of a grouped matrix product for any dtype.

    By itself torch does so for bfloat16 alone, though its kernels take other dtypes too.
    """
    from torch import _meta_registrations

    original = getattr(_meta_registrations, "_meta_grouped_mm_common", None)
    if original is None:
        yield
        return

    def common(left: Any, right: Any, *args: Any, **kwargs: Any) -> Any:
        if left.dtype is not right.dtype or left.dtype not in (torch.float32, torch.float16):
            return original(left, right, *args, **kwargs)
        return original(left.bfloat16(), right.bfloat16(), *args, **kwargs).to(left.dtype)

    _meta_registrations._meta_grouped_mm_common = common  # type: ignore[assignment]
    try:
        yield
    finally:
        _meta_registrations._meta_grouped_mm_common = original


@contextmanager
def _quiet() -> Iterator[None]:
    """While open, Dynamo neither logs nor warns. It would warn of `.grad` of tensors that have none, say."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
