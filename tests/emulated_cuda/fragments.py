"""Train up to the limit of an emulated GPU without expandable segments, and print a line of JSON for a test.

python tests/emulated_cuda tests/emulated_cuda/fragments.py
"""

import json
from dataclasses import replace

import torch
from counted_times import count_times
from emulated_cuda import memory, set_limit, shrink_segments
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from adacc_hf import AdaccConfig, apply_policy, profile_model, solve_policy
from adacc_hf.artifacts.policy import Policy
from adacc_hf.solve.solver import least_policy
from adacc_hf.torch_glue.memory import FRAGMENTATION_SHARE

SCALE = 64
"""Size ratio of the emulated models, of about 2 to 5 GB, to the models of this script."""
EXACT, ALL = ("retain", "recompute"), ("retain", "compress", "recompute")


def small_model(family: str) -> torch.nn.Module:
    torch.manual_seed(0)
    if family == "gpt2":
        model = GPT2LMHeadModel(GPT2Config(n_layer=6, n_embd=128, n_head=4, vocab_size=1000, eos_token_id=0))
    else:
        config = LlamaConfig(hidden_size=128, intermediate_size=344, num_hidden_layers=6, vocab_size=1000)
        config.num_attention_heads, config.num_key_value_heads = 4, 2
        model = LlamaForCausalLM(config)
    model.config.use_cache = False
    return model.to("cuda").train()


def runs_out_of_memory(model: torch.nn.Module, batch: dict[str, torch.Tensor], policy: Policy, limit: int) -> bool:
    """Return True if one of three steps under `policy` needs more than `limit` bytes of segments."""
    torch.cuda.empty_cache()
    set_limit(limit)
    try:
        with apply_policy(model, policy):
            for _ in range(3):
                model(**batch).loss.backward()
                model.zero_grad()
    except torch.OutOfMemoryError:
        return True
    finally:
        model.zero_grad()
        set_limit(memory().total)
    return False


def main() -> None:
    shrink_segments(SCALE)
    without, with_share = [], []
    for family in ("gpt2", "llama"):
        model = small_model(family)
        ids = torch.randint(0, 1000, (4, 256), device="cuda")
        batch = {"input_ids": ids, "labels": ids}
        with count_times("cuda"):  # policies, and their fragments, do not depend on the machine
            profile = profile_model(model, batch)
        for actions in (EXACT, ALL):
            config = AdaccConfig(actions=actions)
            least = least_policy(profile, config).predicted_peak_bytes
            plain = solve_policy(profile, 1.0, config).predicted_peak_bytes
            for share in (0.15, 0.3, 0.6):
                device = int((least + share * (plain - least)) / (1 - config.memory_margin) / (1 - FRAGMENTATION_SHARE))
                for usable_share, outcomes in ((1.0, without), (1 - FRAGMENTATION_SHARE, with_share)):
                    usable_bytes = int(device * usable_share)
                    policy = solve_policy(replace(profile, available_bytes=usable_bytes), "auto", config)
                    outcomes.append(runs_out_of_memory(model, batch, policy, device))
    print(json.dumps({"without": without, "with": with_share}))


if __name__ == "__main__":
    main()
