"""Kinds of blocks in tiles: their memory without any tile, and the codecs and times of the kind without tiles."""

import pytest
import torch

from adacc_hf import AdaccConfig, profile_model
from adacc_hf.artifacts.policy import BlockAction
from adacc_hf.artifacts.size_model import joined


@pytest.fixture
def profile(one_thread, few_rows, tiny_llama):
    ids = torch.randint(3, 60, (2, 24))
    config = AdaccConfig(min_compress_bytes=0)
    return profile_model(tiny_llama(intermediate_size=128), {"input_ids": ids, "labels": ids}, config)


def test_each_kind_has_one_in_tiles(profile):
    (kind, tiled) = profile.kinds
    assert {block.kind for block in profile.blocks} == {0}
    assert (kind.tiled, tiled.tiled) == (1, None)
    (mlp,) = tiled.tiles.modules
    assert (mlp.module, mlp.num_rows, tiled.tiles.num_tiles) == ("mlp", 48, 0)
    assert tiled.block_actions == (BlockAction.PLAIN,)
    assert [event.tiled for event in tiled.forward if event.tiled is not None] == [0]
    assert [event.tiled for event in tiled.backward if event.tiled is not None] == [0]


def test_values_have_the_codecs_of_the_kind_without_tiles(profile):
    kind, tiled = profile.kinds
    codecs = {kind.names[value.index]: value.codecs for value in kind.activations if value.codecs}
    inputs = {tiled.names[value.index]: value.codecs for value in tiled.activations if value.codecs}
    assert inputs
    assert all(codecs[name] == options for name, options in inputs.items())


def test_the_module_takes_the_time_of_its_operators(profile):
    kind, tiled = profile.kinds
    inside = [operator.ms for operator in kind.operators if operator.module.startswith("mlp")]
    (mlp,) = tiled.tiles.modules
    assert len(inside) == mlp.num_operators
    assert [tiled.operators[index].ms for index in mlp.operators] == [pytest.approx(sum(inside))]
    assert tiled.in_tiles(4).extra_ms > sum(inside)


def test_more_tiles_take_less_memory_and_more_time(profile):
    tiled = profile.kinds[1]
    peaks = [max(event.extra_bytes for event in tiled.in_tiles(number).backward) for number in (2, 4, 8)]
    assert peaks == sorted(peaks, reverse=True)
    times = [tiled.in_tiles(number).extra_ms for number in (2, 4, 8)]
    assert times == sorted(times)
    assert tiled.in_tiles(8).in_tiles(2) == tiled.in_tiles(2)


def test_other_sizes_are_predicted_with_their_tiles(one_thread, few_rows, tiny_llama):
    model = tiny_llama(intermediate_size=128)

    def batch(length):
        ids = torch.randint(3, 60, (4, length), generator=torch.Generator().manual_seed(0))
        return {"input_ids": ids, "labels": ids}

    config = AdaccConfig(actions=("retain", "recompute", "tile"))
    profile = joined([profile_model(model, batch(length), config) for length in (48, 24, 40)])
    expected = profile_model(model, batch(32), config)
    sizes = tuple((name, (4, 32)) for name in ("input_ids", "labels"))
    predicted = profile.sizes.profile_at(profile, sizes)
    for number in (2, 5):
        numbers = [number] * len(profile.blocks)
        ours, theirs = predicted.with_tiles(numbers).kinds[0], expected.with_tiles(numbers).kinds[0]
        assert ours.tiles.num_rows == theirs.tiles.num_rows == 128
        for moment in ("forward", "backward"):
            peaks = [[e.extra_bytes for e in getattr(kind, moment) if e.tiled == 0] for kind in (ours, theirs)]
            assert peaks[0] == peaks[1] != []


def test_norms_in_float32_run_in_tiles_and_their_inputs_have_the_codecs_of_the_copies(one_thread, few_rows, tiny_llama):
    ids = torch.randint(3, 60, (2, 24))
    model = tiny_llama(intermediate_size=128).bfloat16()
    kind, tiled = profile_model(model, {"input_ids": ids, "labels": ids}, AdaccConfig(min_compress_bytes=0)).kinds
    modules = [module.module for module in tiled.tiles.modules]
    assert modules == ["input_layernorm", "post_attention_layernorm", "mlp"]
    assert [module.is_backward_only for module in tiled.tiles.modules] == [True, True, False]
    assert {event.tiled for event in tiled.forward} == {None, 2}
    assert {event.tiled for event in tiled.backward} == {None, 0, 1, 2}
    values = [{kind.names[value.index]: value for value in kind.activations} for kind in (kind, tiled)]
    copy, stored = values[0]["post_attention_layernorm:to_copy"], values[1]["block:add"]
    assert "block:add" not in values[0], "without tiles, backward reads the copy in float32"
    assert (copy.dtype, stored.dtype) == ("float32", "bfloat16")
    assert [option.codec for option in stored.codecs] == [option.codec for option in copy.codecs] != []
    assert all(option.nbytes < stored.nbytes for option in stored.codecs)
    norm = values[1]["input_layernorm:mul#2"]
    assert norm.codecs == values[0]["input_layernorm:mul#2"].codecs != ()
    assert norm.recomputable
    assert not tiled.copied_slots, "backward in tiles does not write into its saved input, so replay need not copy it"


def test_a_block_that_runs_other_operators_in_the_second_recording_has_no_tiles(one_thread, few_rows, tiny_llama):
    """As a mixture of experts may, whose operators depend on the data."""
    model, ids = tiny_llama(intermediate_size=128, layers=1), torch.randint(3, 60, (1, 24))
    attention = model.model.layers[0].self_attn
    attend = attention.forward

    def forward(*args, **kwargs):
        result, weights = attend(*args, **kwargs)
        is_in_tiles = "forward" in model.model.layers[0].mlp.__dict__
        return (result * 2 if is_in_tiles else result), weights

    attention.forward = forward
    (kind,) = profile_model(model, {"input_ids": ids, "labels": ids}, AdaccConfig()).kinds
    assert kind.tiled is None
