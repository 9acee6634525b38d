"""Models whose blocks recompute all that they can."""

from adacc_hf import apply_policy, profile_model
from adacc_hf.solve.simple_policies import uniform_policy


def recompute_all(model, batch, profile_config, config=None):
    """Profile the model, and return the handle of a policy that recomputes every recomputable value."""
    return apply_policy(model, uniform_policy(profile_model(model, batch, profile_config), "recompute"), config)
