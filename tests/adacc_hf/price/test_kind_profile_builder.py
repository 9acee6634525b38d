"""KindProfileBuilder: what blocks of one kind have in common."""

import torch

from adacc_hf import AdaccConfig, profile_model
from adacc_hf.kernels import outlier_int4


def test_outlier_channels_of_the_neediest_block_are_kept(toy_model, toy_batch, monkeypatch):
    """A codec keeps as many outlier channels as the block that needs most, because blocks of one kind share a plan."""
    model, batch = toy_model(lambda block, hidden: block.down(block.up(hidden).tanh()), num_blocks=2), toy_batch(64)
    monkeypatch.setattr(outlier_int4, "ZSCORE_THRESHOLD", 2.5)  # of 8 channels, one is at most 2.65 above the mean

    def num_outliers(outliers):
        profile = profile_model(model, batch, AdaccConfig(min_compress_bytes=0, outliers=outliers))
        tanh = next(value for value in profile.kinds[0].activations if value.name.endswith("tanh"))
        return dict(tanh.codecs[0].options)["num_outliers"]

    assert num_outliers(True) == 0
    with torch.no_grad():
        model.layers[1].up.weight.mul_(0.01)
        model.layers[1].up.weight[3].fill_(10.0)
        model.layers[1].up.bias.fill_(0.0)
    assert (num_outliers(True), num_outliers(False)) == (1, 0)
