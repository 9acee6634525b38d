"""Profiles like those of a GPT-2 on a GPU, made without a model."""

import pytest
from profile_builders import TapeBuilder, codec, make_profile

from adacc_hf.artifacts.profile import Shared


def gpt2_kind(batch, tokens, width, heads, attention, bytes_per_element):
    """Return a GPT-2 block in training, priced like a device of 100 TFLOP/s and 1 TB/s."""
    tape = TapeBuilder()
    hidden = batch * tokens * width * bytes_per_element
    rows = batch * tokens * 4
    scores = batch * heads * tokens * tokens * bytes_per_element

    def copy_ms(nbytes):
        return 0.005 + nbytes / 1e9

    def matmul_ms(columns_in, columns_out):
        return 0.005 + 2 * batch * tokens * columns_in * columns_out / 1e11

    def int4(value, name="outlier_int4", cost=2.0, error=0.08):
        nbytes = tape.values[value]["nbytes"]
        tape.values[value]["codecs"] = (
            codec(name, nbytes * 9 // 32, cost * copy_ms(nbytes), copy_ms(nbytes), error),
            codec("int8", nbytes * 17 // 32, copy_ms(nbytes), copy_ms(nbytes), error / 6),
        )

    def bits(value):
        nbytes = tape.values[value]["nbytes"]
        tape.values[value]["codecs"] = (codec("bitmask", nbytes // 8, copy_ms(nbytes), copy_ms(nbytes), 0.0),)

    def dropout(source, nbytes, name):
        (mask,) = tape.operator(
            "rand_mask", [source], [(f"{name}.mask", nbytes // bytes_per_element)], 0.02, replayable=False
        )
        bits(mask)
        (out,) = tape.operator("mul_mask", [source, mask], [(name, nbytes)], copy_ms(nbytes), save=[mask])
        return out

    def linear(source, columns_in, columns_out, name):
        out_bytes = batch * tokens * columns_out * bytes_per_element
        (out,) = tape.operator(
            "addmm", [source], [(name, out_bytes)], matmul_ms(columns_in, columns_out), save=[source]
        )
        int4(source)
        return out

    def norm(source, name):
        outputs = [(name, hidden), (f"{name}.mean", rows), (f"{name}.rstd", rows)]
        out, _, _ = tape.operator("native_layer_norm", [source], outputs, copy_ms(hidden), save=[source, -2, -1])
        int4(source)
        return out

    def pointwise(name, sources, save=()):
        size = 4 * hidden
        (out,) = tape.operator(name, sources, [(name, size)], copy_ms(size), save=save)
        return out

    start = tape.value("hidden_states", hidden)
    qkv = linear(norm(start, "ln_1"), width, 3 * width, "c_attn")
    if attention == "sdpa":
        outputs = [("sdpa", hidden), ("logsumexp", rows * heads), ("seed", 16)]
        ms = 4 * batch * tokens * tokens * width / 1e11
        out, _, _ = tape.operator("flash", [qkv], outputs, ms, save=[qkv, -3, -2, -1], replayable=False)
        int4(out)
    else:
        (weights,) = tape.operator(
            "bmm", [qkv], [("scores", scores)], 2 * batch * tokens * tokens * width / 1e11, save=[qkv]
        )
        mask = tape.value("attention_mask", tokens * tokens, shared=0)
        (masked,) = tape.operator("where", [weights, mask], [("masked", scores)], copy_ms(scores), save=[mask])
        (soft,) = tape.operator("softmax", [masked], [("softmax", scores)], copy_ms(scores), save=[-1])
        int4(soft, "asymmetric_int4")
        dropped = dropout(soft, scores, "attn_dropout")
        int4(dropped, "asymmetric_int4")
        ms = 2 * batch * tokens * tokens * width / 1e11
        (out,) = tape.operator("bmm", [dropped, qkv], [("context", hidden)], ms, save=[dropped])
    int4(qkv, "channel_int4")
    (merged,) = tape.operator("clone", [out], [("merged", hidden)], copy_ms(hidden))
    first = dropout(linear(merged, width, width, "attn.c_proj"), hidden, "resid_dropout")
    (middle,) = tape.operator("add", [start, first], [("residual", hidden)], copy_ms(hidden))
    up = linear(norm(middle, "ln_2"), width, 4 * width, "c_fc")
    cube = pointwise("pow", [up], save=[up])
    inner = pointwise("add", [up, pointwise("mul", [cube])])
    tanh = pointwise("tanh", [pointwise("mul", [inner])], save=[-1])
    half = pointwise("half", [up])
    shifted = pointwise("add_one", [tanh])
    gelu = pointwise("gelu", [half, shifted], save=[half, shifted])
    for value in (up, tanh, half, shifted):
        int4(value)
    second = dropout(linear(gelu, 4 * width, width, "mlp.c_proj"), hidden, "mlp_dropout")
    tape.operator("add", [middle, second], [("out", hidden)], copy_ms(hidden))
    return tape.kind(digest=f"gpt2-{attention}", extra_bytes=8 * hidden, forward_extra_bytes=9 * hidden)


@pytest.fixture(scope="session")
def gpt2_like_profile():
    """A factory of profiles like a GPT-2's: `gpt2_like_profile(num_blocks=12, attention="sdpa")`."""

    def build(num_blocks=12, attention="sdpa", batch=8, tokens=1024, width=768, bytes_per_element=2):
        kind = gpt2_kind(batch, tokens, width, width // 64, attention, bytes_per_element)
        hidden = batch * tokens * width * bytes_per_element
        parameters = 4 * (num_blocks * 12 * width * width + 51200 * width)
        static = 3 * parameters
        logits = batch * tokens * 51200 * 4
        return make_profile(
            [kind],
            [0] * num_blocks,
            shared=[Shared(name="attention_mask", nbytes=tokens * tokens, saved=True)] if attention == "eager" else [],
            static_bytes=static,
            gradient_bytes=4 * 12 * width * width,
            outside_stored_bytes=2 * hidden,
            forward_base_bytes=static + 3 * hidden,
            outside_peak_bytes=static + 2 * hidden + 2 * logits,
            loss_peak_bytes=static + 2 * hidden + 2 * logits,
            tail_peak_bytes=static + parameters,
            available_bytes=80 << 30,
        )

    return build
