"""The paper's "Quantization" baseline: one codec for everything, whatever it costs."""

from adacc_hf.policy import Action, Policy
from adacc_hf.profile import Profile

NAIVE_CODEC = "token_int4"


def quantize_everything(profile: Profile) -> Policy:
    """The policy that keeps each activation that a codec takes as per-token INT4."""
    return Policy.uniform(profile, Action.COMPRESS, codec=NAIVE_CODEC)
