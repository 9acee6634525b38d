"""Profile of a batch of another size."""

from adacc_hf import AdaccConfig, profile_model
from adacc_hf.artifacts.size_model import joined
from adacc_hf.price.resized_profile import resize_profile
from adacc_hf.solve.simple_policies import uniform_policy


def test_profiles_of_a_few_sizes_predict_another(tiny_gpt2, token_batch, without_onednn):
    """Three lengths determine one independent size, and the profile of a fourth is that which is measured there."""
    config = AdaccConfig(actions=("retain", "recompute"))
    model = tiny_gpt2()
    profiles = [profile_model(model, token_batch(4, length), config) for length in (24, 40, 16, 32)]
    *known, target = profiles
    assert joined(known[:2]).sizes is None
    predicted = resize_profile(joined(known), target.measured[0][0])
    for action in ("retain", "recompute"):
        policies = [uniform_policy(profile, action) for profile in (predicted, target)]
        assert policies[0].predicted_peak_bytes == policies[1].predicted_peak_bytes
