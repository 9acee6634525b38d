"""Row-wise modules are found from the operators and shapes of a tape, not from names."""

import pytest
import torch
from torch import nn

from adacc_hf.run.call import Recording
from adacc_hf.tape.row_wise import row_wise_modules


class Block(nn.Module):
    """A block with attention-like mixing, and a module to examine."""

    def __init__(self, part):
        super().__init__()
        self.mix = nn.Linear(8, 8)
        self.part = part

    def forward(self, rows):
        return rows + self.part(rows + self.mix(rows).mean(1, keepdim=True))


class Mlp(nn.Module):
    def __init__(self, change=lambda rows: rows):
        super().__init__()
        self.up, self.down, self.change = nn.Linear(8, 32), nn.Linear(32, 8), change

    def forward(self, rows):
        return self.down(torch.sin(self.change(nn.functional.silu(self.up(rows)))).tanh())


def module_of(part, rows=None):
    return next(iter(modules_of(Block(part), rows)), None)


def modules_of(block, rows=None):
    block, rows = block.train(), torch.randn(2, 6, 8, requires_grad=True) if rows is None else rows
    recording = Recording("block", block, (rows,), {})
    recording.run(block)
    tape = recording.recorder.tape()
    recording.discard()
    return row_wise_modules(tape)


def test_an_mlp_is_row_wise():
    module = module_of(Mlp())
    assert (module.path, module.num_rows) == ("part", 12)
    assert module.inner_bytes == 4 * 12 * 32 * 4, "the results of the layer, silu, sin and tanh"


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_norm_dropout_and_a_residual_belong_to_it(dropout):
    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.mlp, self.dropout = nn.LayerNorm(8), Mlp(), nn.Dropout(dropout)

        def forward(self, rows):
            return rows + self.dropout(self.mlp(self.norm(rows)))

    assert module_of(Part()).path == "part"


CHANGES = {
    "a mean over tokens": lambda rows: rows - rows.mean(1, keepdim=True),
    "a sum over tokens": lambda rows: rows.cumsum(1),
    "a softmax over tokens": lambda rows: rows.softmax(1),
    "shifted tokens": lambda rows: rows.roll(1, 1),
    "tokens in another order": lambda rows: rows.flip(1),
    "positions": lambda rows: rows + torch.linspace(0, 1, rows.shape[1])[:, None],
    "one number per position": lambda rows: rows * torch.ones(rows.shape[1], rows.shape[2]),
    "products of tokens": lambda rows: rows @ (rows.transpose(1, 2) @ rows),
    "sorted tokens": lambda rows: rows.sort(1).values,
    "samples mixed": lambda rows: rows - rows.mean(0, keepdim=True),
    "a mask of the whole": lambda rows: rows * (rows > rows.max()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_module_that_mixes_tokens_or_knows_their_positions_is_not(change):
    module = module_of(Mlp(CHANGES[change]))
    assert module is None or module.path != "part"


def test_tensors_attached_to_the_parameters_belong_to_the_module():
    """As the scales of bitsandbytes' 4-bit weights."""

    class Quantized(Mlp):
        def __init__(self):
            super().__init__()
            self.up.weight.scales = torch.rand(32, 1)

        def forward(self, rows):
            weight = self.up.weight.detach() * self.up.weight.scales
            return self.down(torch.sin(nn.functional.silu(rows @ weight.t())).tanh())

    assert module_of(Quantized()).path == "part"


ROW_WISE = {
    "a softmax over columns": lambda rows: rows.softmax(-1),
    "a norm by hand": lambda rows: rows * rows.pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt(),
    "another dtype": lambda rows: rows.double().float(),
    "in place": lambda rows: rows.clone().mul_(2),
}


@pytest.mark.parametrize("change", ROW_WISE)
def test_operators_within_a_row_are_allowed(change):
    assert module_of(Mlp(ROW_WISE[change])).path == "part"


def test_a_module_that_reads_another_tensor_of_the_block_is_not():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.part = nn.Linear(8, 8), Mlp()

        def forward(self, rows):
            other = self.first(rows)
            self.part.change = lambda hidden: hidden * other[..., :1]
            return self.part(rows)

    assert not modules_of(Outer())


def test_a_module_that_is_called_twice_is_not():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.part, self.between = Mlp(), nn.Linear(8, 8)

        def forward(self, rows):
            return self.part(self.between(self.part(rows)))

    assert not modules_of(Twice())


def test_a_single_layer_or_an_activation_alone_is_not_worth_tiles():
    assert module_of(nn.Linear(8, 8)) is None
    assert module_of(nn.GELU()) is None


class Norm(nn.Module):
    """A norm that computes in another dtype, as LLaMA's."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, rows):
        wide = rows.double()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(rows.dtype)


def test_norms_in_a_wider_dtype_are_found_beside_the_largest_module_with_products():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.first_norm, self.small, self.second_norm, self.mlp = Norm(), Mlp(), Norm(), Mlp()
            self.small.up, self.small.down = nn.Linear(8, 24), nn.Linear(24, 8)

        def forward(self, rows):
            rows = rows + self.small(self.first_norm(rows)).flip(1)
            return rows + self.mlp(self.second_norm(rows))

    modules = modules_of(Outer())
    assert [module.path for module in modules] == ["first_norm", "second_norm", "mlp"]
    assert [module.has_products for module in modules] == [False, False, True]


def test_a_module_that_writes_to_its_input_is_not():
    class InPlace(Mlp):
        def forward(self, rows):
            return super().forward(rows.mul_(2))

    module = module_of(InPlace())
    assert module is None or module.path != "part"


def test_the_input_may_be_a_view_with_rows_of_its_own():
    rows = torch.randn(2, 6, 16, requires_grad=True)[..., :8]
    assert module_of(Mlp(), rows).path == "part"
