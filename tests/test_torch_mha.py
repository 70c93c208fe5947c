"""MultiheadAttention as a drop-in: everything torch.nn.MultiheadAttention does, with another mechanism inside."""

import copy
import inspect
import itertools
import math

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint

import quest_core
from quest_core import MultiheadAttention
from quest_core.checkpoints import set_attention_from

SETTINGS = {
    "plain": {},
    "batch first": {"batch_first": True},
    "no bias": {"bias": False, "batch_first": True},
    "other key and value sizes": {"kdim": 6, "vdim": 10, "batch_first": True},
    "added keys": {"add_bias_kv": True, "add_zero_attn": True, "batch_first": True},
    "odd heads": {"num_heads": 3, "batch_first": True},
}


def pair(attention="standard", **settings):
    """PyTorch's module and ours with the same weights."""
    torch.manual_seed(0)
    heads = settings.pop("num_heads", 4)
    stock = nn.MultiheadAttention(12, heads, **settings)
    with torch.no_grad():
        for parameter in stock.parameters():
            parameter.uniform_(-0.5, 0.5)
    ours = MultiheadAttention(12, heads, **settings, attention=attention)
    set_attention_from(ours, "standard")
    ours.load_state_dict(stock.state_dict(), strict=True)
    return stock, ours


@pytest.mark.parametrize("attention", ["quest+sinkhorn", "quest+pgqa(kv_heads=2)"])
def test_self_attention_is_known_when_a_checkpoint_repeats_it(attention):
    """Reentrant checkpointing hands on three aliases of one tensor, of which padding hides the queries too."""
    made = MultiheadAttention(12, 4, attention=attention, batch_first=True)
    tokens, padding = torch.randn(2, 5, 12), torch.arange(5) >= torch.tensor([5, 3])[:, None]
    grads = []
    for again in (False, True):
        torch.manual_seed(0)
        x = tokens.clone().requires_grad_()
        out = checkpoint(made, x, x, x, padding, use_reentrant=True) if again else made(x, x, x, padding)
        out[0][~padding].pow(2).sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(*grads)


def test_a_decoder_with_padding_takes_a_family():
    """nn.TransformerDecoder sends the causal mask and its padding."""
    torch.manual_seed(0)
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 4, 32, dropout=0, batch_first=True), 2)
    quest_core.inject(decoder, "linear")
    x, memory, causal = torch.randn(2, 3, 16), torch.randn(2, 5, 16), nn.Transformer.generate_square_subsequent_mask(3)
    padding = torch.tensor([[False, False, True], [False, False, False]])
    out = decoder(x, memory, tgt_mask=causal, tgt_is_causal=True, tgt_key_padding_mask=padding)
    short = decoder(x[:1, :2], memory[:1], tgt_mask=causal[:2, :2], tgt_is_causal=True)
    torch.testing.assert_close(out[:1, :2], short)


def test_queries_of_a_decoder_do_not_meet_when_they_attend_across():
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 4, 32, batch_first=True), 2)
    with pytest.raises(quest_core.UnsupportedError, match="multihead_attn.*cannot be causal"):
        quest_core.inject(decoder, lambda site: "sinkhorn" if "multihead" in site.path else "quest")


def inputs(stock, n=5, m=7, batch=2):
    torch.manual_seed(1)
    shapes = ((n, 12), (m, stock.kdim), (m, stock.vdim))
    made = [torch.randn(batch, length, dim) for length, dim in shapes]
    return tuple(x if stock.batch_first else x.transpose(0, 1) for x in made)


def masks(batch, heads, n, m):
    torch.manual_seed(2)
    hidden = torch.rand(n, m) > 0.6
    hidden[:, 0] = False
    padding = torch.zeros(batch, m, dtype=torch.bool)
    padding[0, m - 2 :] = True
    per_head = torch.rand(batch * heads, n, m) > 0.6
    per_head[..., 0] = False
    yield {}
    yield {"attn_mask": hidden}
    yield {"key_padding_mask": padding}
    yield {"attn_mask": hidden, "key_padding_mask": padding}
    yield {"attn_mask": per_head}
    yield {"attn_mask": torch.randn(n, m)}
    yield {"attn_mask": torch.randn(n, m), "key_padding_mask": torch.zeros(batch, m).masked_fill(padding, -math.inf)}


def test_signature_is_that_of_torch():
    ours, stock = inspect.signature(MultiheadAttention), inspect.signature(nn.MultiheadAttention)
    assert list(ours.parameters)[: len(stock.parameters)] == list(stock.parameters)
    assert list(inspect.signature(MultiheadAttention.forward).parameters) == list(
        inspect.signature(nn.MultiheadAttention.forward).parameters
    )


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch warns of masks of two types
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_standard_equals_torch(settings):
    stock, ours = pair(**settings)
    assert ours.state_dict().keys() == stock.state_dict().keys()
    asked = itertools.product(masks(2, stock.num_heads, 5, 7), (True, False), (True, False))
    for options, need_weights, average in asked:
        found = []
        for module in (stock, ours):
            x, parameters = [y.clone().requires_grad_() for y in inputs(stock)], dict(module.named_parameters())
            out, weights = module(*x, need_weights=need_weights, average_attn_weights=average, **options)
            slopes = torch.autograd.grad(out.square().sum(), [*x, *parameters.values()], allow_unused=True)
            found.append([out, weights, *slopes[:3], dict(zip(parameters, slopes[3:], strict=True))])
        torch.testing.assert_close(*found)


def test_self_attention_equals_torch_in_every_layout():
    for batch_first in (True, False):
        stock, ours = pair(batch_first=batch_first)
        x = inputs(stock)[0]
        torch.testing.assert_close(ours(x, x, x)[0], stock(x, x, x)[0])
        flat = x[0] if batch_first else x[:, 0]  # without a batch
        (a, wa), (b, wb) = stock(flat, flat, flat), ours(flat, flat, flat)
        torch.testing.assert_close(b, a)
        torch.testing.assert_close(wb, wa)


def test_is_causal_means_the_causal_mask():
    stock, ours = pair(batch_first=True)
    x = inputs(stock)[0]
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    want = stock(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0]
    torch.testing.assert_close(ours(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0], want)
    torch.testing.assert_close(ours(x, x, x, attn_mask=mask, is_causal=True)[0], want)
    torch.testing.assert_close(ours(x, x, x, is_causal=True)[0], want)


def test_a_query_that_sees_nothing_gives_zero_weights():
    _, ours = pair("quest", batch_first=True)
    x = inputs(ours)[0]
    out, weights = ours(x, x, x, key_padding_mask=torch.ones(2, 5, dtype=torch.bool))
    assert (weights == 0).all()
    torch.testing.assert_close(out, ours.out_proj.bias.expand_as(out))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attn_mask": torch.zeros(5, 5, dtype=torch.bool)}, r"attn_mask has shape \[5, 5\].*\[5, 7\]"),
        ({"key_padding_mask": torch.zeros(2, 5, dtype=torch.bool)}, r"key_padding_mask has shape .*\[2, 7\]"),
        ({"key_padding_mask": torch.zeros(2, 7, dtype=torch.long)}, "key_padding_mask is torch.int64"),
    ],
)
def test_wrong_masks_are_named(options, message):
    stock, ours = pair("quest", batch_first=True)
    with pytest.raises(quest_core.InputError, match=message):
        ours(*inputs(stock), **options)


@pytest.mark.parametrize("added", [{}, {"add_bias_kv": True}, {"add_zero_attn": True}], ids=["", "bias", "zero"])
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("attention", ["sinkhorn", "quest+pgqa(kv_heads=2)", "sigmoid+pgqa(kv_heads=2)"])
def test_padding_takes_no_part_as_a_query(attention, need_weights, added, monkeypatch):
    """Neither of the columns' mass nor of what the noise is made of; in place of random numbers it follows the weights,
    so that more padding does not draw others."""
    monkeypatch.setattr(torch, "randn_like", lambda weights: (50 * weights).sin())
    layer = MultiheadAttention(12, 4, batch_first=True, attention=attention, dtype=torch.double, **added)
    x = torch.randn(1, 5, 12, dtype=torch.double)
    want = layer(x, x, x, need_weights=need_weights)[0]
    for length in (6, 9):
        y = torch.cat([x, torch.randn(1, length - 5, 12, dtype=torch.double)], dim=1)
        padding = torch.arange(length)[None] >= 5
        torch.testing.assert_close(
            layer(y, y, y, key_padding_mask=padding, need_weights=need_weights)[0][:, :5], want, rtol=1e-10, atol=1e-10
        )


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("padded", [True, False])
def test_the_mechanism_is_told_that_it_is_causal(need_weights, padded):
    """With padding or weights the mask does the masking, but what looks ahead by itself must still be refused."""
    x, mask = torch.randn(2, 6, 12), nn.Transformer.generate_square_subsequent_mask(6)
    options = {"attn_mask": mask, "is_causal": True, "need_weights": need_weights}
    if padded:
        options["key_padding_mask"] = torch.zeros(2, 6)
    for attention in ("sinkhorn", "quest+kdgqa(kv_heads=2)", "quest+pgqa(kv_heads=2)"):
        with pytest.raises(quest_core.UnsupportedError, match="cannot be causal"):
            MultiheadAttention(12, 4, batch_first=True, attention=attention)(x, x, x, **options)
    one, two = (MultiheadAttention(12, 4, batch_first=True, attention="elliptical").eval() for _ in range(2))
    quest_core.chain(nn.ModuleList([one, two]))

    def run(x):
        x = one(x, x, x, **options)[0]
        return two(x, x, x, **options)[0]

    later = x.clone()
    later[:, 4:] += 1
    torch.testing.assert_close(run(later)[:, :4], run(x)[:, :4])


def test_added_keys_need_no_others():
    for settings in ({"add_zero_attn": True}, {"add_bias_kv": True, "add_zero_attn": True}):
        stock, ours = pair(batch_first=True, **settings)
        for n in (0, 3):
            x = inputs(stock, n, 0)
            torch.testing.assert_close(ours(*x), stock(*x))


def test_nested_tensors_with_more_than_themselves_are_refused():
    _, ours = pair("quest", batch_first=True)
    nested = torch.nested.nested_tensor([torch.randn(3, 12), torch.randn(5, 12)])
    other = torch.nested.nested_tensor([torch.randn(3, 12), torch.randn(5, 12)])
    for inputs_, options in (((nested, other, other), {}), ((nested, nested, nested), {"is_causal": True})):
        with pytest.raises(quest_core.InputError, match="nested tensors are taken for self-attention without masks"):
            ours(*inputs_, **options)


def test_parametrized_weights_are_refused():
    normed = nn.utils.parametrizations.weight_norm(nn.MultiheadAttention(12, 4), "in_proj_weight")
    with pytest.raises(quest_core.InputError, match="are parametrized"):
        quest_core.inject(nn.ModuleList([normed]), "quest")


@pytest.mark.parametrize("mask", ["key_padding_mask", "attn_mask", "a mask a head"])
@pytest.mark.drawn(1)
def test_one_graph_serves_all_lengths_with_masks(mask):
    layer, counting = MultiheadAttention(12, 4, attention="quest", batch_first=True), CompileCounter()
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend=counting, fullgraph=True, dynamic=True)
    for batch, n in ((2, 5), (3, 7), (4, 6)):
        x, shape = torch.randn(batch, n, 12), {"key_padding_mask": (batch, n), "attn_mask": (n, n)}
        name = mask if mask in shape else "attn_mask"
        given = {name: torch.rand(shape.get(mask, (4 * batch, n, n))) > 0.7}
        torch.testing.assert_close(compiled(x, x, x, **given), layer(x, x, x, **given))
    assert counting.frame_count == 1


def test_masks_of_a_wider_type_do_not_widen_the_output():
    ours = MultiheadAttention(12, 4, batch_first=True, attention="quest", dtype=torch.bfloat16)
    x, mask = torch.randn(2, 5, 12).bfloat16(), torch.zeros(5, 5)
    for need_weights in (True, False):
        assert ours(x, x, x, attn_mask=mask, need_weights=need_weights)[0].dtype == torch.bfloat16


@pytest.mark.parametrize("batch_first", [True, False])
def test_standard_trains_bit_for_bit_like_pytorch(batch_first):
    """Under padding and dropout, as graph Transformers train: sums run in PyTorch's order, so losses never drift."""
    torch.manual_seed(0)
    stock = nn.MultiheadAttention(32, 4, dropout=0.5, batch_first=batch_first)
    ours = quest_core.inject(copy.deepcopy(stock), "standard")[0]
    x = torch.randn(3, 40, 32) if batch_first else torch.randn(40, 3, 32)
    padding = torch.arange(40) >= torch.tensor([40, 21, 33])[:, None]  # [3, 40]
    grads = []
    for module in (stock, ours):
        inputs = x.clone().requires_grad_()
        torch.manual_seed(1)
        out = module(inputs, inputs, inputs, key_padding_mask=padding, need_weights=False)[0]
        out.square().sum().backward()
        grads.append([out, inputs.grad, *(p.grad for p in module.parameters())])
    torch.testing.assert_close(*grads, rtol=0, atol=0)


@torch.no_grad()
@pytest.mark.parametrize("attention", ["standard", "quest"])
def test_a_query_that_sees_nothing_gives_no_nan_where_an_encoder_evaluates(attention):
    """PyTorch's native path, which reads the weights and bypasses the module, gives NaN."""
    layer, _ = quest_core.inject(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval(), attention)
    x, blind = torch.randn(2, 5, 16), torch.arange(5)[:, None].expand(5, 5) == 1
    assert layer(x, src_mask=blind).isfinite().all()
    assert layer(x, src_key_padding_mask=torch.tensor([[False] * 5, [True] * 5])).isfinite().all()


@pytest.mark.parametrize("settings", ["plain", "other key and value sizes"])
def test_parameters_reset_like_pytorchs(settings):
    stock, ours = pair(**SETTINGS[settings])
    for module in (stock, ours):
        torch.manual_seed(3)
        module._reset_parameters()
    torch.testing.assert_close([*ours.parameters()], [*stock.parameters()], rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_gradients_pass_nested_tensors():
    """A frozen first layer makes nn.TransformerEncoder hand nested tensors to the layers that train."""
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True), 2)
    model, _ = quest_core.inject(model, "quest")
    model.layers[0].eval().requires_grad_(False)
    padding = torch.zeros(3, 6, dtype=torch.bool)
    padding[0, 4:] = True
    x, weights = torch.randn(3, 6, 16), torch.randn(16)
    (model(x, src_key_padding_mask=padding) * weights).masked_fill(padding[..., None], 0).sum().backward()
    nested = {name: p.grad.clone() for name, p in model.layers[1].named_parameters()}
    model.zero_grad()
    model.enable_nested_tensor = False
    (model(x, src_key_padding_mask=padding) * weights).masked_fill(padding[..., None], 0).sum().backward()
    for name, parameter in model.layers[1].named_parameters():
        torch.testing.assert_close(nested[name], parameter.grad)


def test_padding_by_the_lowest_number_is_padding():
    padding, x = torch.zeros(2, 6, dtype=torch.bool), torch.randn(2, 6, 16)
    padding[0, 3:] = True
    layer = quest_core.MultiheadAttention(16, 2, batch_first=True, attention="sinkhorn").eval()
    outs = [
        layer(x, x, x, key_padding_mask=mask, need_weights=False)[0][~padding]
        for mask in (padding, *(torch.zeros(2, 6).masked_fill(padding, low) for low in (-torch.inf, -3e38)))
    ]
    assert torch.equal(outs[1], outs[0])
    assert torch.equal(outs[2], outs[0])


def test_jit_script_is_refused_by_name():
    model, _ = quest_core.inject(nn.TransformerEncoderLayer(16, 4), "quest")
    with pytest.raises(quest_core.UnsupportedError, match=r"'quest' does not support torch.jit.script.*torch.export"):
        torch.jit.script(model)
    assert isinstance(torch.jit.script(nn.MultiheadAttention(16, 4)), torch.jit.ScriptModule)


def test_the_hint_is_causal_adds_nothing_to_a_mask_of_other_lengths():
    """PyTorch aligns a causal mask at the first key, and takes is_causal=True with attn_mask for a hint."""
    stock, ours = pair(batch_first=True)
    query, key = torch.randn(2, 3, 12), torch.randn(2, 5, 12)
    hidden = torch.ones(3, 5, dtype=torch.bool).triu(4)  # hides less than a causal mask aligned at the last key
    how = {"attn_mask": hidden, "is_causal": True, "need_weights": False}
    want = stock(query, key, key, attn_mask=hidden, need_weights=False)[0]
    torch.testing.assert_close(ours(query, key, key, **how)[0], want)
