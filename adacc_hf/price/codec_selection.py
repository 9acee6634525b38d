"""Selection of codecs by the role of an activation (Adacc paper, section 3.2), with costs measured on recorded
tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.kind_profile import CodecOption, Value
from adacc_hf.artifacts.profile import Profile
from adacc_hf.artifacts.size_model import Shapes
from adacc_hf.kernels.codecs import MASK, PRECISE, Codec, codec_type, codecs_suiting, get_codec, replacements
from adacc_hf.price.precision_sensitive import precision_sensitive_values
from adacc_hf.price.timing import Bottleneck, time_of
from adacc_hf.tape.execution_plan import encode_view
from adacc_hf.tape.replay import view
from adacc_hf.tape.tape import Tape
from adacc_hf.torch_glue.tensors import relative_error

OUTLIER_SHARE = 0.01
"""Share of outlier channels that is assumed where no data is available."""


def storable_values(tape: Tape) -> list[int]:
    """Return the values that a policy may store: values that the block computed and saved, and its inputs.

    The list is empty if the block's operators cannot be replayed.
    """
    if tape.untrusted is not None:
        return []
    saved = [v for v in tape.saved_values() if tape.values[v].source is None]
    inputs = [value.index for value in tape.values if tape.is_block_input(value.index)]
    return sorted({*saved, *inputs})


def codec_candidates(tape: Tape, config: AdaccConfig) -> dict[int, list[str]]:
    """Return the names of the codecs for each value that a policy may store, by value index."""
    sensitive = precision_sensitive_values(tape)
    return {value: _codec_names(tape, value, config, value in sensitive) for value in storable_values(tape)}


def _codec_names(tape: Tape, value: int, config: AdaccConfig, is_sensitive: bool) -> list[str]:
    record, role = tape.values[value], role_of(tape, value)
    if record.nbytes < config.min_compress_bytes or not record.is_encodable or role == "parameter":
        return []
    is_lossless = role == MASK and (config.codecs is None or config.exact)
    if not is_lossless and ("compress" not in config.actions or is_sensitive):
        return []
    return codecs_of_role(role, config)


def count_outlier_channels(tape: Tape, bases: Sequence[torch.Tensor], config: AdaccConfig) -> dict[int, int]:
    """Return the number of outlier channels (Adacc paper, equation 1) of each activation in `outlier_codecs`."""
    if not config.outliers:
        return {}
    return {
        value: codec.count_outliers(view(bases[value], encode_view(tape, value)))
        for value, codec in outlier_codecs(tape, config).items()
    }


def outlier_codecs(tape: Tape, config: AdaccConfig) -> dict[int, Codec]:
    """Return the codec that stores outlier channels separately, for each activation that may use it."""
    return {
        value: make_codec(name, 0)
        for value, names in codec_candidates(tape, config).items()
        for name in names
        if codec_type(name).keeps_outliers
    }


def make_codec(name: str, num_outliers: int) -> Codec:
    """Return the codec `name`. `num_outliers` only matters to codecs that store outliers separately."""
    return get_codec(name, **({"num_outliers": num_outliers} if codec_type(name).keeps_outliers else {}))


def codec_options(
    tape: Tape, bases: Sequence[torch.Tensor], config: AdaccConfig, outliers: Mapping[int, int], resource: Bottleneck
) -> dict[int, tuple[CodecOption, ...]]:
    """Return the codecs with costs, measured on the recorded tensors, for each value that a policy may store.

    `resource` selects the measured time: the device's or the host's.
    """
    options = {}
    for value, names in codec_candidates(tape, config).items():
        tensor = view(bases[value], encode_view(tape, value))
        codecs = [make_codec(name, outliers.get(value, 0)) for name in names]
        suitable_codecs = [c for c in codecs if c.supports(tuple(tensor.shape), tensor.dtype) and c.accepts(tensor)]
        if config.codecs is None:
            suitable_codecs = [_most_accurate(codec, role_of(tape, value), tensor) for codec in suitable_codecs]
        options[value] = tuple(_price_codec(codec, tensor, resource) for codec in suitable_codecs)
    return options


def _most_accurate(codec: Codec, role: str, tensor: torch.Tensor) -> Codec:
    """Return the most accurate codec on `tensor`: `codec`, or a codec that may replace `codec` on tensors of `role`."""
    replacement_codecs = [get_codec(name) for name in replacements(codec.name, role)]
    replacement_codecs = [other for other in replacement_codecs if other.supports(tuple(tensor.shape), tensor.dtype)]
    if not replacement_codecs:
        return codec
    return min(
        [codec, *replacement_codecs],
        key=lambda each: float(relative_error([tensor], [each.decode(each.encode(tensor))])),
    )


def precise_codec_options(
    tape: Tape, bases: Sequence[torch.Tensor], config: AdaccConfig, values: Sequence[int], resource: Bottleneck
) -> dict[int, tuple[CodecOption, ...]]:
    """Measure the 8-bit codec (`PRECISE`) on each of `values`. Return {} if the settings name codecs."""
    options: dict[int, tuple[CodecOption, ...]] = {}
    for value in values if config.codecs is None else ():
        tensor, codec = view(bases[value], encode_view(tape, value)), get_codec(PRECISE)
        if codec.supports(tuple(tensor.shape), tensor.dtype):
            options[value] = (_price_codec(codec, tensor, resource),)
    return options


def with_outliers(
    options: tuple[CodecOption, ...], tape: Tape, value: int, num_outliers: int
) -> tuple[CodecOption, ...]:
    """Return copies of the codec `options` for `num_outliers` outlier channels, with updated payload bytes."""
    size, ref = encode_view(tape, value).geometry[0], tape.values[value].ref
    codecs = [make_codec(option.codec, num_outliers) for option in options]
    return tuple(
        replace(option, options=tuple(sorted(codec.options.items())), nbytes=codec.predicted_bytes(size, ref.dtype))
        for option, codec in zip(options, codecs, strict=True)
    )


def _price_codec(codec: Codec, tensor: torch.Tensor, resource: Bottleneck) -> CodecOption:
    codec.fit(tensor)
    payload = codec.encode(tensor)
    return CodecOption(
        codec=codec.name,
        options=tuple(sorted(codec.options.items())),
        nbytes=codec.predicted_bytes(tuple(tensor.shape), tensor.dtype),
        encode_ms=getattr(time_of(lambda: codec.encode(tensor), tensor.device), resource),
        decode_ms=getattr(time_of(lambda: codec.decode(payload), tensor.device), resource),
        error=0.0 if codec.lossless else float(relative_error([tensor], [codec.decode(payload)])),
        lossless=codec.lossless,
    )


def resize_profile(profile: Profile, shapes: Shapes) -> Profile:
    """Predict the profile of batches of `shapes` from `profile`. Leave out codecs that do not support the new sizes.

    The profile must be valid for batches of these shapes: `profile.sizes.size_class` must find a size class.
    """
    assert profile.sizes is not None
    resized_profile = profile.sizes.profile_at(profile, shapes)
    if resized_profile is profile:
        return profile
    kinds = []
    for before, after in zip(profile.kinds, resized_profile.kinds, strict=True):
        pairs = zip(before.values, after.values, strict=True)
        values = (replace(v, codecs=tuple(_resized_codecs(old, v))) if v.codecs else v for old, v in pairs)
        kinds.append(replace(after, values=tuple(values)))
    return replace(resized_profile, kinds=tuple(kinds))


def _resized_codecs(before: Value, after: Value) -> Iterator[CodecOption]:
    """Yield the codec options of `before` that also support `after`, the same value at the new size."""
    dtype = getattr(torch, after.dtype)
    ratio = after.nbytes / before.nbytes if before.nbytes else 1.0
    for option in after.codecs:
        codec = get_codec(option.codec, **dict(option.options))
        if codec.supports(after.encoded_shape, dtype):
            nbytes = codec.predicted_bytes(after.encoded_shape, dtype)
            encode_ms, decode_ms = option.encode_ms * ratio, option.decode_ms * ratio
            yield replace(option, nbytes=nbytes, encode_ms=encode_ms, decode_ms=decode_ms)


# Roles of values. A value's role decides which codecs suit it (Adacc paper, section 3.2).

_ATTENTION = ("scaled_dot_product", "bmm", "baddbmm")
_MATMUL = ("mm", "addmm", "linear")
_NORM = ("layer_norm", "rms_norm", "batch_norm", "group_norm")
_ACTIVATION = ("gelu", "silu", "relu", "tanh", "sigmoid", "hardtanh", "leaky_relu", "elu", "mish", "pow")


def role_of(tape: Tape, value: int) -> str:
    """Return the role of a recorded value: one of ROLES, "parameter" (also for values computed from parameters alone),
    or "generator" for a random generator's state."""
    record = tape.values[value]
    if is_parameter_cast(tape, value):
        return "parameter"
    if tape.is_block_input(value):
        return "input"
    if tape.is_generator_state(value):
        return "generator"
    if record.ref.dtype is torch.bool or _is_random_draw(tape, value):
        return MASK
    if _is_softmax_value(tape, value):
        return "softmax"
    readers = [tape.operators[index] for index in tape.consumers(value)]
    products = (reader for reader in readers if reader.short_name.startswith(_ATTENTION))
    if any(not any(map(tape.is_module_state, product.inputs())) for product in products):
        return "qkv"
    reader_names = [reader.short_name for reader in readers]
    producer_names = [tape.operators[record.producer].short_name] if record.producer is not None else []
    for role, operator_names in (("norm", _NORM), ("linear", _MATMUL), ("activation", _ACTIVATION)):
        if any(name.startswith(operator_names) for name in reader_names + producer_names * (role == "activation")):
            return role
    return "other"


def _is_random_draw(tape: Tape, value: int) -> bool:
    """Return True if a value is a random draw, possibly scaled, such as dropout's mask."""
    producer = tape.values[value].producer
    if producer is None:
        return False
    operator = tape.operators[producer]
    if operator.random:
        return not operator.is_attention
    is_scaled = operator.short_name in ("div", "mul") and len(operator.inputs()) == 1
    return is_scaled and _is_random_draw(tape, operator.inputs()[0])


def _is_softmax_value(tape: Tape, value: int) -> bool:
    """Return True if a recorded value is a softmax, such as attention's probabilities, with or without dropout."""
    producer = tape.values[value].producer
    if producer is None:
        return False
    operator = tape.operators[producer]
    if "softmax" in operator.short_name:
        return True
    keeps_role = operator.short_name in ("mul", "native_dropout_backward", "clone", "to_copy")
    return keeps_role and any(_is_softmax_value(tape, read) for read in operator.inputs())


def codecs_of_role(role: str, config: AdaccConfig) -> list[str]:
    """Return the codecs for values of `role`: those that the settings name, else those that suit the role."""
    if config.codecs is not None:
        suits = {name: codec_type(name).suits for name in config.codecs}  # only codecs for masks encode masks
        return [name for name in suits if (MASK in suits[name] if role == MASK else suits[name] != {MASK})]
    suitable = [name for name in codecs_suiting(role) if codec_type(name).instead_of is None]
    # Under a bound on errors, the 8-bit codec may still encode values for which INT4 is too coarse.
    precise = [PRECISE] if config.max_error is not None and role != MASK else []
    return list(dict.fromkeys([*suitable, *precise]))


def is_parameter_cast(tape: Tape, value: int) -> bool:
    """Return True if a value is computed from parameters alone. It is never compressed (rule R4)."""
    producer = tape.values[value].producer
    if producer is None:
        return tape.is_module_state(value)
    inputs = tape.operators[producer].inputs()
    return bool(inputs) and all(is_parameter_cast(tape, read) for read in inputs)
