"""Attention of fake models whose sequences are shared by ranks: the exchange, its sizes, and what is refused."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import GPT2Config, LlamaConfig, LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from adacc_hf.cli import main
from adacc_hf.estimate import sequence_parallel
from adacc_hf.estimate.sequence_parallel import all_heads, all_tokens, check_attention, check_heads, shared_sequences


class Ranks:
    """Stand-in for the ranks of a sequence, which run one after the other, and twice: to send and to receive."""

    def __init__(self, num_ranks):
        self.num_ranks = num_ranks
        self.sent = {}

    def run(self, function, parts):
        """Return `function(part, num_ranks)` of each rank, with the parts that the others have sent."""
        for self.rank, part in enumerate(parts):
            function(part, self.num_ranks)
        results = []
        for self.rank, part in enumerate(parts):
            results.append(function(part, self.num_ranks))
        return results

    def exchange(self, by_rank, num_ranks, group_name):
        self.sent[self.rank] = by_rank
        senders = [self.sent.get(rank, by_rank) for rank in range(num_ranks)]
        return torch.stack([sent[self.rank] for sent in senders])


@given(
    num_ranks=st.sampled_from([1, 2, 4]), batch=st.integers(1, 3), heads=st.sampled_from([4, 8]), part=st.integers(1, 5)
)
def test_each_rank_has_all_tokens_of_its_heads_and_then_all_heads_of_its_tokens(num_ranks, batch, heads, part):
    states = torch.randn(batch, heads, part * num_ranks, 2)
    ranks = Ranks(num_ranks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sequence_parallel, "all_to_all", ranks.exchange)
        gathered = ranks.run(all_tokens, states.chunk(num_ranks, dim=2))
        for own, expected in zip(gathered, states.chunk(num_ranks, dim=1), strict=True):
            assert torch.equal(own, expected)
        ranks.sent.clear()
        contexts = [own.transpose(1, 2).contiguous() for own in gathered]  # as attention returns them
        scattered = ranks.run(all_heads, contexts)
    expected = states.transpose(1, 2).reshape(batch, part * num_ranks, -1)
    assert torch.equal(torch.cat(scattered, dim=1), expected)


def test_attention_is_put_back():
    before = ALL_ATTENTION_FUNCTIONS["sdpa"]
    with shared_sequences(2):
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is not before
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is before


@pytest.mark.parametrize(("num_ranks", "heads", "key_heads"), [(2, 4, 4), (4, 8, 2), (8, 8, 8), (1, 3, 3)])
def test_heads_that_can_be_divided(num_ranks, heads, key_heads):
    check_heads(LlamaConfig(num_attention_heads=heads, num_key_value_heads=key_heads, hidden_size=48), num_ranks)


@pytest.mark.parametrize(("num_ranks", "heads", "key_heads"), [(3, 4, 4), (4, 8, 3), (6, 12, 4)])
def test_heads_that_cannot_be_divided_are_refused(num_ranks, heads, key_heads):
    config = LlamaConfig(num_attention_heads=heads, num_key_value_heads=key_heads, hidden_size=48)
    with pytest.raises(ValueError, match=rf"--sp={num_ranks}: the model's {heads} heads and {key_heads} key-value"):
        check_heads(config, num_ranks)


def test_a_model_that_deepspeed_does_not_support_is_refused():
    with pytest.raises(ValueError, match=r"--sp=2: DeepSpeed's Ulysses needs .* GPT2Config lacks them"):
        check_heads(GPT2Config(), 2)


def test_a_model_whose_attention_is_eager_is_refused():
    config = LlamaConfig(num_attention_heads=4, hidden_size=16, intermediate_size=16, num_hidden_layers=1, vocab_size=8)
    config._attn_implementation = "eager"
    model = LlamaForCausalLM(config)
    with pytest.raises(ValueError, match=r"--sp=2: .* and LlamaForCausalLM uses eager: leave out --sp"):
        check_attention(model, 2)
    check_attention(model, 1)


def plan(capsys, *options):
    """Return the JSON record of `adacc plan` for a small LLaMA on the CPU."""
    fixed = ["--model", "demo-llama", "--device", "cpu", "--dtype", "fp32", "--batch-size", "1"]
    assert main(["plan", *fixed, "--json", *options]) == 0
    return json.loads(capsys.readouterr().out)


def test_two_devices_store_half_of_a_sequence_each(capsys):
    alone = plan(capsys, "--seq-len", "64", "--zero", "1", "2")
    shared = plan(capsys, "--seq-len", "128", "--zero", "1", "2", "--sp", "2")
    # Half a sequence of all heads has as many elements as a whole sequence of half of the heads. Attention's result is
    # stored before the exchange, for attention's backward, and after the exchange, for the following layer.
    num_blocks, bytes_of_result = 6, 64 * 256 * 4
    assert shared["plain_stored_bytes"] == alone["plain_stored_bytes"] + num_blocks * bytes_of_result
    step_ms = {name: method["step_ms"] for name, method in shared["methods"].items()}
    assert step_ms["full recomputation"] > step_ms["plain"], "torch's checkpoint runs the exchange again"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--sp", "2"], "--sp=2 must be at least 2, and divide the number of devices"),
        (["--sp", "1", "--zero", "1", "2"], "--sp=1 must be at least 2"),
        (["--sp", "4", "--zero", "3", "6"], "--sp=4 must be at least 2, and divide the number of devices"),
        (["--sp", "2", "--zero", "3", "2", "--attn", "eager"], "--sp needs fused attention"),
        (["--cp", "2"], "--cp: ring attention is not supported by policies: use --sp N"),
    ],
)
def test_options_that_do_not_go_together_are_refused(capsys, options, message):
    assert main(["plan", "--model", "demo-llama", *options]) == 2
    assert message in capsys.readouterr().err
