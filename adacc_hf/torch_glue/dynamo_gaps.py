"""Additional guards on data that Dynamo does not guard: object identities, classes, the order of dicts, the standard
library's globals. Also shape inference for grouped matrix products, which torch lacks for some dtypes.

Dynamo assumes that methods are not replaced, that classes and `__dict__`s get no new names, and that values read by the
standard library (`os.getenv`) do not change. For two objects compared by `is`, Dynamo guards only their types. While
Dynamo traces a call, the patches in this module (for `patched`) either guard such a read, or append a Python
expression of it to the list `numbers`. The call's key contains the value of each expression in this list.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from adacc_hf.torch_glue.watchers import Patch, patched


def identity_patches(numbers: list[str]) -> list[Patch]:
    """Return the patches that guard the identity of objects that traced code compares by `is` or uses as keys. For two
    tensors that are compared, "a is b" is appended to `numbers` instead."""
    try:
        from torch._dynamo.variables import builtin, object_protocol
        from torch._dynamo.variables.lazy import LazyVariableTracker
        from torch._dynamo.variables.user_defined import UserDefinedObjectVariable
    except ImportError:  # before torch 2.13
        return []

    def guarded(original: Callable[..., Any], places: Sequence[int], by_value: bool = True) -> Callable[..., Any]:
        """Return `original`, a function of Dynamo, changed to guard the identity of the arguments at `places`."""

        def call(*args: Any, **kwargs: Any) -> Any:
            for place in places:
                guard_identity(args[place], by_value)
            return original(*args, **kwargs)

        return call

    compare = object_protocol.vt_identity_compare
    example, sources = getattr(builtin, "extract_fake_example_value", None), []

    def tensor_to_compare(node: Any, *args: Any) -> Any:
        """Return the example tensor of `node`. At the second operand of `is`, note the comparison."""
        sources.append(getattr(node.meta.get("grapharg"), "source", None))
        if len(sources) % 2 == 0 and None not in sources[-2:]:
            numbers.append(" is ".join(map(name_of, sources[-2:])))
        assert example is not None  # else Dynamo does not call this function
        return example(node, *args)

    patches: list[Patch] = [
        (object_protocol, "vt_identity_compare", guarded(compare, (0, 1), by_value=False)),
        (builtin, "vt_identity_compare", guarded(compare, (0, 1), by_value=False)),
        (builtin, "extract_fake_example_value", tensor_to_compare),
        # Otherwise a key that Dynamo has not realized yet would be hashed without any guard.
        (LazyVariableTracker, "is_hashable_lazy", lambda self: False),
    ]
    # `==` calls is_python_equal(self, other) in torch 2.13, and tp_richcompare_impl(self, tx, other, op) since 2.14.
    for name, places in (("is_python_equal", (0, 1)), ("tp_richcompare_impl", (0, 2)), ("hash_impl", (0,))):
        if name in vars(UserDefinedObjectVariable):
            original = vars(UserDefinedObjectVariable)[name]
            patches.append((UserDefinedObjectVariable, name, guarded(original, places)))
    return patches


def class_read_patches(class_reads: dict[tuple[type, str], None], numbers: list[str]) -> list[Patch]:
    """Return the patches that add each attribute that traced code looks up on a class to `class_reads`, as (class,
    name), and a hash of the names in each `__dict__` that the code reads to `numbers`. Globals of the standard library
    are guarded too.
    """
    from torch._dynamo import symbolic_convert
    from torch._dynamo.variables import dicts, user_defined

    def recording(original: Callable[..., Any], class_of: Callable[[Any], type]) -> Callable[..., Any]:
        def look_up(*args: Any) -> Any:
            class_reads[class_of(args[0].value), args[-1]] = None  # the name
            return original(*args)

        return look_up

    patches: list[Patch] = [(symbolic_convert, "is_stdlib", lambda _: False)]
    for name in ("lookup_class_mro_attr", "get_source_by_walking_mro"):
        for owner, class_of in (
            (user_defined.UserDefinedObjectVariable, type),
            (user_defined.UserDefinedClassVariable, lambda value: value),
        ):
            if name in vars(owner):
                patches.append((owner, name, recording(vars(owner)[name], class_of)))
    if hasattr(dicts, "DunderDictVariable"):
        create = dicts.DunderDictVariable.create

        def create_and_record(tx: Any, variable: Any) -> Any:
            if variable.source is not None:
                numbers.append(f"hash(tuple({name_of(variable.source)}.__dict__))")
            return create(tx, variable)

        patches.append((dicts.DunderDictVariable, "create", staticmethod(create_and_record)))
    return patches


_ITERATING = ("unpack_var_sequence", "tp_iter_impl", "nb_or_impl")
"""Names of methods that iterate over a whole dict, in the classes with which Dynamo represents variables."""
_ITERATING_METHODS = ("copy", "popitem", "update", "extend", "__iter__", "__or__", "__ior__")
"""Names of the methods of dicts and lists that iterate over a whole dict."""


def dict_order_patches(numbers: list[str]) -> list[Patch]:
    """Return the patches that append a hash of the names, in order, of each dict that traced code iterates."""
    from torch._dynamo.variables import dicts, lists

    def record(variable: Any) -> None:
        variable = getattr(variable, "dv_dict", variable)  # the dict of a view
        name = "" if variable.source is None else name_of(variable.source)
        if isinstance(variable, dicts.ConstDictVariable) and name not in ("", "L['kwargs']"):
            numbers.append(f"hash(tuple({name}))")

    def recording(original: Callable[..., Any]) -> Callable[..., Any]:
        def iterate(self: Any, *args: Any, **kwargs: Any) -> Any:
            record(self)
            return original(self, *args, **kwargs)

        return iterate

    def recording_by_name(original: Callable[..., Any]) -> Callable[..., Any]:
        def call_method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
            if name in _ITERATING_METHODS:
                for variable in (self, *args):
                    record(variable.realize())
            return original(self, tx, name, args, kwargs)

        return call_method

    owners = [owner for owner in vars(dicts).values() if isinstance(owner, type) and owner.__module__ == dicts.__name__]
    patches: list[Patch] = []
    for owner in (*owners, lists.ListVariable):
        patches += [(owner, name, recording(vars(owner)[name])) for name in _ITERATING if name in vars(owner)]
        if "call_method" in vars(owner):
            patches.append((owner, "call_method", recording_by_name(vars(owner)["call_method"])))
    return patches


def guard_identity(variable: Any, by_value: bool = False) -> None:
    """Install a guard on the identity of the object that `variable` represents in Dynamo's trace. Dynamo itself guards
    constants and tensors. If the traced code compares objects `by_value`, by `==` and hash, only objects that inherit
    `object.__hash__`, which is their identity, get the guard."""
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.variables.user_defined import UserDefinedObjectVariable

    if variable.source is None or variable.is_python_constant() or variable.is_tensor():
        return
    is_plain = isinstance(variable, UserDefinedObjectVariable) and type(variable.value).__hash__ is object.__hash__
    if is_plain or not by_value:
        install_guard(variable.source.make_guard(GuardBuilder.ID_MATCH))


def more_operators() -> AbstractContextManager[None]:
    """Let Dynamo trace collectives, and grouped matrix products in float32 and float16, inside the `with` block.

    Dynamo traces a collective by a function that asks whether it is traced, which `trace` answers with False. torch's
    shape inference for grouped products supports only bfloat16, although its kernels support the other dtypes.
    """
    from torch import _meta_registrations
    from torch.distributed import _functional_collectives

    original: Any = getattr(_meta_registrations, "_meta_grouped_mm_common", None)

    def infer_shape(a: Any, b: Any, *args: Any, **kwargs: Any) -> Any:
        if a.dtype is not b.dtype or a.dtype not in (torch.float32, torch.float16):
            return original(a, b, *args, **kwargs)
        return original(a.bfloat16(), b.bfloat16(), *args, **kwargs).to(a.dtype)

    return patched(
        [
            (_meta_registrations, "_meta_grouped_mm_common", infer_shape),
            (_functional_collectives, "_are_we_tracing", lambda: True),
        ]
    )


def name_of(source: Any) -> str:
    """Return the Python expression of `source`, Dynamo's description of where a value comes from."""
    return source.name if isinstance(source.name, str) else source.name()  # a method before torch 2.13
