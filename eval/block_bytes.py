"""Bytes that one block keeps for backward, tensor by tensor, beside the formula of Megatron-LM's authors.

    adacc eval block-bytes

Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198), count for a GPT
block in 16 bits with dropout sbh (34 + 5as/h) bytes, sbh 34 where attention's core is recomputed, and 2sbh where all
is (sections 4.1, 5 and equation 2), for batches of b sequences of s tokens, a width of h and a attention heads. They
leave out what is small beside sbh. The blocks are Transformers', traced as a GPU runs them, without memory.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from transformers import GPT2Config, LlamaConfig, PretrainedConfig

from adacc_hf.artifacts.block_outcome import run_block
from adacc_hf.artifacts.policy import Policy
from adacc_hf.artifacts.units import format_bytes
from adacc_hf.estimate.devices import find_device
from adacc_hf.estimate.fake_model import PRECISIONS, Workload, fake_model
from adacc_hf.eval.records.ledger import Ledger, add_resume, open_ledger
from adacc_hf.eval.records.records import Figures, Settings, Status, add_settings, markdown_table


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of a batch and of a block. The default is the 22B model of the formula's paper."""

    s: int = 2048
    b: int = 4
    h: int = 6144
    a: int = 64

    @property
    def sbh(self) -> int:
        return self.s * self.b * self.h

    @property
    def as2b(self) -> int:
        return self.a * self.s**2 * self.b


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A block, and what the formula says of it."""

    title: str
    sbh: int
    """Bytes of the formula for each of the batch's s b h numbers."""
    as2b: int
    """The same for each attention score."""
    options: dict[str, Any] = field(default_factory=dict)
    """Of the configuration."""
    attention: str = "eager"
    precision: str = "bf16"
    is_checkpointed: bool = False
    is_llama: bool = False

    def config(self, shape: Shape) -> PretrainedConfig:
        tokens: dict[str, Any] = {"vocab_size": 512, "bos_token_id": None, "eos_token_id": None}
        if self.is_llama:
            sizes: dict[str, Any] = {
                "hidden_size": shape.h,
                "num_attention_heads": shape.a,
                "intermediate_size": 4 * shape.h,
            }
            return LlamaConfig(num_hidden_layers=2, max_position_embeddings=shape.s, **sizes, **tokens, **self.options)
        return GPT2Config(n_layer=2, n_embd=shape.h, n_head=shape.a, n_positions=shape.s, **tokens, **self.options)


ONE_GELU = {"activation_function": "gelu_pytorch_tanh"}
NO_DROPOUT = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
VARIANTS = {
    "formula": Variant(title="GPT-2, attention in operators, GELU in one", sbh=34, as2b=5, options=ONE_GELU),
    "gelu_new": Variant(title="GPT-2, attention in operators, as configured", sbh=34, as2b=5),
    "fused": Variant(title="GPT-2, fused attention, GELU in one", sbh=34, as2b=0, attention="sdpa", options=ONE_GELU),
    "recomputed": Variant(title="GPT-2, recomputed as a whole", sbh=2, as2b=0, is_checkpointed=True),
    "no dropout": Variant(
        title="GPT-2, fused attention, GELU in one, no dropout", sbh=32, as2b=0, attention="sdpa",
        options=ONE_GELU | NO_DROPOUT,
    ),
    "autocast": Variant(
        title="GPT-2, fused attention, GELU in one, float32 with autocast", sbh=34, as2b=0, attention="sdpa",
        precision="bf16-amp", options=ONE_GELU,
    ),
    "llama": Variant(title="LLaMA, an MLP of 4 h, fused attention", sbh=34, as2b=0, attention="sdpa", is_llama=True),
}  # fmt: skip

BESIDES: tuple[tuple[str, str], ...] = (
    (
        r"native_layer_norm#[23]$|layernorm:rsqrt$",
        "means and deviations of a norm, in float32",
    ),
    (r"attention#2$", "logarithms of fused attention's sums, in float32, in the place of 5as^2b"),
    (r"attention#[34]$", "state of fused attention's random numbers"),
    (r"^(attn|mlp)\.\w+:to_copy", "autocast's cast: of weights, which all batches share, or of a layer's input"),
    (r"layernorm:to_copy$", "the norm's input in float32"),
    (r"layernorm:to_copy#2$", "what is normalized, back in 16 bits, before the norm's weight"),
    (r"^mlp.act:(mul|tanh|add#2)$", "an operator of a GELU that is written in eight"),
    (r"^mlp.act_fn:|^mlp:mul", "SwiGLU's gate and product, in the place of one GELU"),
)
"""What the formula leaves out, by pattern of a tensor's name, and why it is there."""

COUNTED: tuple[tuple[str, str, int, int], ...] = (
    (r"^argument 0$", "input of the first norm", 2, 0),
    (r"^(ln_1|input_layernorm):", "input of queries, keys and values", 2, 0),
    (r"^attn.c_attn:", "queries, keys and values", 6, 0),
    (r"^attn:clone(#[23])?$|^self_attn:add|^self_attn.v_proj:", "queries, keys or values", 2, 0),
    (r"^attn:softmax$", "output of the softmax", 0, 2),
    (r"^attn:native_dropout$", "output of its dropout", 0, 2),
    (r"^attn:native_dropout#2$", "mask of its dropout", 0, 1),
    (r"^attn:clone#4$|attention$", "input of attention's projection", 2, 0),
    (r"^attn.resid_dropout:.*#2$", "mask of the dropout after it", 1, 0),
    (r"^block:add$", "input of the second norm", 2, 0),
    (r"^(ln_2|post_attention_layernorm):", "input of the MLP", 2, 0),
    (r"^mlp.(c_fc|gate_proj):", "input of the GELU, or of SwiGLU's gate", 8, 0),
    (r"^mlp.act:gelu$|^mlp.act:mul#4$|^mlp.up_proj:", "input of the second layer, or SwiGLU's other factor", 8, 0),
    (r"^mlp.dropout:.*#2$", "mask of the last dropout", 1, 0),
)
"""What the formula counts: pattern of a tensor's name, the term, its bytes per s b h and per a s^2 b."""


UNEXPLAINED = "kept besides"


def main(argv: Sequence[str] | None = None, measure: Callable[[str], Figures] | None = None) -> int:
    """Trace the blocks, print the tables, save the record."""
    parser = argparse.ArgumentParser(prog="adacc eval block-bytes", description=__doc__.partition("\n")[0])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="which (default: all)")
    add_resume(parser)
    add_settings(parser, "block_bytes")
    arguments = parser.parse_args(argv)
    settings = Settings.from_arguments(arguments)
    with open_ledger(settings, {"variants": arguments.variants}, arguments.resume) as ledger:
        for name in arguments.variants:
            ledger.measure(name, partial(measure or stored, name))
        ledger.finish(shape=vars(Shape()))
        ledger.publish(report_text(ledger))
    return 0


def stored(name: str, shape: Shape | None = None) -> Figures:
    """What one block of a variant keeps for backward."""
    variant, shape = VARIANTS[name], shape or Shape()
    workload = Workload(
        config=variant.config(shape),
        device=find_device("h100"),
        precision=PRECISIONS[variant.precision],
        attention=variant.attention,
    )
    with fake_model(workload) as model:
        profile = model.profile(shape.b, shape.s)
    block = profile.blocks[0]
    kind = profile.kind_of(block)
    policy = Policy.checkpoint(profile) if variant.is_checkpointed else Policy.uniform(profile, "retain")
    outcome = run_block(kind, policy.plan_of(block.name))
    kept = [value for value in kind.activations if value.saved or value.producer is None]
    if variant.is_checkpointed:
        kept = [value for value in kept if value.producer is None]
    return {
        "status": Status.MEASURED.value,
        "stored_bytes": outcome.stored_bytes,
        "formula_bytes": variant.sbh * shape.sbh + variant.as2b * shape.as2b,
        "tensors": [{"name": kind.names[v.index], "dtype": v.dtype, "nbytes": v.nbytes} for v in kept],
    }


def report_text(ledger: Ledger) -> str:
    """One line per block, then each block's tensors, as Markdown."""
    shape = Shape(**ledger.summary["shape"])
    found = {name: ledger.points[name] for name in ledger.run_info["variants"]}
    parts = [markdown_table([_variant_cells(VARIANTS[name], point, shape) for name, point in found.items()])]
    parts.append(
        f"Bytes of one block for s = {shape.s} tokens, b = {shape.b} sequences, a width of h = {shape.h} and "
        f"a = {shape.a} heads, with the formula of arXiv 2205.05198. Below, tensor by tensor, in bytes for each of the "
        f"s b h numbers of a block's input (sbh); here s a / h is {shape.s * shape.a / shape.h:.2f}."
    )
    for name, point in found.items():
        parts += [f"{VARIANTS[name].title}:", markdown_table([_tensor_cells(t, shape) for t in point["tensors"]])]
    return "\n\n".join(parts) + "\n"


def _variant_cells(variant: Variant, point: Figures, shape: Shape) -> dict[str, str]:
    terms = [f"{variant.sbh}sbh"] + ([f"{variant.as2b}as^2b"] if variant.as2b else [])
    more = point["stored_bytes"] - point["formula_bytes"]
    return {
        "block": variant.title,
        "formula": " + ".join(terms),
        "by the formula": format_bytes(point["formula_bytes"]),
        "stored": format_bytes(point["stored_bytes"]),
        "more, sbh": f"{more / shape.sbh:+.3f}",
        "more, %": f"{100 * more / point['formula_bytes']:+.2f}",
    }


def _tensor_cells(tensor: dict[str, Any], shape: Shape) -> dict[str, str]:
    counted, what = _explained(tensor["name"])
    return {
        "tensor": tensor["name"],
        "dtype": tensor["dtype"],
        "sbh": f"{tensor['nbytes'] / shape.sbh:.3f}",
        "counted": counted,
        "what": what,
    }


def _explained(name: str) -> tuple[str, str]:
    """What the formula counts for a tensor, and what it is or why it is there besides."""
    for pattern, reason in BESIDES:
        if re.search(pattern, name):
            return "", reason
    for pattern, term, sbh, as2b in COUNTED:
        if re.search(pattern, name):
            return f"{sbh}sbh" if sbh else f"{as2b}as^2b", term
    return "", UNEXPLAINED


if __name__ == "__main__":
    sys.exit(main())
