"""Guards for what Dynamo does not guard: identities, classes, the order of dicts, Python's own modules.

Dynamo assumes that nobody replaces a method, adds an attribute to a class or a name to an object's `__dict__`, or
changes what Python's library reads (`os.getenv`). Of two objects compared by `is` it guards only the types. The
contexts here note or guard such reads while Dynamo traces. They note expressions in `numbers`, whose values are part of
the key of a call.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from keyword import iskeyword
from typing import Any

import torch

_CALLS = ("__call__", "_call_impl")
"""What calls a module's forward: Dynamo goes there straight."""


class ClassReads:
    """What a trace looked up on classes: methods, properties and attributes."""

    def __init__(self, reads: Iterable[tuple[type, str]]) -> None:
        by_class: dict[type, list[str]] = {}
        for owner, name in reads:
            by_class.setdefault(owner, []).append(name)
        lines, items, variables = [], [], {}
        for number, (owner, names) in enumerate(by_class.items()):
            variables[f"c{number}"] = weakref.ref(owner)
            lines.append(f"k{number} = c{number}()")
            names = [*names, *(_CALLS if issubclass(owner, torch.nn.Module) else ())]
            items += [f"k{number}.{name}{end}" for name in names for end in _ends(owner, name)]
        code = "".join(f"    {line}\n" for line in lines)
        exec(f"def values():\n{code}    return ({''.join(f'{item}, ' for item in items)})", variables)
        self._values: Callable[[], tuple[Any, ...]] = variables["values"]  # type: ignore[assignment]
        self._before = self._values()

    def are_current(self) -> bool:
        """Return True if the same is found there as when traced."""
        try:
            return self._values() == self._before  # compares identities first, which is cheap
        except Exception:  # a class lost one of them, or is gone, or has another that cannot be compared
            return False


def _ends(owner: type, name: str) -> tuple[str, ...]:
    """Return the suffixes after which `owner.name` evaluates to the same object each time; () if there are none."""
    for base in owner.__mro__:
        if name in vars(base) and name.isidentifier() and not iskeyword(name):
            value = vars(base)[name]
            if isinstance(value, classmethod):
                return (".__func__",)
            is_itself = isinstance(value, types.FunctionType | property | staticmethod)
            return ("",) if is_itself or not hasattr(type(value), "__get__") else ()
    return ()


@contextmanager
def identities_guarded(numbers: list[str]) -> Iterator[None]:
    """While open, two objects that the traced code compares by `is`, or as keys, are guarded by their addresses.

    For two tensors `a is b` is noted in `numbers`.
    """
    try:
        from torch._dynamo.variables import builtin, object_protocol
        from torch._dynamo.variables.lazy import LazyVariableTracker
        from torch._dynamo.variables.user_defined import UserDefinedObjectVariable
    except ImportError:  # before torch 2.13
        yield
        return

    def guarded(original: Callable[..., Any], num_objects: int, by_value: bool = True) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            for variable in args[:num_objects]:
                _guard_address(variable, by_value)
            return original(*args, **kwargs)

        return call

    compare = object_protocol.vt_identity_compare
    example, compared = getattr(builtin, "extract_fake_example_value", None), []

    def tensor_to_compare(node: Any, *args: Any) -> Any:
        """Return a node's example tensor. Dynamo calls this only for the two operands of `is`, one after the other."""
        compared.append(getattr(node.meta.get("grapharg"), "source", None))
        if len(compared) % 2 == 0 and None not in compared[-2:]:
            numbers.append(" is ".join(map(name_of, compared[-2:])))
        assert example is not None  # else it is never called
        return example(node, *args)

    replaced: list[tuple[Any, str, Any]] = [
        (object_protocol, "vt_identity_compare", guarded(compare, 2, by_value=False)),
        (builtin, "vt_identity_compare", guarded(compare, 2, by_value=False)),
        (UserDefinedObjectVariable, "is_python_equal", guarded(UserDefinedObjectVariable.is_python_equal, 2)),
        (UserDefinedObjectVariable, "hash_impl", guarded(UserDefinedObjectVariable.hash_impl, 1)),
        (builtin, "extract_fake_example_value", tensor_to_compare),
        # A key that Dynamo has not realized yet would be hashed without any guard.
        (LazyVariableTracker, "is_hashable_lazy", lambda self: False),
    ]
    with _replaced(replaced):
        yield


@contextmanager
def classes_noted(class_reads: dict[tuple[type, str], None], numbers: list[str]) -> Iterator[None]:
    """While open, what the traced code looks up on classes is noted, and globals of Python's own modules are guarded.

    A hash of the names in each `__dict__` that is read is noted in `numbers`.
    """
    from torch._dynamo import symbolic_convert
    from torch._dynamo.variables import dicts, user_defined

    def noting(original: Callable[..., Any], class_of: Callable[[Any], type], place: int) -> Callable[..., Any]:
        def look_up(*args: Any) -> Any:
            class_reads[class_of(args[0].value), args[place]] = None
            return original(*args)

        return look_up

    replaced: list[tuple[Any, str, Any]] = [(symbolic_convert, "is_stdlib", lambda _: False)]
    for name, place in (("lookup_class_mro_attr", 1), ("get_source_by_walking_mro", 2)):
        for owner, class_of in (
            (user_defined.UserDefinedObjectVariable, type),
            (user_defined.UserDefinedClassVariable, lambda value: value),
        ):
            if name in vars(owner):
                replaced.append((owner, name, noting(vars(owner)[name], class_of, place)))
    if hasattr(dicts, "DunderDictVariable"):
        create = dicts.DunderDictVariable.create

        def noted(tx: Any, variable: Any) -> Any:
            if variable.source is not None:
                numbers.append(f"hash(tuple({name_of(variable.source)}.__dict__))")
            return create(tx, variable)

        replaced.append((dicts.DunderDictVariable, "create", staticmethod(noted)))
    with _replaced(replaced):
        yield


_GO_THROUGH = ("unpack_var_sequence", "tp_iter_impl", "nb_or_impl")
"""Methods of Dynamo's variables that iterate a whole dict."""
_GO_THROUGH_BY_NAME = ("copy", "popitem", "update", "extend", "__iter__", "__or__", "__ior__")
"""Methods of dicts, and of lists, that iterate a whole dict."""


@contextmanager
def dict_order_noted(numbers: list[str]) -> Iterator[None]:
    """While open, a hash of the names, in order, of each dict that the traced code iterates is noted in `numbers`.

    Dynamo guards neither names nor order of a dict that is copied or made a list, and no order of an OrderedDict.
    """
    from torch._dynamo.variables import dicts, lists

    def note(variable: Any) -> None:
        variable = getattr(variable, "dv_dict", variable)  # of a view
        name = "" if variable.source is None else name_of(variable.source)
        if isinstance(variable, dicts.ConstDictVariable) and name not in ("", "L['kwargs']"):
            numbers.append(f"hash(tuple({name}))")

    def noting(original: Callable[..., Any]) -> Callable[..., Any]:
        def go_through(self: Any, *args: Any, **kwargs: Any) -> Any:
            note(self)
            return original(self, *args, **kwargs)

        return go_through

    def noting_by_name(original: Callable[..., Any]) -> Callable[..., Any]:
        def call_method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
            if name in _GO_THROUGH_BY_NAME:
                for variable in (self, *args):
                    note(variable.realize())
            return original(self, tx, name, args, kwargs)

        return call_method

    owners = [owner for owner in vars(dicts).values() if isinstance(owner, type) and owner.__module__ == dicts.__name__]
    replaced: list[tuple[Any, str, Any]] = []
    for owner in (*owners, lists.ListVariable):
        replaced += [(owner, name, noting(vars(owner)[name])) for name in _GO_THROUGH if name in vars(owner)]
        if "call_method" in vars(owner):
            replaced.append((owner, "call_method", noting_by_name(vars(owner)["call_method"])))
    with _replaced(replaced):
        yield


@contextmanager
def _replaced(replacements: Sequence[tuple[Any, str, Any]]) -> Iterator[None]:
    """While open, attributes (owner, name) have other values, where the owner has them at all."""
    existing = [(owner, name, value) for owner, name, value in replacements if name in vars(owner)]
    before = [(owner, name, vars(owner)[name]) for owner, name, _ in existing]
    try:
        for owner, name, value in existing:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def _guard_address(variable: Any, by_value: bool) -> None:
    """Have the trace guard the address of the object behind a variable of Dynamo's.

    Constants have guards of their value. Where objects are compared `by_value`, so have those with a hash of their own.
    """
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.variables.user_defined import UserDefinedObjectVariable

    if variable.source is None or variable.is_python_constant() or variable.is_tensor():
        return
    is_plain = isinstance(variable, UserDefinedObjectVariable) and type(variable.value).__hash__ is object.__hash__
    if is_plain or not by_value:
        install_guard(variable.source.make_guard(GuardBuilder.ID_MATCH))


def name_of(source: Any) -> str:
    """Return the expression of a source: a property in torch 2.13, a method before."""
    return source.name if isinstance(source.name, str) else source.name()
