"""Profile assembled from the readings of one micro-batch."""

from live_step_builders import LOSSLESS, train


def test_gradients_of_earlier_micro_batches_are_counted(tiny_gpt2, token_batch, without_onednn):
    model = tiny_gpt2()
    train(model, token_batch())
    gradients = sum(parameter.grad.nbytes for parameter in model.parameters())
    _, profile = train(model, token_batch(), LOSSLESS, num_micro=2)
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    assert profile.static_bytes >= parameters + gradients + 2 * sum(t.nbytes for t in {*token_batch().values()})
