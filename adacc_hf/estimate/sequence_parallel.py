"""Attention of a fake model whose sequences are shared by several ranks, as in DeepSpeed's Ulysses (`sp_size`).

Each rank holds a part of the tokens of every sequence. Before attention, the ranks exchange tokens for heads: each rank
then holds all tokens and a part of the heads. After attention, the ranks exchange heads for tokens. Source: arXiv
2309.14509.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from adacc_hf.torch_glue.compat import attention_of
from adacc_hf.torch_glue.private import all_to_all

SDPA = "sdpa"
GROUP = "ranks of a sequence"
"""Name of a process group that does not exist. Collectives on fake tensors exchange nothing, so no group is needed."""


def check_heads(config: PretrainedConfig, num_ranks: int) -> None:
    """Raise ValueError if DeepSpeed cannot divide the attention heads of a model among `num_ranks`."""
    if num_ranks == 1:
        return
    text_config = config.get_text_config()
    num_heads, num_key_heads = (
        getattr(text_config, name, None) for name in ("num_attention_heads", "num_key_value_heads")
    )
    if num_heads is None or num_key_heads is None:
        raise ValueError(
            f"--sp={num_ranks}: DeepSpeed's Ulysses needs num_attention_heads and num_key_value_heads in the model's "
            f"configuration, and {type(config).__name__} lacks them: leave out --sp"
        )
    if num_heads % num_ranks or (num_key_heads % num_ranks and num_ranks % num_key_heads):
        raise ValueError(
            f"--sp={num_ranks}: the model's {num_heads} heads and {num_key_heads} key-value heads cannot be divided "
            f"among {num_ranks} devices: choose a divisor of both"
        )


def check_attention(model: nn.Module, num_ranks: int) -> None:
    """Raise ValueError if `num_ranks` devices share sequences, but the attention of `model` is not fused.

    The plan simulates Ulysses by replacing fused attention (sdpa). Eager attention is not replaced, so each device
    would seem to attend to its own tokens only.
    """
    if num_ranks > 1 and (kinds := attention_of(model)) != [SDPA]:
        raise ValueError(
            f"--sp={num_ranks}: Ulysses is planned with fused attention (sdpa), and {type(model).__name__} uses "
            f"{' and '.join(kinds)}: leave out --sp"
        )


@contextmanager
def shared_sequences(num_ranks: int) -> Iterator[None]:
    """Make fused attention exchange tokens and heads among `num_ranks` ranks inside the `with` block.

    Do nothing for one rank.
    """
    if num_ranks == 1:
        yield
        return
    attention = ALL_ATTENTION_FUNCTIONS[SDPA]
    ALL_ATTENTION_FUNCTIONS[SDPA] = _exchanging_attention(attention, num_ranks)
    try:
        yield
    finally:
        ALL_ATTENTION_FUNCTIONS[SDPA] = attention


def _exchanging_attention(attention: Callable[..., Any], num_ranks: int) -> Callable[..., Any]:
    """Return `attention`, extended by the exchange of tokens and heads among `num_ranks` ranks. The arguments and the
    result of the returned function contain one rank's part of the sequences."""

    def run(module: Any, query: Any, key: Any, value: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
        query, key, value = (all_tokens(states, num_ranks) for states in (query, key, value))
        groups = getattr(module, "num_key_value_groups", None)
        if groups is not None:  # fewer key-value heads than ranks are repeated
            module.num_key_value_groups = query.shape[1] // key.shape[1]
        try:
            context, weights = attention(module, query, key, value, None, *args, **kwargs)
        finally:
            if groups is not None:
                module.num_key_value_groups = groups
        return all_heads(context, num_ranks), weights

    return run


def all_tokens(states: torch.Tensor, num_ranks: int) -> torch.Tensor:
    """Exchange the heads of other ranks for tokens: [batch, heads, part, size] to [batch, heads / N, tokens, size]."""
    states = states.permute(2, 0, 1, 3)
    if states.shape[2] < num_ranks:
        states = states.repeat_interleave(num_ranks // states.shape[2], dim=2)
    part, batch, num_heads, size = states.shape
    by_rank = states.reshape(part, batch, num_ranks, num_heads // num_ranks, size).permute(2, 0, 1, 3, 4)
    received = all_to_all(by_rank.contiguous(), num_ranks, GROUP)
    return received.reshape(part * num_ranks, batch, num_heads // num_ranks, size).permute(1, 2, 0, 3).contiguous()


def all_heads(context: torch.Tensor, num_ranks: int) -> torch.Tensor:
    """Exchange tokens for the heads of other ranks: [batch, tokens, heads / N, size] to [batch, part, all heads]."""
    context = context.permute(1, 0, 2, 3)
    tokens, batch = context.shape[:2]
    by_rank = context.reshape(num_ranks, tokens // num_ranks, batch, -1).contiguous()
    received = all_to_all(by_rank, num_ranks, GROUP).permute(1, 2, 0, 3)
    return received.reshape(tokens // num_ranks, batch, -1).contiguous().permute(1, 0, 2)
