"""Tracing of Python code by Dynamo, torch.compile's front end, to obtain Dynamo's guards.

All private names of Dynamo that the package uses are in this file and in `dynamo_gaps`. Dynamo is imported when a block
is first traced, because the import takes about a second.
"""

from __future__ import annotations

import builtins
import logging
import re
import types
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from operator import attrgetter
from threading import RLock
from typing import Any

import torch
from torch._C import _autograd
from torch.autograd.function import Function
from torch.utils._python_dispatch import _disable_current_modes

from adacc_hf.torch_glue.dynamo_gaps import (
    class_read_patches,
    dict_order_patches,
    identity_patches,
    more_operators,
    name_of,
    opaque_functions,
)
from adacc_hf.torch_glue.memory import garbage_collection_disabled
from adacc_hf.torch_glue.private import num_dispatch_modes
from adacc_hf.torch_glue.watchers import patched

Scope = dict[str, Any]
"""Local variables of the function that Dynamo traces: `call`, `args` and `kwargs` of a block's call."""


_TRACING = RLock()
"""Lock held while Dynamo's settings are changed for a trace, because the settings are global to the process."""


class NotTraceableError(Exception):
    """Error raised if Dynamo cannot trace the code of a call completely. The message is the reason, in one line."""


class TracedGuards:
    """Dynamo's guards for one traced call of a block, and functions that read the unguarded inputs of its graph."""

    def __init__(
        self,
        manager: Any,
        global_scope: dict[str, Any],
        scope: Scope,
        inputs: _UnguardedInputs,
        dead_objects: _DeadObjects,
    ) -> None:
        self._check = manager.check
        variables = {**manager.closure_vars, "G": global_scope}
        self.numbers = _compile_getter(dict.fromkeys(inputs.numbers), variables)
        """Function from a call's local variables (`Scope`) to the numbers that are inputs of the traced graph."""
        self.tensors = _compile_getter(inputs.tensors, variables)
        """Function from a call's local variables (`Scope`) to those input tensors of the traced graph that are neither
        arguments nor parameters or buffers reached by name."""
        self.inputs = _compile_getter(inputs.all, variables)
        """Function from a call's local variables (`Scope`) to all inputs of `graph`."""
        for node in inputs.graph.graph.nodes:
            node.meta.clear()  # fakes of results
        self.graph: Callable[..., Any] = inputs.graph.forward
        """The traced graph: a function of its inputs."""
        self.is_partial = bool(inputs.met) or any(map(_hides_code, inputs.graph.graph.nodes))
        """True if the trace left out the code of an `autograd.Function` or of a function that other code has allowed in
        the graph, which no guard covers."""
        self._properties = _compile_getter(dict.fromkeys(inputs.properties), variables)
        self._expected = self._read_properties(scope)
        if self._expected is None:
            raise NotTraceableError("an object that its trace reads cannot be read again")
        self._classes = ClassReads(inputs.class_reads)
        self._dead_objects = dead_objects
        self._manager = manager

    def hold(self, scope: Scope) -> bool:
        """Return True if all guards accept a call with the local variables `scope`. Observing modes are disabled."""
        if self._dead_objects:  # another object may get the address of one whose address a guard compares
            return False
        if not self._classes.are_current():
            return False
        with _disable_current_modes() if num_dispatch_modes() else nullcontext():
            return self._check(scope) and self._read_properties(scope) == self._expected

    def _read_properties(self, scope: Scope) -> str | None:
        """Return the values of the properties that Dynamo does not guard, or None if one does not exist any more."""
        try:
            return repr(self._properties(scope))
        except Exception:  # an attribute is missing, or the user's code raises
            return None

    def first_failure(self, scope: Scope) -> str:
        """Return Dynamo's description of the first guard that rejects a call in `scope`, or ""."""
        parts = self._manager.check_verbose(scope).verbose_code_parts
        return str(parts[0]).partition("#")[0].strip() if parts else ""


_ABSENT = object()
_CALL_METHODS = ("__call__", "_call_impl")
"""Methods through which Python calls a module's forward. Dynamo does not look them up."""


class ClassReads:
    """Guard on the attributes that traced code looked up on classes: `reads`, as (class, name)."""

    def __init__(self, reads: Iterable[tuple[type, str]]) -> None:
        by_class: dict[type, list[str]] = {}
        for owner, name in reads:
            by_class.setdefault(owner, [*_CALL_METHODS] if issubclass(owner, torch.nn.Module) else []).append(name)
        paths = {
            owner: list(filter(None, (_stable_path(owner, n) for n in names))) for owner, names in by_class.items()
        }
        self._getters = [(weakref.ref(owner), attrgetter(*of_class)) for owner, of_class in paths.items() if of_class]
        self._before = self._values()

    def _values(self) -> list[Any]:
        return [getter(owner()) for owner, getter in self._getters]

    def are_current(self) -> bool:
        """Return True if all attributes in the guard still have the values that they had when the code was traced."""
        try:
            return self._values() == self._before  # compares identities first, which is cheap
        except Exception:  # an attribute or a class does not exist any more, or a new value cannot be compared
            return False


def _stable_path(owner: type, name: str) -> str | None:
    """Return the path of a class attribute that gives the same object at each look-up (no bound method), or None."""
    value = next((vars(base)[name] for base in owner.__mro__ if name in vars(base)), _ABSENT)
    if value is _ABSENT or not name.isidentifier():
        return None
    if isinstance(value, classmethod):
        return f"{name}.__func__"
    is_stable = isinstance(value, types.FunctionType | property | staticmethod) or not hasattr(type(value), "__get__")
    return name if is_stable else None


def trace(
    scope: Scope,
    ignored: Iterable[Callable[..., Any]] = (),
    opaque: Mapping[type[Function], Any] | None = None,
    has_counters: bool = False,
) -> TracedGuards:
    """Trace a call with Dynamo, without running its operators, and return the guards of the traced path.

    Functions in `opaque` are not traced (`opaque_functions`). If `has_counters`, integers of modules are inputs of the
    graph, as sizes are. Otherwise they are guards, and a counter of calls would make each call another path.

    `scope` contains the function, `args` and `kwargs` of the call. Calls of loggers, of `warnings.warn` and of the
    `ignored` functions are left out of the trace; the ignored functions must return None. Sizes of tensors are symbols,
    and sizes that happen to be equal get different symbols. Queries such as `torch.compiler.is_compiling` return False,
    because the traced path must be the path that runs later. Raise NotTraceableError if Dynamo cannot trace the whole
    call.
    """
    from torch._dynamo import assume_constant_result, trace_rules
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list
    from torch._guards import TracingContext

    inputs = _UnguardedInputs()

    def backend(graph: Any, example_inputs: Any) -> Callable[..., Any]:
        inputs.record_inputs(graph)
        return _stop_trace

    # Each trace has its own code object, because Dynamo keeps a limited number of traces for each one.
    is_traced = assume_constant_result(lambda: TracingContext.try_get() is not None)
    names = {"__builtins__": builtins, "is_traced": is_traced, "NotTraced": _NotTracedError}
    probe = types.FunctionType(_probe.__code__.replace(), names)
    try:
        with (
            _TRACING,
            opaque_functions(opaque or {}, trace_rules._allowed_callable_ids, inputs.met),
            _dynamo_prepared(ignored, inputs, has_counters) as dead_objects,
        ):
            options: dict[str, Any] = {"guard_filter_fn": inputs.filter_guards}
            compiled = torch.compile(probe, backend=backend, dynamic=True, fullgraph=True, options=options)
            compiled(**scope)
    except _StoppedError:
        pass
    except _NotTracedError as error:
        raise NotTraceableError(
            "Dynamo is switched off: unset TORCHDYNAMO_DISABLE, and remove torch.compiler.set_stance"
        ) from error
    except Exception as error:  # any error of Dynamo's own code or of the traced code
        inner = getattr(error, "inner_exception", None)  # raised by the backend
        text = str(inner) if type(inner) is NotTraceableError else _in_one_line(error)
        drop_frames(error)
        raise NotTraceableError(text) from None
    entries = _debug_get_cache_entry_list(probe.__code__)
    if len(entries) != 1:
        raise NotTraceableError("Dynamo finds no tensor operator in it")
    return TracedGuards(entries[0].guard_manager, probe.__globals__, scope, inputs, dead_objects)


def drop_frames(error: BaseException | None) -> None:
    """Drop the frames of `error` and of its causes, which would keep the model's tensors alive."""
    while error is not None and error.__traceback__ is not None:
        error.__traceback__ = None
        drop_frames(error.__cause__)
        error = error.__context__


GUARDS_PARAMETERS = torch.__version__ >= "2.13"
"""True if Dynamo guards the layout of parameters and `requires_grad`. Changes of both pass the guards of torch 2.11."""
_LOGGERS = ("torch._dynamo", "torch._guards", "torch._subclasses", "torch.fx", "torch.__trace")
_IGNORED = "ignore_logging_functions"
"""Name of Dynamo's setting that lists the functions to leave out of a trace."""
_METHODS = ("debug", "info", "warning", "error", "critical", "log", "warning_once", "warning_advice", "info_once")
"""Names of the methods with which loggers log. Transformers adds the last three methods."""
_UNUSED_GUARDS = ("._backward_hooks", "._backward_pre_hooks", "_hooks_with_kwargs", "._in_forward")
"""Suffixes of guards on module attributes that do not affect the operators of forward: backward hooks, the calling
conventions of forward hooks (existing hooks have their own guards), and a flag of DeepSpeed's tables of parameters, by
which a forward gathers a parameter that is not gathered yet."""


class _StoppedError(Exception):
    """Exception that the backend of a Dynamo trace raises instead of running the traced graph."""


class _NotTracedError(Exception):
    """Exception that the traced function raises if Python runs it. Dynamo has then not traced the function."""


def _stop_trace(*_: Any) -> Any:
    raise _StoppedError


def _probe(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not is_traced():  # type: ignore[name-defined]  # noqa: F821  # a global that `trace` sets for each copy
        raise NotTraced  # type: ignore[name-defined]  # noqa: F821
    return call(*args, **kwargs)


class _DeadObjects(list[Any]):
    """List of weak references to those watched objects that have died."""

    def __init__(self) -> None:
        super().__init__()
        self._watched: dict[int, Callable[[], Any]] = {}

    def watch(self, obj: Any) -> None:
        """Watch `obj`. Keep it alive if weak references to it are not possible."""
        try:
            self._watched.setdefault(id(obj), weakref.ref(obj, self.append))
        except TypeError:
            self._watched.setdefault(id(obj), lambda: obj)


def _compile_getter(names: Iterable[str], variables: dict[str, Any]) -> Callable[[Scope], tuple[Any, ...]]:
    """Compile Dynamo's sources `names` to one function from a `Scope` to their values."""
    items = "".join(f"{name}, " for name in names)
    return eval(f"lambda L: ({items})", variables)


_NAMED = re.compile(r"L\['(args'\]\[0\]|call'\]\.__self__)(\._modules\['[^']*'\])*\._(parameters|buffers)\['[^']*'\]$")
"""Pattern of an expression that reaches a parameter or buffer through the names of modules in the block."""
_ARGUMENT = re.compile(r"L\['(args|kwargs)'\](\[[^\]]*\])*$")


class _UnguardedInputs:
    """Inputs of one traced graph that no guard compares, as Dynamo's expressions of their sources."""

    def __init__(self) -> None:
        self.numbers: list[str] = []
        """Expressions of inputs that are neither tensors nor sizes."""
        self.properties: list[str] = []
        """Expressions of what decides the path, but no guard compares: the sign of a zero, a list in a tuple, the order
        of a dict, the absence of an environment variable."""
        self.tensors: list[str] = []
        """Expressions of tensors that are neither arguments nor parameters or buffers."""
        self.all: list[str] = []
        """Expressions of all inputs of the graph, in order."""
        self.graph: Any = None
        self.met: set[type[Function]] = set()
        self.class_reads: dict[tuple[type, str], None] = {}
        """(class, name) of each attribute that the traced code looked up on a class."""

    def filter_guards(self, guards: Sequence[Any]) -> list[bool]:
        """Return for each guard if it must be checked. Add to `properties` the values that guards compare inexactly."""
        for guard in guards:
            if ".environ" in guard.name:
                self.properties.append(_ENVIRONMENT)
            name = guard.orig_guard.name
            if name and guard.guard_type in _EQUAL and _may_equal_another(guard.value):
                self.properties.append(name)
        return [not guard.name.endswith(_UNUSED_GUARDS) for guard in guards]

    def record_inputs(self, graph: Any) -> None:
        """Append to `numbers` and `tensors` the expressions of those inputs of a traced graph that no guard checks."""
        from torch._dynamo import source as sources

        self.graph = graph
        for node in graph.graph.nodes:
            argument: Any = node.meta.get("grapharg") if node.op == "placeholder" else None
            source = getattr(argument, "source", None)
            if source is not None:
                self.all.append(name_of(source))
            if source is None or isinstance(source, sources.TensorPropertySource) or not _decides_tensors(node):
                continue
            if isinstance(source, sources.RandomValueSource):
                raise NotTraceableError("a number is drawn from Python's random generator")
            if isinstance(source, (sources.NumpyTensorSource, sources.FloatTensorSource)):
                self.numbers.append(name_of(source.base))
            elif argument.pass_arg_as_tensor or isinstance(argument.example, torch.SymInt | int | float):
                self.numbers.append(name_of(source))
            elif not (_NAMED.match(name_of(source)) or _ARGUMENT.match(name_of(source))):
                self.tensors.append(name_of(source))


def _decides_tensors(node: Any) -> bool:
    """Return True if a tensor of the graph follows from `node`. Nothing does from a counter of calls."""
    is_tensor = isinstance(node.meta.get("example_value"), torch.Tensor)
    return is_tensor or any(_decides_tensors(user) for user in node.users if user.op != "output")


_ENVIRONMENT = "hash(frozenset(__import__('os').environ._data.items()))"
"""Expression of all environment variables, undecoded, as decoding would take longer than all of Dynamo's guards."""
_EQUAL = ("CONSTANT_MATCH", "EQUALS_MATCH")
"""Names of Dynamo's guard types that compare the type of a value, and the value itself by `==`."""


def _may_equal_another(value: Any) -> bool:
    """Return True if a guard that compares by `==` may accept a different value: -0.0 == 0.0, True == 1, containers."""
    if isinstance(value, tuple | frozenset):
        return any(isinstance(item, bool | float | list | dict | set) or _may_equal_another(item) for item in value)
    if isinstance(value, complex):
        return 0 in (value.real, value.imag)
    return isinstance(value, list | dict | set) or (isinstance(value, float) and value == 0)


def _hides_code(node: Any) -> bool:
    """Return True if `node` calls a Python function of other code, such as one that `allow_in_graph` names. The
    operators of einops depend on their arguments only."""
    module = getattr(node.target, "__module__", None) or ""
    is_function = isinstance(node.target, types.FunctionType) and not module.startswith(("torch.", "einops."))
    return node.op == "call_function" and (is_function or "flat_apply" in str(node.target))


def _in_one_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}"[:200] if lines else type(error).__name__


_SETTINGS = {
    # Otherwise a float would be an input of the graph instead of a guard, and so would results of comparisons.
    "specialize_float": True,
    "allow_rnn": True,
    # Hooks run with the block. Attributes of FSDP2's modules need guards as in other modules.
    "skip_nnmodule_hook_guards": False,
    "skip_fsdp_guards": False,
    # Check guards of attributes one by one. Otherwise Dynamo would check versions of dicts, which miss a write to an
    # object that is reachable in two ways.
    "use_recursive_dict_tags_for_guards": False,
    # Dynamo would split the graph at DDP's buckets.
    "optimize_ddp": False,
    # With symbolic sizes, nearly no operator's result is found in this cache, and filling it takes a third of a trace.
    "fake_tensor_cache_enabled": False,
    "suppress_errors": False,
}
"""Dynamo's settings during a trace. Some do not exist in every release."""


@contextmanager
def _dynamo_prepared(
    ignored: Iterable[Callable[..., Any]], inputs: _UnguardedInputs, has_counters: bool
) -> Iterator[_DeadObjects]:
    """Change Dynamo's settings inside the `with` block. Yield the list of compared objects that have died."""
    from torch._dynamo import config
    from torch._dynamo.guards import CheckFunctionManager
    from torch._dynamo.variables.builder import VariableBuilder
    from torch._dynamo.variables.torch import tracing_state_functions
    from torch.fx.experimental import _config as shape_config

    dead_objects = _DeadObjects()
    original = CheckFunctionManager.id_ref

    def id_ref(self: Any, obj: Any, *args: Any) -> int:
        dead_objects.watch(obj)
        return original(self, obj, *args)

    messages = [getattr(logging.Logger, name) for name in _METHODS if hasattr(logging.Logger, name)]
    settings: dict[str, Any] = {name: value for name, value in _SETTINGS.items() if hasattr(config, name)}
    settings |= {_IGNORED: {warnings.warn, *messages, *ignored}, "allow_unspec_int_on_nn_module": has_counters}
    states = tracing_state_functions()
    before = dict(states)
    with ExitStack() as stack:
        stack.enter_context(config.patch(settings))
        stack.enter_context(shape_config.patch(use_duck_shape=False))  # type: ignore[attr-defined]
        stack.enter_context(_disable_current_modes())
        stack.enter_context(_quiet_dynamo())
        stack.enter_context(garbage_collection_disabled())  # a collection takes as long as a trace
        stack.enter_context(more_operators())
        stack.enter_context(
            patched(
                [
                    *identity_patches(inputs.properties),
                    *class_read_patches(inputs.class_reads, inputs.properties),
                    *dict_order_patches(inputs.properties),
                    (CheckFunctionManager, "id_ref", id_ref),
                    # It would set an attribute of the model's tensors, which would be pickled with them.
                    (VariableBuilder, "mark_static_input", lambda *_, **__: None),
                ]
            )
        )
        states.update({question: False for question, answer in before.items() if answer is True})
        hooks_error = _autograd._saved_tensors_hooks_get_disabled_error_message()
        try:
            yield dead_objects
        finally:
            states.update(before)
            if hooks_error is None:  # else a trace of torch.func.grad leaves hooks disabled in the whole process
                _autograd._saved_tensors_hooks_enable()


@contextmanager
def _quiet_dynamo() -> Iterator[None]:
    """Silence Dynamo's logs and all warnings, such as that about `.grad` of non-leaf tensors."""
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
