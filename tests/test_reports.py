"""Situations that people reported of other libraries: each gives what PyTorch gives, or an error with the reason."""

import itertools
import logging

import pytest
import torch
import torch.nn.functional as F
from models import Around, Call, Host
from torch import nn
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import quest_core


class Model(nn.Module):
    """Self-attention with a padding mask: a module of torch.nn, a layer of ours, a call of PyTorch, or written out."""

    def __init__(self, kind, attention):
        super().__init__()
        self.kind = kind
        self.qkv = nn.Linear(16, 48)
        self.inner = None
        if kind == "layer":
            self.inner = quest_core.Attention(16, 2, attention=attention)
        elif kind in ("multihead", "weights"):
            self.inner = nn.MultiheadAttention(16, 2, batch_first=True)
            quest_core.inject(self, attention)
        elif kind == "encoder":
            self.inner = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
            quest_core.inject(self, attention)

    def forward(self, x, padding):  # [B, N, 16], [B, N] -> [B, N, 16]
        if self.kind == "layer":
            return self.inner(x, key_mask=~padding)
        if self.kind == "multihead":
            return self.inner(x, x, x, key_padding_mask=padding, need_weights=False)[0]
        if self.kind == "weights":
            return self.inner(x, x, x, key_padding_mask=padding)[0]
        if self.kind == "encoder":
            return self.inner(x, src_key_padding_mask=padding)
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)  # [B, H, N, D] each
        if self.kind == "written":
            weights = (q @ k.transpose(-2, -1) * 8**-0.5).masked_fill(padding[:, None, None], -1e9).softmax(-1)
            return (weights @ v).transpose(1, 2).flatten(2)
        out = F.scaled_dot_product_attention(q, k, v, ~padding[:, None, None])
        return out.transpose(1, 2).flatten(2)


def model(kind, attention):
    made = Model(kind, attention).eval()
    if kind in ("call", "written"):
        quest_core.inject(made, attention, example=inputs(2, 5))
    return made


def inputs(batch, tokens):
    padding = torch.zeros(batch, tokens, dtype=torch.bool)
    padding[-1, tokens - 1 :] = tokens > 1
    return torch.randn(batch, tokens, 16), padding


# --- a size of 1 in the example of an exporter ------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["standard", "quest", "qknorm", "quest+sigmoid"])
@pytest.mark.parametrize("kind", ["multihead", "weights", "encoder", "layer", "call", "written"])
@pytest.mark.parametrize("sizes", [(1, 5), (2, 5), (2, 1), (1, 1)], ids=str)
def test_onnx_keeps_every_axis_dynamic(kind, attention, sizes, tmp_path):
    """An example of one sample, or of one token, fixed that size in the exported graph."""
    import onnxruntime

    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    made = model(kind, attention)
    axes = {0: "batch", 1: "tokens"}
    options = {"dynamo": True, "dynamic_shapes": (axes, axes), "verbose": False}
    # PyTorch fixes the 1 where these broadcast.
    broadcasts = attention == "quest+sigmoid" or (attention == "qknorm" and kind != "written")
    if (sizes[1] == 1 and broadcasts) or (kind, sizes) == ("weights", (1, 1)):
        with pytest.raises(Exception, match="example of one token"):
            torch.onnx.export(made, inputs(*sizes), **options)
        return
    if sizes[1] == 1 and (kind == "written" or (kind, sizes) == ("encoder", (1, 1))):
        pytest.skip("PyTorch itself fixes the length of this model")
    program = torch.onnx.export(made, inputs(*sizes), **options)
    program.save(tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    for batch, tokens in ((3, 7), (1, 4), (2, 1)):
        given = inputs(batch, tokens)
        feed = {node.name: value.numpy() for node, value in zip(session.get_inputs(), given, strict=True)}
        (found,) = session.run(None, feed)
        torch.testing.assert_close(torch.from_numpy(found), made(*given).detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.needs_torch("2.6", "torch.onnx.export(dynamo=True)")
@pytest.mark.parametrize("sizes", [(1, 5), (5, 1)], ids=str)
def test_onnx_refuses_an_example_of_one_query_or_one_key(sizes):
    q, k = (torch.randn(2, 2, tokens, 8) for tokens in sizes)
    made = quest_core.Mechanism("quest+sigmoid", num_heads=2, head_dim=8)
    shapes = ({2: "queries"}, {2: "keys"}, {2: "keys"})
    with pytest.raises(Exception, match="example of one token"):
        torch.onnx.export(made, (q, k, k), dynamo=True, dynamic_shapes=shapes, verbose=False)


@pytest.mark.parametrize("attention", ["standard", "quest", "qknorm-hs", "quest+sigmoid"])
@pytest.mark.parametrize("kind", ["multihead", "encoder", "layer", "call"])
@pytest.mark.drawn(4)
def test_a_batch_whose_size_only_the_run_knows_is_exported(kind, attention):
    """pytorch#180202: torch.export asked whether there is one sample, or none."""

    choosing = Host(lambda m, x, padding, chosen: m.inner(x[chosen], padding[chosen]), inner=model(kind, attention))
    made, given = choosing.eval(), inputs(4, 5)
    with torch.no_grad():  # else nn.TransformerEncoderLayer asks for more itself
        program = torch.export.export(made, (*given, torch.tensor([True, False, True, True])), strict=False).module()
        for chosen in ([True, False, True, True], [False, False, True, True], [False, False, True, False]):
            torch.testing.assert_close(program(*given, torch.tensor(chosen)), made(*given, torch.tensor(chosen)))


# --- what scaled_dot_product_attention takes --------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["standard", "quest", "quest+sigmoid", "qnorm+gqa(kv_heads=2)"])
@pytest.mark.parametrize("bias", [causal_lower_right, causal_upper_left])
def test_the_causal_biases_of_torch_are_masks(attention, bias):
    """`torch.nn.attention.bias` has masks that are subclasses of Tensor."""
    q, k, v = torch.randn(2, 2, 4, 8), torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 8)
    mask = bias(4, 6)
    dense = torch.ones(4, 6, dtype=torch.bool).tril(2 if bias is causal_lower_right else 0)
    found = quest_core.attention(q, k, v, attention, attn_mask=mask)
    torch.testing.assert_close(found, quest_core.attention(q, k, v, attention, attn_mask=dense))


SHAPES = {
    "wide values": ((3, 2, 4, 8), (3, 2, 6, 8), (3, 2, 6, 5)),
    "latents: one query batch for all keys": ((1, 2, 4, 8), (3, 2, 6, 8)),
    "memory: one key batch for all queries": ((3, 2, 4, 8), (1, 2, 6, 8)),
    "one batch of values": ((3, 2, 4, 8), (3, 2, 6, 8), (1, 2, 6, 8)),
    "no batch": ((2, 4, 8), (2, 6, 8)),
    "no batch and no heads": ((4, 8), (6, 8)),
    "two batch axes": ((2, 3, 2, 4, 8), (2, 3, 2, 6, 8)),
    "two batch axes, one of them broadcast": ((2, 3, 2, 4, 8), (1, 3, 2, 6, 8)),
    "three batch axes": ((2, 1, 3, 2, 4, 8), (2, 2, 3, 2, 6, 8)),
    "one head of keys for all queries": ((3, 2, 4, 8), (3, 1, 6, 8)),
    "one head of queries for all keys": ((3, 1, 4, 8), (3, 2, 6, 8)),
    "queries without a batch": ((2, 4, 8), (3, 2, 6, 8)),
    "keys without a batch": ((3, 2, 4, 8), (2, 6, 8)),
    "keys without a batch and heads": ((3, 2, 4, 8), (6, 8)),
    "one of everything": ((1, 1, 1, 8), (1, 1, 1, 8)),
    "no samples": ((0, 2, 4, 8), (0, 2, 6, 8)),
    "gqa": ((3, 4, 4, 8), (3, 2, 6, 8)),
    "gqa of one key head": ((3, 4, 4, 8), (3, 1, 6, 8)),
    "gqa with one key head and two value heads": ((3, 4, 4, 8), (3, 1, 6, 8), (3, 2, 6, 8)),
    "gqa with one query batch": ((1, 4, 4, 8), (3, 2, 6, 8)),
    "gqa without a batch": ((4, 4, 8), (2, 6, 8)),
    "gqa with two batch axes": ((2, 3, 4, 4, 8), (2, 3, 2, 6, 8)),
}


def broadcasting(full):
    """Return every shape of two or more axes that broadcasts to `full`."""
    axes = ((1, n) if n > 1 else (n,) for n in full)
    return [shape[drop:] for shape in itertools.product(*axes) for drop in range(len(full) - 1)]


@pytest.mark.parametrize("attention", ["standard", "quest", "quest+sigmoid"])
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.drawn(22)
def test_a_routed_call_takes_the_shapes_of_stock(attention, name):
    """With masks of every shape that broadcasts: pytorch#120810, #178207, onnxscript#2558."""
    q, k, v = (torch.randn(shape) for shape in (*SHAPES[name], SHAPES[name][1])[:3])
    options = {"enable_gqa": True} if "gqa" in name else {}
    stock = F.scaled_dot_product_attention(q, k, v, **options)
    made, _ = quest_core.inject(nn.Sequential(Call()), attention, example=lambda m: m[0](q, k, v, **options))
    repeated = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) if options else x for x in (k, v))
    axes = stock.dim()
    wide = [x[(None,) * (axes - x.dim())].expand(*stock.shape[:-2], -1, -1) for x in (q, *repeated)]
    rows = [x.reshape(-1, 1, *x.shape[-2:]) for x in wide]  # one head each, which a mechanism without a host takes
    n, m = q.shape[-2], k.shape[-2]
    full = torch.Size((*stock.shape[:-1], m))
    seen = [torch.rand(shape) > 0.3 for shape in sorted(set(broadcasting(full)))]
    masks = [*seen, *(torch.where(mask, torch.randn(mask.shape), -torch.inf) for mask in seen)]
    causal = torch.ones(n, m, dtype=torch.bool).tril()
    for mask, is_causal in ((None, False), (None, True), *((mask, False) for mask in masks)):
        dense = causal if is_causal else mask
        if dense is not None:
            dense = dense.expand(full).reshape(-1, 1, n, m)
        expected = quest_core.attention(*rows, attention, attn_mask=dense).reshape(stock.shape)
        found = made[0](q, k, v, mask, is_causal=is_causal, **options)
        torch.testing.assert_close(found, expected)
        if attention == "standard":
            host = F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal, **options)
            torch.testing.assert_close(found, host.nan_to_num(0))


def test_attention_with_projections_of_the_host_is_not_left_silently():
    """PyTorch Geometric's TransformerConv has a class Linear of its own, and stayed standard without a word."""

    class Linear(nn.Module):
        pass

    class TransformerConv(nn.Module):
        def __init__(self):
            super().__init__()
            self.heads, self.lin_key, self.lin_query = 2, Linear(), Linear()

    with pytest.raises(quest_core.InjectionError, match="TransformerConv"):
        quest_core.inject(nn.Sequential(nn.MultiheadAttention(16, 2), TransformerConv()), "quest")


# --- devices, dtypes and tools ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["standard", "quest", "qknorm-hs", "quest+sigmoid", "linear", "aft-simple"])
@pytest.mark.parametrize("kind", ["multihead", "layer", "call"])
@pytest.mark.drawn(6)
def test_torch_fx_traces_a_model(kind, attention):
    """Feature extraction of torchvision traces models symbolically; a mechanism is a leaf of the graph."""

    class Outer(nn.Module):  # a site is a leaf; its model is not
        def __init__(self):
            super().__init__()
            self.site = model(kind, attention)

        def forward(self, x, padding):
            return self.site(x, padding) + x

    made = Outer()
    graph = torch.fx.symbolic_trace(made)
    for sizes in ((2, 5), (1, 3)):
        given = inputs(*sizes)
        torch.testing.assert_close(graph(*given), made(*given))


HELPERS = {
    "call": F.scaled_dot_product_attention,
    "call with scale 1": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=1.0),
    "written": lambda q, k, v: (q @ k.mT * 8**-0.5).softmax(-1) @ v,
}


@pytest.mark.needs_torch("2.6", "torch.compile inside of a TorchFunctionMode")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("attention", ["qknorm-hs", "qknorm", "quest", "quest+sigmoid"])
@pytest.mark.parametrize("helper", HELPERS)
@pytest.mark.drawn(5)
def test_a_helper_that_is_compiled_gives_what_it_gives_uncompiled(helper, attention, backend):
    """The mode of a site went through its own call again inside of a compiled helper, whose graph calls functions."""

    made, x = Around(lambda q, k, v: HELPERS[helper](q, k, v) * 1.0).eval(), torch.randn(2, 5, 16)
    quest_core.inject(made, attention, example=x)
    for parameter in made.mechanism.parameters():
        nn.init.uniform_(parameter, 0.5, 2)
    expected = made(x)
    made.attend = torch.compile(made.attend, backend=backend)
    torch.testing.assert_close(made(x), expected)
    torch.testing.assert_close(made(x), expected)


def test_attributes_that_tools_read_stay_true():
    """peft's LoRA asks an nn.MultiheadAttention whether queries, keys and values have one width."""
    made, _ = quest_core.inject(nn.Sequential(nn.MultiheadAttention(16, 2)), "quest")
    assert made[0]._qkv_same_embed_dim
    made, _ = quest_core.inject(nn.Sequential(nn.MultiheadAttention(16, 2, kdim=8)), "quest")
    assert not made[0]._qkv_same_embed_dim


# --- further public reports, listed in docs/reports.md ----------------------------------------------------------------

MIXED = ["standard", "quest", "qknorm-hs", "quest+sigmoid", "qnorm+gqa(kv_heads=1)"]


def injected(attention, **options):
    made, _ = quest_core.inject(nn.Sequential(nn.MultiheadAttention(16, 2, **options)), attention)
    return made.eval()


@pytest.mark.parametrize("attention", MIXED)
def test_what_is_put_on_the_output_projection_acts_and_trains(attention):
    """pytorch#78109, helical#405, pytorch#118165: stock reads the weight of out_proj, and never calls the module."""
    from torch.ao.quantization import default_weight_fake_quant

    class Adapter(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base, self.added = base, nn.Linear(16, 16)
            self.weight, self.bias = base.weight, base.bias

        def forward(self, x):
            return self.base(x) + self.added(x)

    (made,), x, seen = injected(attention), torch.randn(5, 2, 16), []
    before = made(x, x, x, need_weights=False)[0]
    torch.nn.utils.parametrize.register_parametrization(made.out_proj, "weight", default_weight_fake_quant())
    assert 0 < (made(x, x, x, need_weights=False)[0] - before).abs().max() < 0.1
    weight = made.out_proj.parametrizations.weight.original
    made.out_proj = Adapter(made.out_proj)
    made.out_proj.register_forward_hook(lambda module, given, out: seen.append(out))
    out = made(x, x, x, need_weights=False)[0]
    torch.testing.assert_close(seen, [out])
    out.sum().backward()
    assert made.out_proj.added.weight.grad.any()
    assert weight.grad.any()


@pytest.mark.parametrize("attention", MIXED)
@pytest.mark.parametrize("nested", [True, False])
def test_an_encoder_keeps_columns_that_are_padding_everywhere(attention, nested):
    """pytorch#97111: the encoder cut the last tokens off where all samples were padded."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    made = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested).eval()
    quest_core.inject(made, attention)
    x, padding = torch.randn(3, 6, 16), torch.zeros(3, 6, dtype=torch.bool)
    padding[:, 4:], padding[1, 2:] = True, True
    with torch.no_grad():
        out = made(x, src_key_padding_mask=padding)
    assert out.shape == x.shape
    short = made(x[1:2, :2])
    torch.testing.assert_close(out[1:2, :2], short, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("attention", MIXED)
def test_weights_are_assigned_to_a_model_on_the_meta_device(attention):
    """pytorch#105963 and accelerate's big models: nothing may stay on the meta device."""
    trained = injected(attention)
    with torch.device("meta"):
        made = injected(attention)
    made.load_state_dict(trained.state_dict(), assign=True)
    assert not any(x.is_meta for x in (*made.parameters(), *made.buffers()))
    x = torch.randn(5, 2, 16)
    torch.testing.assert_close(made[0](x, x, x)[0], trained[0](x, x, x)[0])
