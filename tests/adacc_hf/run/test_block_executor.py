"""BlockExecutor: when it compares a call with its tape, and when it does not; calls that fill a table."""

import pytest
import torch
from recomputed_models import recompute_all

from adacc_hf import AdaccConfig
from adacc_hf.artifacts.errors import PolicyMismatchError
from adacc_hf.run import block_executor
from adacc_hf.run.entries import OTHER_OPERATORS

CONFIG = AdaccConfig(min_compress_bytes=0)


def test_a_cuda_graph_that_would_draw_masks_again_is_refused(tiny_gpt2, token_batch, monkeypatch):
    """A CUDA graph that would redraw masks is refused. Redrawing sets the generator, which a capture does not allow."""
    model, batch = tiny_gpt2(layers=1), token_batch()
    with recompute_all(model, batch, CONFIG, CONFIG):
        model(**batch).loss.backward()
        monkeypatch.setattr(block_executor, "is_being_captured", lambda: True)
        with pytest.raises(PolicyMismatchError, match="draws its dropout masks again"):
            model(**batch)


def test_a_call_that_fills_a_table_is_exact(toy_model, toy_batch, run_steps, assert_same_steps):

    def forward(block, hidden):
        if block.table is None:
            block.table = torch.linspace(0, 1, hidden.shape[1])[:, None].cos()
        return hidden + block.down((block.up(hidden) * block.table).tanh().exp())

    def reset_tables():
        for layer in model.layers:
            layer.table = None

    model, batch = toy_model(forward, setup=lambda block: setattr(block, "table", None)), toy_batch()
    plain = run_steps(model, batch, 1)
    reset_tables()
    with recompute_all(model, batch, CONFIG) as handle:
        for num_calls in (2, 2, 1, 1):
            reset_tables()
            for _ in range(num_calls):
                assert_same_steps(run_steps(model, batch, 1), plain)
        fallbacks = {reason: blocks.total() for reason, blocks in handle.tape_cache.fallbacks.items()}
        assert fallbacks == {OTHER_OPERATORS: 4 * 2}


@pytest.mark.parametrize("reads_other", [False, True])
def test_calls_without_gradients_are_not_recorded(
    toy_model, toy_batch, run_steps, assert_same_steps, reads_other, monkeypatch
):
    """Autograd saves nothing in the frozen feature encoder of a model of sound, whatever the length of the sound."""
    scale = torch.ones(8, requires_grad=reads_other)

    def forward(block, hidden):
        return hidden + block.down(block.up(hidden * scale).tanh())

    model, batch = toy_model(forward, num_blocks=3), toy_batch()
    for module in (model.inlet, model.layers[0]):
        module.requires_grad_(False)
    plain = run_steps(model, batch, 1)
    shorter = {name: tensor[:, :4] for name, tensor in batch.items()}
    names, recording = [], block_executor.Recording
    with recompute_all(model, shorter, CONFIG):
        monkeypatch.setattr(block_executor, "Recording", lambda name, *a: names.append(name) or recording(name, *a))
        assert_same_steps(run_steps(model, batch, 1), plain)
    assert ("layers.0" in names) == reads_other
