"""CompAct in training: the optimizer's algebra, resuming, checkpointing, Adacc at the same time, and refused
settings."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from adacc_hf import AdaccCallback, AdaccConfig, apply_policy, profile_model, solve_policy
from adacc_hf.compact import CompactAdamW, CompactFactory
from adacc_hf.compact.layer import CompactConv1D, CompactLinear, InputGroup
from adacc_hf.solve.simple_policies import uniform_policy
from adacc_hf.torch_glue.compat import switch_checkpointing
from adacc_hf.torch_glue.memory import measure_step
from adacc_hf.torch_glue.meters import MemoryMeter

RANK = 8


@pytest.fixture(autouse=True)
def one_thread(one_thread):
    """One thread, so that sums are in one order."""


def llama(seed=0, **settings):
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=61, **sizes, use_cache=False, **settings))
    return model.train()


def gpt2(seed=0):
    torch.manual_seed(seed)
    return GPT2LMHeadModel(
        GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=61, n_positions=64, use_cache=False)
    ).train()


def batch(seed=0, rows=4, tokens=12):
    ids = torch.randint(0, 61, (rows, tokens), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def optimizer_of(model, **settings):
    return CompactFactory()(model, **{"rank": RANK, "lr": 1e-2, "update_proj_gap": 3, **settings})


def train(model, optimizer, seeds):
    for seed in seeds:
        torch.manual_seed(seed)
        model(**batch(seed)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def weights(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_equal(left, right):
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], tensor) for name, tensor in right.items())


@pytest.mark.parametrize("build", [llama, gpt2])
def test_blocks_linear_layers_are_compact_but_for_attentions_output(build, caplog):
    model = build()
    optimizer = optimizer_of(model)
    module_names = {
        name.rpartition(".")[2] for name, m in model.named_modules() if isinstance(m, (CompactLinear, CompactConv1D))
    }
    if build is llama:
        assert module_names == {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj"}
        assert "layers not compact, trained in full: model.layers.*.self_attn.o_proj. The reason: fused" in caplog.text
    else:
        assert module_names == {"c_attn", "c_fc", "c_proj"}
        assert not isinstance(model.transformer.h[0].attn.c_proj, CompactConv1D)
    groups = {id(m.group) for m in model.modules() if isinstance(m, (CompactLinear, CompactConv1D))}
    # q, k and v; gate and up; down: and c_attn; c_fc; c_proj.
    assert len(groups) == 2 * 3
    optimizer.remove()
    assert {type(m) for m in model.modules()} == {type(m) for m in build().modules()}
    assert all(p.requires_grad for p in model.parameters())


def test_with_the_identity_for_a_projection_it_is_adamw(monkeypatch):
    monkeypatch.setattr(
        InputGroup, "projection", lambda self, inputs, rank, dtype, device: torch.eye(inputs, dtype=dtype)
    )
    ours, plain = llama().double(), llama().double()
    optimizer = CompactFactory()(ours, rank=1.0, scale=1.0, lr=1e-2, weight_decay=0.1)
    decayed = [p for p in plain.parameters() if p.ndim > 1]
    others = [p for p in plain.parameters() if p.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    train(ours, optimizer, range(5))
    train(plain, torch.optim.AdamW(groups, lr=1e-2), range(5))
    for name, tensor in plain.state_dict().items():
        # Weights of the order of 0.1 in float64, after five steps of the order of 0.01.
        torch.testing.assert_close(ours.state_dict()[name], tensor, atol=1e-11, rtol=1e-9)


def test_bytes_are_those_of_the_subspace():
    model = llama()
    optimizer = optimizer_of(model)
    train(model, optimizer, [0])
    for layer in optimizer.layers:
        outputs = layer.weight.shape[0]
        assert layer.weight.grad is None
        assert layer.core.shape == (outputs, RANK)
        assert not layer.core.any()
        assert layer.core.untyped_storage().nbytes() == 4
        state = optimizer.state[layer.core]
        assert state["exp_avg"].shape == state["exp_avg_sq"].shape == (outputs, RANK)
        assert layer.weight not in optimizer.state


def test_less_is_stored_than_by_plain_training():
    plain = measure_step(llama(), batch()).stored_bytes
    model = llama()
    optimizer_of(model)
    saved = measure_step(model, batch()).stored_bytes
    tokens, width, blocks = 4 * 12, 32, 2
    # In each block the inputs of q, k and v, of gate and up, and of down are no longer saved, and the products z are.
    assert plain - saved == 4 * tokens * blocks * (2 * width + 64 - 3 * RANK)


def test_micro_batches_are_one_batch():
    model_of_tensors, parts = llama().double(), llama().double()
    optimizers = [optimizer_of(model) for model in (model_of_tensors, parts)]
    one = batch(rows=4)
    model_of_tensors(**one).loss.backward()
    for half in (slice(0, 2), slice(2, 4)):
        (parts(**{name: tensor[half] for name, tensor in one.items()}).loss / 2).backward()
    for mine, theirs in zip(optimizers[0].layers, optimizers[1].layers, strict=True):
        torch.testing.assert_close(mine.core.grad, theirs.core.grad, atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("how", ["checkpoint", "recompute", "retain", "mixed"])
@pytest.mark.parametrize("build", [llama, gpt2])
def test_under_a_checkpoint_or_a_policy_of_adacc_training_is_the_same_bit_for_bit(build, how, caplog):
    plain, ours = build(), build()
    first, second = optimizer_of(plain), optimizer_of(ours)
    if how == "checkpoint":
        switch_checkpointing(ours, on=True)
        train(ours, second, range(8))
    else:
        config = AdaccConfig(actions=("retain", "recompute"), min_compress_bytes=0)
        profile = profile_model(ours, batch(), config, optimizer=second)
        budget = {"recompute": None, "retain": 1.0, "mixed": 0.6}[how]
        policy = uniform_policy(profile, "recompute") if budget is None else solve_policy(profile, budget, config)
        with apply_policy(ours, policy):
            train(ours, second, range(8))
            stored_bytes = measure_step(ours, batch()).stored_bytes
            ours.zero_grad()
        assert stored_bytes == policy.predicted_stored_bytes
        assert "under torch's checkpoint" not in caplog.text
    train(plain, first, range(8))
    assert_equal(weights(ours), weights(plain))


def test_another_subspace_is_drawn_every_so_many_steps():
    model = llama()
    optimizer = optimizer_of(model, update_proj_gap=2)
    periods = []
    for seed in range(5):
        periods.append({layer.group.period for layer in optimizer.layers})
        train(model, optimizer, [seed])
    assert periods == [{0}, {0}, {1}, {1}, {2}]


def test_a_step_makes_no_temporaries_but_cores_and_projections():
    model = llama()
    optimizer = optimizer_of(model)
    train(model, optimizer, range(2))
    model(**batch()).loss.backward()
    with MemoryMeter.for_device(torch.device("cpu")) as meter:
        optimizer.step()
    cores = sum(layer.core.nbytes for layer in optimizer.layers)
    # The largest projection, in float32, twice while it is scaled to its dtype.
    projection = 4 * RANK * max(layer.matrix.shape[1] for layer in optimizer.layers)
    assert meter.peak_bytes <= cores + 2 * projection + 100


def trainer(model, tmp_path, callbacks=(), **settings):
    rows = [{name: tensor[0] for name, tensor in batch(seed, rows=1).items()} for seed in range(32)]
    arguments = {"per_device_train_batch_size": 4, "max_steps": 8, "report_to": "none", "save_strategy": "no"}
    return Trainer(
        model=model,
        args=TrainingArguments(str(tmp_path), **{**arguments, "use_cpu": True, "learning_rate": 1e-2, **settings}),
        train_dataset=rows,
        callbacks=list(callbacks),
        optimizer_cls_and_kwargs=(CompactFactory, {"rank": 0.25, "lr": 1e-2, "update_proj_gap": 3}),
    )


def test_the_trainer_takes_it_alone_and_with_adacc(tmp_path):
    weights_of_runs = []
    for callbacks in ([], [AdaccCallback(memory_budget=0.6, actions=("retain", "recompute"))]):
        run = trainer(llama(), tmp_path, callbacks, gradient_accumulation_steps=2, max_grad_norm=0.5)
        run.train()
        weights_of_runs.append(weights(run.model))
    assert_equal(*weights_of_runs)
    (callback,) = callbacks
    assert not callback.policy.is_plain
    assert isinstance(run.optimizer.optimizer, CompactAdamW)


def test_a_checkpoint_of_the_trainers_resumes_bit_for_bit(tmp_path):
    uninterrupted = trainer(llama(), tmp_path / "whole")
    uninterrupted.train()
    interrupted = trainer(llama(), tmp_path / "begun", save_strategy="steps", save_steps=5)
    interrupted.train()
    resumed = trainer(llama(seed=4), tmp_path / "begun")
    resumed.train(resume_from_checkpoint=str(tmp_path / "begun" / "checkpoint-5"))
    assert_equal(weights(resumed.model), weights(uninterrupted.model))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rank": 0.0}, r"rank=0\.0 must be a fraction of a layer's inputs, above 0\.0 and at most 1\.0, or a number"),
        ({"rank": True}, "rank=True must be a fraction"),
        ({"rank": 33}, "rank=33 is more than the 32 inputs of model.layers.0.self_attn.q_proj: use at most that"),
        ({"update_proj_gap": 0}, "update_proj_gap=0 must be a number of steps, 1 or more"),
        ({"scale": -1.0}, r"scale=-1\.0 must be a number above 0"),
        ({"target_modules": ["nothing"]}, r"target_modules=\['nothing'\] names no linear layer of LlamaForCausalLM"),
    ],
)
def test_bad_settings_are_told_and_leave_the_model_as_it_was(settings, words):
    model = llama()
    with pytest.raises(ValueError, match=words):
        optimizer_of(model, **settings)
    assert not any(isinstance(module, CompactLinear) for module in model.modules())
    assert all(p.requires_grad for p in model.parameters())


# PEFT 0.21 with Transformers 5.23.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_tied_weights_and_adapters_are_refused():
    model = llama()
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
    with pytest.raises(ValueError, match=r"up_proj .*another module has the same weight \(tied\)"):
        optimizer_of(model)
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(llama(), peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="PEFT adapters: use one or the other"):
        optimizer_of(adapted)


@pytest.mark.parametrize("mark", ["ds_id", "to_local"])
def test_weights_in_parts_are_refused(mark):
    """Weights in parts are refused: DeepSpeed's ZeRO 3 marks them, tensor parallelism and FSDP create them."""
    model = llama()
    setattr(model.model.layers[1].mlp.up_proj.weight, mark, 0)
    with pytest.raises(ValueError, match=r"layers.1.mlp.up_proj .*sharded over several ranks .*: train with DDP, or"):
        optimizer_of(model)
    assert not any(isinstance(module, CompactLinear) for module in model.modules())


# torchao 0.18 with torch 2.13.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_quantized_weights_are_refused():
    torchao = pytest.importorskip("torchao.quantization")
    model = llama()
    torchao.quantize_(model.model.layers, torchao.Int8WeightOnlyConfig())
    assert not model.model.layers[0].self_attn.q_proj.weight.requires_grad
    with pytest.raises(ValueError, match=r"q_proj .*its weight is quantized and not trained; train adapters on it"):
        optimizer_of(model)


class Products(TorchDispatchMode):
    """A counter of newly computed matrices by shape, views of parameters excluded, and of draws of P."""

    def __init__(self, model):
        super().__init__()
        self._own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        self.shapes, self.products, self.drawn = Counter(), Counter(), 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.drawn += function is torch.ops.adacc_hf.projection.default
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in self._own:
                self.shapes[tuple(tensor.shape)] += 1
                self.products[tuple(tensor.shape)] += function is torch.ops.aten.mm.default
        return result


@pytest.mark.parametrize("is_compact", [False, True])
def test_no_gradient_of_a_weights_size_is_ever_made(is_compact):
    """No matrix of a weight's size is computed in forward, backward or the optimizer of whole steps."""
    model = llama(num_key_value_heads=2)
    every_layer = r"model\.layers\..*proj"
    linear = [layer for layer in model.model.layers.modules() if isinstance(layer, nn.Linear)]
    optimizer = optimizer_of(model, target_modules=every_layer) if is_compact else torch.optim.AdamW(model.parameters())
    with Products(model) as products:
        train(model, optimizer, range(2))
    of_weights = {shape for layer in linear for shape in (layer.weight.shape, layer.weight.shape[::-1])}
    gradient_shapes = {shape for shape in of_weights if products.shapes[tuple(shape)]}
    if is_compact:
        assert not gradient_shapes
    else:
        assert gradient_shapes >= {layer.weight.shape for layer in linear}


def test_layers_that_read_one_input_take_one_product():
    """Layers with the same input share one product: q, k and v; gate and up; down; in each of two blocks."""
    model, tokens = llama(), 4 * 12
    optimizer = optimizer_of(model, rank=6)
    with Products(model) as products:
        loss = model(**batch()).loss
    assert products.drawn == products.products[tokens, 6] == 2 * 3
    with Products(model) as products:
        loss.backward()
    assert products.drawn == 0
    assert {layer.core.grad.shape for layer in optimizer.layers} == {(32, 6), (64, 6)}


def test_weights_move_in_their_subspaces_by_scaled_steps_of_adamw_whose_moments_last():
    """A step is that of AdamW on a core of zeros with gradient dW P, times `scale` and P^T. Moments outlast P."""
    torch.manual_seed(0)
    ours, plain = (nn.Sequential(nn.Linear(16, 5, bias=False)).double() for _ in range(2))
    plain.load_state_dict(ours.state_dict())
    optimizer = CompactFactory()(ours, target_modules=["0"], rank=4, scale=0.25, lr=1e-2, update_proj_gap=2)
    core = nn.Parameter(torch.zeros(5, 4, dtype=torch.float64))
    adamw = torch.optim.AdamW([core], lr=1e-2, weight_decay=0.0)
    for _ in range(5):
        matrix = ours[0].group.projection(16, 4, torch.float64, core.device)
        rows = torch.randn(7, 16, dtype=torch.float64)
        for model in (ours, plain):
            model.zero_grad()
            model(rows).square().mean().backward()
        optimizer.step()
        core.grad, core.data = plain[0].weight.grad @ matrix, torch.zeros_like(core)
        adamw.step()
        plain[0].weight.data += 0.25 * core.data @ matrix.t()
        # Weights of the order of 0.1 in float64, and steps of the order of 0.01.
        torch.testing.assert_close(ours[0].weight, plain[0].weight, atol=1e-11, rtol=1e-9)
