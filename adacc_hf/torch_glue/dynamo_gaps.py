"""Parts that Dynamo lacks: guards on identities, classes, the order of dicts and the standard library's globals; shape
inference for grouped matrix products of some dtypes; traces of an `autograd.Function` that writes memory by address.

Dynamo assumes that methods are not replaced, that classes and `__dict__`s get no new names, and that values read by the
standard library (`os.getenv`) do not change. For two objects compared by `is`, Dynamo guards only their types. While
Dynamo traces a call, the patches in this module (for `patched`) either guard such a read, or append a Python
expression of it to the list `properties`, whose values `TracedGuards.hold` compares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch.autograd.function import Function

from adacc_hf.torch_glue.function_calls import has_setup
from adacc_hf.torch_glue.private import storage_key, tree_leaves, tree_map
from adacc_hf.torch_glue.tensors import storage_of
from adacc_hf.torch_glue.watchers import Patch, patched


def _noted(original: Callable[..., Any], note: Callable[..., Any]) -> Callable[..., Any]:
    """Return `original`, changed to call `note` with its positional arguments first."""

    def call(*args: Any, **kwargs: Any) -> Any:
        note(*args)
        return original(*args, **kwargs)

    return call


def identity_patches(properties: list[str]) -> list[Patch]:
    """Return the patches that guard the identity of objects that traced code compares by `is` or uses as keys. For two
    tensors that are compared, "a is b" is appended to `properties` instead."""
    try:
        from torch._dynamo.variables import builtin, object_protocol
        from torch._dynamo.variables.lazy import LazyVariableTracker
        from torch._dynamo.variables.user_defined import UserDefinedObjectVariable
    except ImportError:  # before torch 2.13
        return []

    def guard_operands(first: Any, second: Any, *_: Any) -> None:
        guard_identity(first)
        guard_identity(second)

    sources: list[Any] = []

    def note_tensor(node: Any, *_: Any) -> None:
        """Note the comparison at the second operand of `is`."""
        sources.append(getattr(node.meta.get("grapharg"), "source", None))
        if len(sources) % 2 == 0 and None not in sources[-2:]:
            properties.append(" is ".join(map(name_of, sources[-2:])))

    compare = _noted(object_protocol.vt_identity_compare, guard_operands)
    patches: list[Patch] = [
        (object_protocol, "vt_identity_compare", compare),
        (builtin, "vt_identity_compare", compare),
        # Otherwise a key that Dynamo has not realized yet would be hashed without any guard.
        (LazyVariableTracker, "is_hashable_lazy", lambda self: False),
    ]
    if hasattr(builtin, "extract_fake_example_value"):
        example = builtin.extract_fake_example_value
        patches.append((builtin, "extract_fake_example_value", _noted(example, note_tensor)))

    # `==` calls is_python_equal(self, other) in torch 2.13, and tp_richcompare_impl(self, tx, other, op) since 2.14.
    for name, places in (("is_python_equal", (0, 1)), ("tp_richcompare_impl", (0, 2)), ("hash_impl", (0,))):
        if name in vars(UserDefinedObjectVariable):

            def guard_values(*args: Any, places: tuple[int, ...] = places) -> None:
                for place in places:
                    guard_identity(args[place], by_value=True)

            original = vars(UserDefinedObjectVariable)[name]
            patches.append((UserDefinedObjectVariable, name, _noted(original, guard_values)))
    return patches


def class_read_patches(class_reads: dict[tuple[type, str], None], properties: list[str]) -> list[Patch]:
    """Return the patches that add each attribute that traced code looks up on a class to `class_reads`, as (class,
    name), and a hash of the names in each `__dict__` that the code reads to `properties`. Globals of the standard
    library are guarded too.
    """
    from torch._dynamo import symbolic_convert
    from torch._dynamo.variables import dicts, user_defined

    def note_of_object(variable: Any, *args: Any) -> None:
        class_reads[type(variable.value), args[-1]] = None  # the name

    def note_of_class(variable: Any, *args: Any) -> None:
        class_reads[variable.value, args[-1]] = None

    patches: list[Patch] = [(symbolic_convert, "is_stdlib", lambda _: False)]
    for owner, note in (
        (user_defined.UserDefinedObjectVariable, note_of_object),
        (user_defined.UserDefinedClassVariable, note_of_class),
    ):
        for name in {"lookup_class_mro_attr", "get_source_by_walking_mro"} & vars(owner).keys():
            patches.append((owner, name, _noted(vars(owner)[name], note)))
    if hasattr(dicts, "DunderDictVariable"):

        def note_dict(_: Any, variable: Any) -> None:
            if variable.source is not None:
                properties.append(f"hash(tuple({name_of(variable.source)}.__dict__))")

        create = _noted(dicts.DunderDictVariable.create, note_dict)
        patches.append((dicts.DunderDictVariable, "create", staticmethod(create)))
    return patches


_ITERATING = ("unpack_var_sequence", "tp_iter_impl", "nb_or_impl")
"""Names of methods that iterate over a whole dict, in the classes with which Dynamo represents variables."""
_ITERATING_METHODS = ("copy", "popitem", "update", "extend", "__iter__", "__or__", "__ior__")
"""Names of the methods of dicts and lists that iterate over a whole dict."""


def dict_order_patches(properties: list[str]) -> list[Patch]:
    """Return the patches that append a hash of the names, in order, of each dict that traced code iterates."""
    from torch._dynamo.variables import dicts, lists

    def note(variable: Any, *_: Any) -> None:
        variable = getattr(variable, "dv_dict", variable)  # the dict of a view
        name = "" if variable.source is None else name_of(variable.source)
        if isinstance(variable, dicts.ConstDictVariable) and name not in ("", "L['kwargs']"):
            # The identifiers of a module's hooks differ between blocks, in equal orders.
            keys = f"map(sorted({name}).index, {name})" if name.endswith("_hooks") else name
            properties.append(f"hash(tuple({keys}))")

    def note_method(variable: Any, tx: Any, name: str, args: Any, *_: Any) -> None:
        for each in (variable, *args) if name in _ITERATING_METHODS else ():
            note(each.realize())

    owners = [owner for owner in vars(dicts).values() if isinstance(owner, type) and owner.__module__ == dicts.__name__]
    notes = {**dict.fromkeys(_ITERATING, note), "call_method": note_method}
    return [
        (owner, name, _noted(vars(owner)[name], notes[name]))
        for owner in (*owners, lists.ListVariable)
        for name in notes.keys() & vars(owner).keys()
    ]


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

    Collectives, and meshes of ranks, ask whether they are traced, which `trace` answers with False. torch's
    shape inference for grouped products supports only bfloat16, although its kernels support the other dtypes.
    """
    from torch import _meta_registrations
    from torch.distributed import _functional_collectives, device_mesh

    original: Any = getattr(_meta_registrations, "_meta_grouped_mm_common", None)

    def infer_shape(a: Any, b: Any, *args: Any, **kwargs: Any) -> Any:
        if a.dtype is not b.dtype or a.dtype not in (torch.float32, torch.float16):
            return original(a, b, *args, **kwargs)
        return original(a.bfloat16(), b.bfloat16(), *args, **kwargs).to(a.dtype)

    return patched(
        [
            (_meta_registrations, "_meta_grouped_mm_common", infer_shape),
            (_functional_collectives, "_are_we_tracing", lambda: True),
            (device_mesh, "_get_pg_from_name", lambda mesh, name: mesh._pg_registry[name]),
        ]
    )


def name_of(source: Any) -> str:
    """Return the Python expression of `source`, Dynamo's description of where a value comes from."""
    return source.name if isinstance(source.name, str) else source.name()  # a method before torch 2.13


# Traces in which an `autograd.Function` is one node, because Dynamo stops at code that writes memory by address, such
# as kernels of C++ extensions. During a trace, the forward of such a Function is replaced by a function that answers
# with fake tensors. Their shapes follow from a real call: each size of a result is a size of the Function's arguments,
# or a constant.


class Result(NamedTuple):
    """Description of one tensor that a Function returned."""

    argument: int | None  # index of the tensor argument that was returned, perhaps changed in place
    sizes: tuple[int | tuple[int, int], ...]  # each is (index of a tensor argument, dimension), or a number
    dtype: torch.dtype


def describe_results(args: tuple[Any, ...], result: Any) -> Any:
    """Return the `result` of a Function's call with each tensor replaced by its `Result`."""
    tensors = _tensors_in(args)
    storages = [storage_key(storage_of(tensor)) for tensor in tensors]
    # Reversed, so that the first argument with a size wins. Whole shapes precede single sizes.
    places = {n: (i, d) for i, tensor in reversed([*enumerate(tensors)]) for d, n in enumerate(tensor.shape) if n > 1}
    shapes = {tensor.shape: i for i, tensor in reversed([*enumerate(tensors)])}

    def describe(tensor: Any) -> Any:
        if not isinstance(tensor, torch.Tensor):
            return tensor
        key, same = storage_key(storage_of(tensor)), shapes.get(tensor.shape)
        if same is not None:
            sizes: Any = tuple((same, d) for d in range(tensor.dim()))
        else:
            sizes = tuple(places.get(n, n) for n in tensor.shape)
        return Result(storages.index(key) if key in storages else None, sizes, tensor.dtype)

    return tree_map(describe, result)


@contextmanager
def opaque_functions(results: Mapping[type[Function], Any], allowed: Any, met: set[type[Function]]) -> Iterator[None]:
    """Let Dynamo take each Function in `results` (from `describe_results`) as one node inside the `with` block.

    `allowed` is Dynamo's set of the ids of callables that it does not trace into. Functions that a trace meets are
    added to `met`. An object that is an argument becomes None, and its identity is guarded. No graph can hold it.
    """
    from torch._dynamo.variables import AutogradFunctionVariable, ConstantVariable, UserDefinedObjectVariable

    def call_method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name == "apply" and self.fn_cls in results:
            args = [arg.realize() for arg in args]
            for place, arg in enumerate(args):
                if isinstance(arg, UserDefinedObjectVariable):
                    guard_identity(arg)  # none is needed if traced code creates the object
                    args[place] = ConstantVariable(None)
        return original(self, tx, name, args, kwargs)

    original = AutogradFunctionVariable.call_method
    before = {function: vars(function).get("forward") for function in results}
    added = [id(function) for function in results if id(function) not in allowed]
    try:
        for number in added:
            allowed.add(number)
        for function, described in results.items():
            function.forward = staticmethod(_answer(function, described, met))  # type: ignore[method-assign]
        with patched([(AutogradFunctionVariable, "call_method", call_method)]):
            yield
    finally:
        for number in added:
            allowed.remove(number)
        for function, forward in before.items():
            if forward is None:
                del function.forward
            else:
                function.forward = forward  # type: ignore[method-assign]


def _answer(function: type[Function], described: Any, met: set[type[Function]]) -> Callable[..., Any]:
    def forward(*args: Any) -> Any:
        met.add(function)
        tensors = _tensors_in(args if has_setup(function) else args[1:])

        def create(result: Any) -> Any:
            if not isinstance(result, Result):
                return result
            if result.argument is not None:
                return tensors[result.argument]
            sizes = [n if isinstance(n, int) else tensors[n[0]].shape[n[1]] for n in result.sizes]
            return tensors[0].new_empty(sizes, dtype=result.dtype)

        return tree_map(create, described, is_leaf=lambda item: isinstance(item, Result))

    return forward


def _tensors_in(args: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
