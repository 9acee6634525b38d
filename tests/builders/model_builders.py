"""Models that train in milliseconds, and batches for them."""

import pytest


@pytest.fixture(scope="session")
def tiny_gpt2(one_thread):
    """`tiny_gpt2(attention="sdpa", layers=2, width=32, **config)`: a GPT-2 in train mode, with the same weights at each
    call. The model has no cache, as in Trainer and under gradient checkpointing. A cache copies keys and values, and
    the copies' layout changes sums by a rounding error."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    def build(attention="sdpa", layers=2, width=32, **config):
        torch.manual_seed(0)
        sizes = {
            "vocab_size": 61,
            "n_positions": 64,
            "n_head": 2,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "use_cache": False,
        }
        settings = GPT2Config(n_layer=layers, n_embd=width, attn_implementation=attention, **{**sizes, **config})
        return GPT2LMHeadModel(settings).train()

    return build


@pytest.fixture(scope="session")
def tiny_llama(one_thread):
    """`tiny_llama(attention="sdpa", layers=2, **config)`: a LLaMA with grouped queries, in train mode, without a
    cache."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    def build(attention="sdpa", layers=2, **config):
        torch.manual_seed(0)
        sizes = {
            "vocab_size": 61,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
            "use_cache": False,
        }
        settings = LlamaConfig(num_hidden_layers=layers, attn_implementation=attention, **{**sizes, **config})
        return LlamaForCausalLM(settings).train()

    return build


@pytest.fixture(scope="session")
def token_batch():
    """`token_batch(batch=2, tokens=12, vocabulary=61)`: random tokens that are also the labels."""
    import torch

    def build(batch=2, tokens=12, vocabulary=61):
        ids = torch.randint(0, vocabulary, (batch, tokens), generator=torch.Generator().manual_seed(batch * tokens))
        return {"input_ids": ids, "labels": ids}

    return build


@pytest.fixture(scope="session")
def toy_model(one_thread):
    """`toy_model(forward, num_blocks=2, setup=None)`: a model whose blocks run `forward(block, hidden, **kwargs)`. A
    block has linear layers `up` (8 -> 8) and `down` (8 -> 8); `setup(block)` may add more. The model takes `x` of
    [batch, 6, 8] and passes the result of `kwargs_of(x)` to each block as keyword arguments."""
    from types import SimpleNamespace

    import torch
    from torch import nn
    from transformers.modeling_layers import GradientCheckpointingLayer

    class ToyModel(nn.Module):
        def __init__(self, blocks, kwargs_of):
            super().__init__()
            self.inlet = nn.Linear(8, 8)
            self.layers = nn.ModuleList(blocks)
            self.head = nn.Linear(8, 8)
            self.kwargs_of = kwargs_of

        def forward(self, x):
            hidden = self.inlet(x)
            kwargs = self.kwargs_of(x)
            for layer in self.layers:
                hidden = layer(hidden, **kwargs)
            return SimpleNamespace(loss=self.head(hidden).square().mean(), hidden=hidden)

    def build(forward, num_blocks=2, setup=None, kwargs_of=lambda x: {}):
        class ToyBlock(GradientCheckpointingLayer):
            def __init__(self):
                super().__init__()
                self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
                if setup is not None:
                    setup(self)

            def forward(self, hidden, **kwargs):
                return forward(self, hidden, **kwargs)

        torch.manual_seed(0)
        return ToyModel([ToyBlock() for _ in range(num_blocks)], kwargs_of).train()

    return build


@pytest.fixture(scope="session")
def toy_batch():
    """`toy_batch(batch=2)`: the `x` of [batch, 6, 8] that `toy_model` takes."""
    import torch

    def build(batch=2):
        return {"x": torch.randn(batch, 6, 8, generator=torch.Generator().manual_seed(batch))}

    return build


def gradients_of(model, batch, seed=0):
    """Return the loss and the gradients of a step that begins at random seed `seed`, and leave none on the model."""
    import torch

    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    loss = model(**batch).loss
    loss.backward()
    results = [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
    model.zero_grad(set_to_none=True)
    return results


def everything_of(model):
    """Return copies of the parameters, buffers and gradients of `model`, and the states of the random generators."""
    import random

    import numpy
    import torch

    state = {name: tensor.clone() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    grads = {f"{name}.grad": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    generators = [
        torch.get_rng_state(),
        torch.tensor(random.getstate()[1]),
        torch.tensor(numpy.random.get_state()[1].tolist()),
    ]
    return {**state, **grads, "generators": torch.cat(generators)}


@pytest.fixture
def one_rank():
    """A process group of this process alone."""
    from torch import distributed

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()
