"""The universal site: models that no adapter knows, whose modules call scaled_dot_product_attention."""

import copy
import functools
import inspect
import io
import math
import pickle
import threading
import warnings

import pytest
import torch
import torch.nn.attention.flex_attention as flex
import torch.nn.functional as F
from models import Around, Call, Host, gradients
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import quest_core
from quest_core import InjectionError, InputError, UnsupportedError
from quest_core.hosts.universal import Routed
from quest_core.mechanisms import naive as reference

# --- models as their authors write them -------------------------------------------------------------------------------


def split(x, heads):
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


class CausalSelfAttention(nn.Module):
    """As in nanoGPT."""

    def __init__(self, width=32, heads=4, dropout=0.0):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.n_head, self.dropout = heads, dropout

    def forward(self, x):
        q, k, v = (split(y, self.n_head) for y in self.c_attn(x).chunk(3, -1))
        y = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=None, dropout_p=self.dropout if self.training else 0, is_causal=True
        )
        return self.c_proj(y.transpose(1, 2).flatten(2))


class GPT(nn.Module):
    def __init__(self, dropout=0.0, layers=3, recompute=False):
        super().__init__()
        self.wte = nn.Embedding(50, 32)
        self.h = nn.ModuleList(
            nn.ModuleDict({"ln": nn.LayerNorm(32), "attn": CausalSelfAttention(dropout=dropout)}) for _ in range(layers)
        )
        self.head = nn.Linear(32, 50)
        self.recompute = recompute

    def forward(self, tokens):
        x = self.wte(tokens)
        for block in self.h:
            normed, attend = block["ln"](x), block["attn"]
            x = x + (checkpoint(attend, normed, use_reentrant=False) if self.recompute else attend(normed))
        return self.head(x)


class DiTAttention(nn.Module):
    """Calls the function in a processor, as diffusers does."""

    def __init__(self):
        super().__init__()
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(32, 32) for _ in range(4))
        self.processor = Processor()

    def forward(self, x, context=None, mask=None):
        return self.processor(self, x, x if context is None else context, mask)


class Processor:
    def __call__(self, attn, x, context, mask):
        q, k, v = split(attn.to_q(x), 4), split(attn.to_k(context), 4), split(attn.to_v(context), 4)
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return attn.to_out(out.transpose(1, 2).flatten(2))


class DiT(nn.Module):
    """Adaptive layer norm by a time embedding, self-attention and cross-attention to a text."""

    def __init__(self):
        super().__init__()
        self.time = nn.Linear(1, 64)
        self.self_attn, self.cross_attn = DiTAttention(), DiTAttention()
        self.norm = nn.LayerNorm(32, elementwise_affine=False)

    def forward(self, x, t, text, mask):
        shift, scale = self.time(t[:, None])[:, None].chunk(2, -1)
        x = x + self.self_attn(self.norm(x) * (1 + scale) + shift)
        return x + self.cross_attn(self.norm(x), text, mask[:, None, None])


def rotate(x, start):
    angle = torch.arange(start, start + x.shape[2]).to(x)[:, None] * 10.0 ** -torch.arange(0, 4).to(x)  # [N, D/2]
    one, two = x.chunk(2, -1)
    return torch.cat([one * angle.cos() - two * angle.sin(), one * angle.sin() + two * angle.cos()], -1)


class LlamaAttention(nn.Module):
    """Shared key heads, rotary embedding and a cache of keys and values, all of them the host's."""

    def __init__(self, native=True):
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = nn.Linear(32, 32), nn.Linear(32, 16), nn.Linear(32, 16), nn.Linear(32, 32)
        self.native = native

    def forward(self, x, cache):
        start = 0 if not cache else cache["k"].shape[2]
        q, k, v = split(self.wq(x), 4), split(self.wk(x), 2), split(self.wv(x), 2)
        q, k = rotate(q, start), rotate(k, start)
        if cache is not None:
            if cache:
                k, v = torch.cat([cache["k"], k], 2), torch.cat([cache["v"], v], 2)
            cache.update(k=k, v=v)
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        if self.native:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.25, enable_gqa=True)
        else:
            k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.25)
        return self.wo(out.transpose(1, 2).flatten(2))


class Llama(nn.Module):
    def __init__(self, native=True):
        super().__init__()
        self.layers = nn.ModuleList(LlamaAttention(native) for _ in range(2))

    def forward(self, x, caches=None):
        for i, layer in enumerate(self.layers):
            x = x + layer(x, None if caches is None else caches[i])
        return x


def gpt():
    return GPT(), (torch.randint(50, (2, 9)),)


def dit():
    real = torch.arange(6) < torch.tensor([6, 4])[:, None]
    return DiT(), (torch.randn(2, 5, 32), torch.rand(2), torch.randn(2, 6, 32), real)


def llama():
    return Llama(), (torch.randn(2, 7, 32),)


MODELS = pytest.mark.parametrize("make", [gpt, dit, llama], ids=lambda make: make.__name__)


class Formula(TorchFunctionMode):
    """scaled_dot_product_attention as quest's plain formula in float64, on shared key heads too."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        q, k, v = args
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        seen = reference.visible(q.shape[2], k.shape[2], kwargs.get("attn_mask"), kwargs.get("is_causal", False))
        return reference.softmax(q @ reference.unit(k).mT, seen) @ v


# --- numbers ----------------------------------------------------------------------------------------------------------


@MODELS
def test_standard_equals_the_model_as_it_was(make):
    model, inputs = make()
    stock = copy.deepcopy(model)
    state = torch.get_rng_state()
    quest_core.inject(model, "standard", example=inputs)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.state_dict().keys() == stock.state_dict().keys()
    torch.testing.assert_close(gradients(model, *inputs), gradients(stock, *inputs), atol=1e-6, rtol=1e-6)


@MODELS
def test_quest_equals_its_formula(make):
    model, inputs = make()
    model, inputs = model.double(), tuple(x.double() if x.is_floating_point() else x for x in inputs)
    stock = copy.deepcopy(model)
    _, report = quest_core.inject(model, "quest", example=inputs)
    got = gradients(model, *inputs)
    with Formula():
        wanted = gradients(stock, *inputs)
    torch.testing.assert_close(got, wanted, atol=1e-12, rtol=1e-10)
    assert report.attention == "quest"
    assert {row.adapter for row in report.replacements} == {"universal"}


def test_the_cache_of_the_host_decodes_as_the_whole_sequence():
    model, (x,) = llama()
    quest_core.inject(model, "quest", example=x)
    caches = [{}, {}]
    steps = [model(piece, caches) for piece in (x[:, :4], x[:, 4:5], x[:, 5:])]
    torch.testing.assert_close(torch.cat(steps, 1), model(x))


@pytest.mark.parametrize("attention", ["quest", "qknorm", "quest+sigmoid", "quest+gqa(kv_heads=2)"])
def test_shared_key_heads_stay_those_of_the_host(attention):
    model, (x,) = llama()
    quest_core.inject(model, attention, example=x)
    gradients(model, x)
    assert attention in str(model.attention_report)
    if attention == "quest":
        other = Llama(native=False)
        other.load_state_dict({k: v for k, v in model.state_dict().items() if "mechanism" not in k})
        quest_core.inject(other, attention, example=x)
        torch.testing.assert_close(model(x), other(x))


# --- other functions --------------------------------------------------------------------------------------------------


class PackedAttention(nn.Module):
    """Calls multi_head_attention_forward, as WavLM and fairseq do, with other weights for q, k and v if `separate`."""

    def __init__(self, separate=True, weights=True, added=False):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(32, 32) for _ in range(4))
        self.separate, self.weights, self.dropout = separate, weights, 0.1
        self.extra = nn.Parameter(torch.randn(2, 1, 1, 32)) if added else (None, None)

    def forward(self, x, mask=None, padding=None):
        apart = {f"{n}_proj_weight": getattr(self, n).weight for n in "qkv"} if self.separate else {}
        packed = torch.empty(0) if self.separate else torch.cat([self.q.weight, self.k.weight, self.v.weight])
        bias = torch.cat([self.q.bias, self.k.bias, self.v.bias])
        x = x.transpose(0, 1)
        out, weights = F.multi_head_attention_forward(
            *(x, x, x, 32, 4, packed, bias, *self.extra, self.extra[0] is not None, self.dropout),
            *(self.o.weight, self.o.bias, self.training, padding, self.weights, mask, self.separate),
            **apart,
        )
        assert (weights is not None) == self.weights
        return out.transpose(0, 1)

    def formula(self, x, mask, padding):
        q, k, v = (split(y, 4) for y in (self.q(x), self.k(x), self.v(x)))
        if self.extra[0] is not None:
            k, v = (torch.cat([y, split(e, 4).expand(2, 4, 1, 8)], 2) for y, e in zip((k, v), self.extra, strict=True))
            k, v = (torch.cat([y, torch.zeros_like(y[:, :, :1])], 2) for y in (k, v))
        seen = torch.ones(2, 4, q.shape[2], k.shape[2], dtype=torch.bool)
        for each in (mask, None if padding is None else padding[:, None, None]):
            if each is not None:
                seen[..., : x.shape[1]] &= ~each
        return self.o((reference.softmax(q @ reference.unit(k).mT, seen) @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("how", [{}, {"weights": False}, {"separate": False}, {"added": True}], ids=str)
def test_multi_head_attention_forward_equals_the_formula(how):
    model, x = nn.Sequential(PackedAttention(**how)).double(), torch.randn(2, 5, 32).double()
    mask, padding = torch.rand(5, 5).triu(1) > 0.2, torch.arange(5) >= torch.tensor([5, 3])[:, None]
    stock = copy.deepcopy(model)
    with pytest.raises(UnsupportedError, match="'mqa' is not possible here|asks for 1"):
        quest_core.inject(model, "mqa", example=x)
    quest_core.inject(model, "standard", example=x)
    assert torch.equal(model.eval()(x), stock.eval()(x))
    _, report = quest_core.inject(model, "quest", example=x)
    assert report.replacements[0].adapter == "universal"
    for masks in ((None, None), (mask, None), (None, padding), (mask, padding)):
        wanted = stock[0].formula(x, *masks)
        torch.testing.assert_close(model[0](x, *masks), wanted)
    gradients(model.train(), x)
    with quest_core.Monitor(model) as monitor:
        model(x)
        assert list(monitor.collect()["0"]) != []


@pytest.mark.needs_torch("2.6", "torch.compile of a TorchFunctionMode")
def test_multi_head_attention_forward_compiles_to_one_graph():
    model, x = nn.Sequential(PackedAttention()).eval(), torch.randn(2, 5, 32)
    quest_core.inject(model, "quest", example=x)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x))


def test_multi_head_attention_of_a_class_of_ones_own():
    class Own(nn.MultiheadAttention):
        def forward(self, *args, **options):
            return super().forward(*args, **options)

    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0).eval()
    own = Own(32, 4, batch_first=True)
    own.load_state_dict(layer.self_attn.state_dict())
    other = copy.deepcopy(layer)
    other.self_attn = own.eval()
    x = torch.randn(2, 5, 32)
    quest_core.inject(layer, "quest")
    quest_core.inject(other, "quest", example=x)
    with torch.no_grad():
        torch.testing.assert_close(other(x), layer(x))


def by_flex_attention(_, q, k, v):
    mask = flex.create_block_mask(lambda b, h, i, j: i >= j, None, None, q.shape[2], q.shape[2], device="cpu")
    return flex.flex_attention(q, k, v, lambda s, b, h, i, j: s + (i - j) / 8, mask, enable_gqa=True)


@pytest.fixture
def flexible():
    """A model, its inputs, and the bias that its score_mod and its mask make."""
    place = torch.arange(128.0)
    bias = (place[:, None] - place) / 8
    heads = [torch.randn(2, heads, 128, 16) for heads in (4, 2, 2)]
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield nn.Sequential(Host(by_flex_attention)), heads, bias.masked_fill(bias < 0, -math.inf)


@pytest.mark.needs_torch("2.6", "torch.compile of a TorchFunctionMode")
def test_flex_attention_keeps_its_score_mod_and_block_mask(flexible):
    model, (q, k, v), bias = flexible
    run = lambda m: m[0](q, k, v)  # noqa: E731
    stock = run(model)
    quest_core.inject(model, "standard", example=run)
    torch.testing.assert_close(run(model), stock)
    for attention in ("linear", "quest+sigmoid"):
        with pytest.raises(UnsupportedError, match="the host's"):
            quest_core.inject(model, attention, example=run)
    quest_core.inject(model, "quest", example=run)
    keys, values = reference.unit(k).repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    wanted = F.scaled_dot_product_attention(q, keys, values, attn_mask=bias, scale=1.0)
    torch.testing.assert_close(run(model), wanted)
    torch._dynamo.reset()
    compiled = torch.compile(model[0], backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v), wanted)


@pytest.mark.needs_torch("2.6", "torch.compile of a TorchFunctionMode")
@pytest.mark.parametrize("attention", ["standard", "quest"])
def test_a_monitor_sees_the_logits_of_flex_attention(flexible, attention, monkeypatch):
    monkeypatch.setattr(quest_core.tools.monitor, "BLOCK", 2**15)
    model, (q, k, v), bias = flexible
    quest_core.inject(model, attention, example=lambda m: m[0](q, k, v))
    with quest_core.Monitor(model) as monitor:
        model[0](q, k, v)
        seen = monitor.collect()["0"]
        torch.compile(model[0], backend="eager")(q, k, v)
        assert monitor.collect()["0"] == seen
    keys = k.double() / 4 if attention == "standard" else reference.unit(k.double())
    logits = q.double() @ keys.repeat_interleave(2, 1).mT + bias
    entropy = -torch.special.xlogy(logits.softmax(-1), logits.softmax(-1)).sum(-1).mean((0, 2))
    assert seen["max_logit"] == pytest.approx(logits.amax((0, 2, 3)).tolist(), rel=1e-5)
    assert seen["entropy"] == pytest.approx(entropy.tolist(), rel=1e-5)
    assert seen["key_norm_max"] == pytest.approx(k.norm(dim=-1).amax((0, 2)).tolist())
    assert seen["query_norm_mean"] == pytest.approx(q.norm(dim=-1).mean((0, 2)).tolist())
    assert "logit_bound" not in seen


# --- what users do with a model ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.needs_torch("2.6", "torch.compile of a TorchFunctionMode")
@MODELS
def test_compile_and_export_make_one_graph(make):
    model, inputs = make()
    attention = "qknorm" if make is gpt else "quest"
    quest_core.inject(model, attention, example=inputs)
    wanted = gradients(model, *inputs)
    for dynamic in (False, True):
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=dynamic)
        torch.testing.assert_close(gradients(compiled, *inputs), wanted)
    for strict in (False, True):
        exported = torch.export.export(model, inputs, strict=strict)
        torch.testing.assert_close(exported.module()(*inputs), wanted[0])


@pytest.mark.needs_torch("2.6", "torch.compile of a TorchFunctionMode")
def test_layers_compiled_one_by_one_share_a_graph():
    model, inputs = GPT(layers=10), (torch.randint(50, (2, 9)),)
    quest_core.inject(model, "quest", example=inputs)
    wanted = model(*inputs)
    torch._dynamo.reset()
    counting = CompileCounter()
    for block in model.h:
        block["attn"].compile(backend=counting, fullgraph=True)
    torch.testing.assert_close(model(*inputs), wanted)
    assert 1 <= counting.frame_count <= 2


def test_jit_trace_keeps_the_length_free():
    model, inputs = dit()
    quest_core.inject(model.eval(), "quest", example=inputs)
    traced = torch.jit.trace(model, inputs)
    x, t, text, mask = inputs
    longer = (torch.cat([x, x], 1), t, text, mask)
    torch.testing.assert_close(traced(*longer), model(*longer))


@pytest.mark.slow
@pytest.mark.needs_torch("2.6", "torch.compile of a TorchFunctionMode")
def test_checkpoints_compile_to_one_graph_if_pytorch_takes_the_mode_for_no_side_effect(monkeypatch):
    option = "skip_fwd_side_effects_in_bwd_under_checkpoint"
    if not hasattr(torch._dynamo.config, option):
        pytest.skip(f"this PyTorch has no torch._dynamo.config.{option}")
    monkeypatch.setattr(torch._dynamo.config, option, True)
    model, inputs = GPT(layers=1, recompute=True), (torch.randint(50, (2, 9)),)
    quest_core.inject(model, "quest", example=inputs)
    want = gradients(model, *inputs)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(gradients(compiled, *inputs), want)


def test_threads_run_models_with_different_attention():
    inputs = (torch.randint(50, (2, 9)),)
    models = [GPT() for _ in range(3)]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    for model, attention in zip(models[1:], ("quest", "qnorm"), strict=True):
        quest_core.inject(model, attention, example=inputs)
    wanted = [model(*inputs) for model in models]
    found = [[] for _ in models]

    def work(i):
        for _ in range(20):
            found[i].append(models[i](*inputs))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for outs, out in zip(found, wanted, strict=True):
        assert len(outs) == 20
        for other in outs:
            torch.testing.assert_close(other, out)


@MODELS
def test_copies_pickles_and_checkpoints(make):
    model, inputs = make()
    stock = copy.deepcopy(model)
    quest_core.inject(model, "quest", example=inputs)
    wanted = model(*inputs)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)):
        torch.testing.assert_close(twin(*inputs), wanted)
        mine = {id(m) for m in model.modules()}
        assert not any(id(m) in mine for m in twin.modules())
    with pytest.raises(RuntimeError, match="attention_is_not_standard"):
        stock.load_state_dict(model.state_dict())
    other, _ = quest_core.inject(copy.deepcopy(stock), "qnorm", example=inputs)
    with pytest.raises(quest_core.CheckpointError, match="'quest', and the model has 'qnorm'"):
        other.load_state_dict(model.state_dict())
    with pytest.warns(quest_core.AttentionMismatchWarning) as warned:
        model.load_state_dict(stock.state_dict())
    assert len(warned) == 1


def test_names_classes_hooks_modes_and_buffers_stay():
    class Counting(CausalSelfAttention):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(32)
            self.drop = nn.Dropout(0.5).eval()

        def forward(self, x):
            return super().forward(self.drop(self.norm(x.mT).mT))

    model, calls = nn.Sequential(Counting()), []
    model[0].register_forward_hook(lambda *_: calls.append(1))
    x = torch.randn(2, 5, 32)
    before = copy.deepcopy(model.state_dict())
    model, _ = quest_core.inject(model, "quest", example=x)
    calls.clear()
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    assert [model[0].training, model[0].drop.training] == [True, False]
    assert isinstance(model[0], Counting)
    assert type(model[0]).__name__ == "Counting"
    model(x)
    assert calls == [1]


class Filled(nn.Module):
    """Rotary angles in a buffer that is filled when it is first needed, and a count of what is filled."""

    def __init__(self, count):
        super().__init__()
        self.attention, self.count, self.known, self.counts = CausalSelfAttention(), count, 0, {"known": 0}
        self.register_buffer("angles", torch.zeros(20, 32), persistent=False)
        self.late = None

    def forward(self, x):
        n = x.shape[1]
        if n > (self.known if self.count == "a number" else self.counts["known"]):
            self.angles[:n] = torch.arange(n)[:, None] / 10
            self.known = self.counts["known"] = n
        if self.count == "layers" and self.late is None:
            self.late = nn.Linear(32, 32)
        return self.attention(x + self.angles[:n].sin()) if self.late is None else self.late(self.attention(x))


@pytest.mark.parametrize("count", ["a number", "in a dict"])
def test_the_example_leaves_what_a_module_has_filled_and_counted_as_it_was(count):
    model, x = Filled(count), torch.randn(2, 7, 32)
    wanted = copy.deepcopy(model)(x)
    quest_core.inject(model, "standard", example=x)
    assert (model.known, model.counts) == (0, {"known": 0})
    assert torch.equal(model(x), wanted)


def test_a_buffer_that_a_model_made_in_inference_mode_stays():
    class Lazy(CausalSelfAttention):
        """Makes its positions on the first run, as darts' TFTModel does in `predict`, which runs in inference mode."""

        def __init__(self):
            super().__init__()
            self.register_buffer("positions", None, persistent=False)

        def forward(self, x):
            if self.positions is None:
                self.positions = torch.arange(x.shape[1], dtype=x.dtype)[:, None]
            return super().forward(x + self.positions)

    model, x = Lazy(), torch.randn(2, 5, 32)
    with torch.inference_mode():
        wanted = model(x)
    positions = model.positions
    quest_core.inject(model, "standard", example=x)
    assert model.positions is positions
    assert torch.equal(model(x), wanted)


def test_the_example_leaves_layers_that_a_module_makes_when_it_first_runs():
    model, x = Filled("layers"), torch.randn(2, 7, 32)
    quest_core.inject(model, "standard", example=x)
    late = model.late
    model(x)
    assert late is not None
    assert model.late is late
    assert model.known == 7
    assert torch.equal(model.angles[:7, 0], torch.arange(7) / 10)  # as many as it has counted


@pytest.mark.parametrize("attention", ["qknorm", "elliptical-quest", "quest+sigmoid"])
def test_mechanisms_with_parameters_and_chains_train(attention):
    model, inputs = gpt()
    before = len(list(model.parameters()))
    quest_core.inject(model, attention, example=inputs)
    gradients(model, *inputs)
    assert all(p.grad is not None for p in model.parameters())
    assert len(list(model.parameters())) == before + 6 * (attention == "qknorm")


# --- what is refused --------------------------------------------------------------------------------------------------


def test_an_example_that_reaches_nothing_is_an_error():
    with pytest.raises(InjectionError, match="its run reached no call of scaled_dot_product_attention"):
        quest_core.inject(nn.Sequential(nn.Linear(2, 2)), "quest", example=torch.randn(1, 2))


def mixer():
    """Something other than PyTorch computes it."""

    def mix(m, x):
        return m.out(torch.from_numpy(m.qkv(x).detach().numpy()[..., :32]))

    return Host(mix, num_heads=4, qkv=nn.Linear(32, 96), out=nn.Linear(32, 32))


def switch():
    return Host(lambda m, x: m.on(x), on=CausalSelfAttention(), off=CausalSelfAttention())


@pytest.mark.parametrize(("other", "named"), [(mixer, "'1' (Host)"), (switch, "'1.off'")])
def test_what_looks_like_attention_and_stays_is_an_error(other, named):
    x = torch.randn(2, 5, 32)
    model = nn.Sequential(CausalSelfAttention(), other())
    said = "leave 1 as they are, which look like attention and .* in which the example showed none: "
    with pytest.raises(InjectionError, match=said) as caught:
        quest_core.inject(model, "quest", example=x)
    assert named in str(caught.value)
    assert "example=" not in str(caught.value)
    assert not any(isinstance(m, Routed) for m in model.modules())
    _, report = quest_core.inject(model, "quest", example=x, allow_partial=True)
    assert len(report.left_alone) == 1


@pytest.mark.parametrize(
    ("attention", "why"),
    [
        ("quest+gqa(kv_heads=2)", "the host projects 4 key/value heads, and 'quest+gqa(kv_heads=2)' asks for 2"),
        ("quest+mqa", "the host projects 4 key/value heads"),
        ("quest+sinkhorn", "'sinkhorn' is not possible here: it cannot be causal"),
        ("aft-conv", "'aft-conv' is not possible here: it cannot be causal"),
    ],
)
def test_what_q_k_and_v_do_not_give_is_refused_by_name(attention, why):
    with pytest.raises(UnsupportedError) as caught:
        quest_core.inject(GPT(), attention, example=torch.randint(50, (2, 9)))
    assert why in str(caught.value)
    assert "h.0.attn" in str(caught.value)
    assert "Possible here: " in str(caught.value)


def test_masks_and_dropout_of_the_example_decide_what_is_possible():
    with pytest.raises(UnsupportedError, match="takes masks of keys only"):
        quest_core.inject(Llama(native=False), "linear", example=torch.randn(2, 7, 32))
    with pytest.raises(UnsupportedError, match="'sinkhorn' is not possible here: it cannot be causal"):
        quest_core.inject(Llama(), "quest+sinkhorn", example=torch.randn(2, 7, 32))  # the mask is causal
    with pytest.raises(UnsupportedError, match="it has no weights for the attention dropout"):
        quest_core.inject(GPT(dropout=0.1), "linear", example=torch.randint(50, (2, 9)))


def test_a_call_that_is_not_understood_is_an_error_or_stays():
    def nested(_, x):
        x, shape = torch.nested.nested_tensor([y.flatten(0, 1)[None] for y in x]), x.shape
        return F.scaled_dot_product_attention(x, x, x).to_padded_tensor(0.0).view(shape)

    x = torch.randn(2, 4, 5, 8)
    model = nn.Sequential(Call(), Host(nested))
    with pytest.raises(UnsupportedError, match=r"'1' \(Host\): it .*nested tensors.*allow_partial=True"):
        quest_core.inject(model, "quest", example=x)
    _, report = quest_core.inject(model, "quest", example=x, allow_partial=True)
    assert [row.path for row in report.replacements] == ["0"]
    assert "nested tensors" in report.left_alone["1"]


def test_queries_of_a_decoder_do_not_meet_when_they_attend_across():
    """No mask says so of attention across sequences; that of self-attention does."""

    def decoder(is_causal):
        def forward(m, x, context):
            return m.cross_attn(m.self_attn(x, is_causal=is_causal), context, context)

        return Host(forward, self_attn=Call(), cross_attn=Call())

    example = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 7, 8)
    choice = {"self_attn": "quest", "cross_attn": "quest+sinkhorn"}
    quest_core.inject(decoder(False), lambda site: choice[site.path], example=example)
    with pytest.raises(UnsupportedError, match="'cross_attn' of universal: .*it cannot be causal"):
        quest_core.inject(decoder(True), lambda site: choice[site.path], example=example)


def test_another_path_through_the_forward_is_an_error():
    def choosing(_, x, fused=True):
        return F.scaled_dot_product_attention(x, x, x) if fused else (x @ x.mT).softmax(-1) @ x

    x = torch.randn(2, 4, 5, 8)
    model, _ = quest_core.inject(Host(choosing), "quest", example=x)
    model(x)
    with pytest.raises(UnsupportedError, match="did not call scaled_dot_product_attention this time"):
        model(x, fused=False)


def rotated(x):
    """RoPE by tables that the host makes and scales in its forward."""
    angles = torch.arange(x.shape[2])[:, None] * torch.tensor([1.0, 0.1, 1.0, 0.1]) * 1.0
    return x * (angles.cos() * 1.0) + torch.cat((-x[..., 2:], x[..., :2]), -1) * (angles.sin() * 1.0)


def sdpa(q, k, v, scale=1.0):
    return F.scaled_dot_product_attention(q, k, v, scale=scale)


SCALED = {  # a host, and one that leaves the scale to the call
    "queries": (lambda q, k, v: sdpa(q * 0.5, k, v), F.scaled_dot_product_attention),
    "keys": (lambda q, k, v: sdpa(q, k * 0.5, v), F.scaled_dot_product_attention),
    "both": (lambda q, k, v: sdpa(q * 2**-0.5, k * 2**-0.5, v), F.scaled_dot_product_attention),
    "queries before RoPE": (
        lambda q, k, v: sdpa(rotated(q * 0.5), rotated(k), v),
        lambda q, k, v: sdpa(rotated(q), rotated(k), v, None),
    ),
}


@pytest.mark.parametrize("attention", ["quest", "qnorm", "sigmoid", "quest+sinkhorn", "linear"])
@pytest.mark.parametrize("name", SCALED)
def test_a_scale_that_the_host_puts_on_queries_or_keys_is_undone(attention, name):
    host, plain = (Around(attend, heads=4) for attend in SCALED[name])
    host.load_state_dict(plain.state_dict())
    x = torch.randn(2, 5, 16)
    torch.testing.assert_close(host(x), plain(x))
    for model in (plain, host):
        quest_core.inject(model, attention, example=x)
    torch.testing.assert_close(host(x), plain(x))
    for model in (plain, host):
        quest_core.inject(model, "standard")
    assert torch.equal(host(x), Around.forward(host, x))


def test_a_scale_that_the_host_puts_on_learned_queries_is_undone():
    host = Around(lambda q, k, v: sdpa((host.queries * 0.5).expand(len(q), -1, -1, -1), k, v), heads=4)
    host.queries, x = nn.Parameter(torch.randn(4, 3, 4)), torch.randn(2, 5, 16)
    _, k, v = host.parts(x)
    want = sdpa(host.queries.expand(2, -1, -1, -1), F.normalize(k, dim=-1), v)
    torch.testing.assert_close(quest_core.inject(host, "quest", example=x)[0](x), want)


@pytest.mark.parametrize(("factor", "scale"), [(0.7, 1.0), (2, None)])
def test_other_factors_of_the_host_stay(factor, scale):
    host, x = Around(lambda q, k, v: sdpa(q * factor, k, v, scale), heads=4), torch.randn(2, 5, 16)
    q, k, v = host.parts(x)
    host, report = quest_core.inject(host, "quest", example=x)
    torch.testing.assert_close(host(x), sdpa(q * factor, F.normalize(k, dim=-1), v))
    assert report.replacements[0].note == "the host multiplies queries or keys by factors of its own, which stay"


def test_whether_a_scale_is_undone_does_not_depend_on_the_values_of_queries():
    """A norm whose weights are trained gives them other norms than one that is new."""
    for attend in (SCALED["queries"][0], lambda q, k, v: sdpa(F.normalize(q, dim=-1) * 0.5, k, v)):
        host = quest_core.inject(Around(attend, heads=4), "quest", example=torch.randn(2, 5, 16))[0]
        assert host.undone == (0.5, 1)


@pytest.mark.parametrize("scale", [1.0, None])
def test_the_report_names_factors_that_cannot_be_told_apart(scale):
    """A learned factor follows the one on queries."""
    host = Around(lambda q, k, v: sdpa(q * 0.5 * host.qkv.bias[:4], k, v, scale), heads=4)
    _, report = quest_core.inject(host, "quest", example=torch.randn(2, 5, 16))
    assert ("factors of its own, which stay" in report.replacements[0].note) == (scale == 1)


def test_calls_with_other_factors_take_only_standard():
    host, x = Around(lambda q, k, v: sdpa(q * 0.5, k, v) + sdpa(q, k * 0.5, v), heads=4), torch.randn(2, 5, 16)
    want = host(x)
    with pytest.raises(UnsupportedError, match="by other factors in one call than in another"):
        quest_core.inject(host, "quest", example=x)
    assert torch.equal(quest_core.inject(host, "standard", example=x)[0](x), want)


def test_the_scale_of_flex_attention_on_queries_is_undone():
    host, x = Around(lambda q, k, v: flex.flex_attention(q * 0.5, k, v, scale=1.0), heads=4), torch.randn(2, 5, 16)
    q, k, v = host.requires_grad_(False).parts(x)
    want = sdpa(q, F.normalize(k, dim=-1), v)
    torch.testing.assert_close(quest_core.inject(host, "quest", example=x)[0](x), want)


def test_shapes_and_scales_that_change_are_errors():
    q = torch.randn(2, 4, 5, 8)
    model, _ = quest_core.inject(Call(), "quest", example={"q": q, "k": q, "v": q, "scale": 0.5})
    for other, scale, message in (
        (q[:, :2], 0.5, "is called with 2 heads of 8 features"),
        (q[..., :4], 0.5, "is called with 4 heads of 4 features"),
        (q, 0.25, r"scale=0.25, and was injected for 0.5"),
    ):
        with pytest.raises(InputError, match=message):
            model(other, other, other, scale=scale)


def test_two_calls_of_one_forward_share_what_has_no_parameters():
    def twice(_, x):
        return sum(F.scaled_dot_product_attention(y, y, y) for y in (x, -x))

    x = torch.randn(2, 4, 5, 8)
    model, _ = quest_core.inject(Host(twice), "quest", example=x)
    torch.testing.assert_close(model(x), sum(quest_core.attention(y, y, y) for y in (x, -x)))
    with pytest.raises(UnsupportedError, match="calls the function more than once, and 'qknorm' keeps something"):
        quest_core.inject(Host(twice), "qknorm", example=x)

    def unlike(_, x):
        y = x.flatten(1, 2)[:, None]
        return F.scaled_dot_product_attention(x, x, x).sum() + F.scaled_dot_product_attention(y, y, y).sum()

    with pytest.raises(UnsupportedError, match="with heads=4 and with heads=1, and a site has one mechanism"):
        quest_core.inject(Host(unlike), "quest", example=x)


def test_one_call_may_share_fewer_key_heads_than_another():
    def tabular(m, q, k, v):  # rows of the context attend with all heads, others with some (TabPFN)
        few = (x[:, :: 4 // m.fewer] for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v) - F.scaled_dot_product_attention(q, *few, enable_gqa=True)

    q, k, v = (torch.randn(2, 4, 5, 8, dtype=torch.float64) for _ in range(3))
    for seen, fewer in ((4, 1), (4, 2), (1, 2), (2, 2)):
        model, report = quest_core.inject(Host(tabular, fewer=seen), "quest", example=(q, k, v))
        assert [row.path for row in report.replacements] == [""]
        model.fewer = fewer
        unit = F.normalize(k, dim=-1)
        few = (x[:, :: 4 // fewer].repeat_interleave(4 // fewer, 1) for x in (unit, v))
        one, two = (F.scaled_dot_product_attention(q, *kv, scale=1.0) for kv in ((unit, v), few))
        torch.testing.assert_close(model(q, k, v), one - two)


def test_a_module_that_lends_its_projections_only_stays():
    def parts(m, x):
        return (split(y, 2) for y in F.linear(x, m.inner.in_proj_weight).chunk(3, -1))

    outer = Host(lambda m, x: F.scaled_dot_product_attention(*parts(m, x)), inner=nn.MultiheadAttention(8, 2))
    x = torch.randn(2, 5, 8)
    model, report = quest_core.inject(outer, "quest", example=x)
    assert [(row.path, row.adapter) for row in report.replacements] == [("", "universal")]
    q, k, v = parts(model, x)
    torch.testing.assert_close(model(x), quest_core.attention(q, k, v))
    for attention, example in (("sigmoid", x), ("quest", None)):  # another one later, with an example and without
        _, report = quest_core.inject(model, attention, example=example)
        assert [row.path for row in report.replacements] == [""]
    torch.testing.assert_close(model(x), quest_core.attention(q, k, v))


def test_a_site_inside_a_site_is_refused():
    outer = Host(lambda m, x: F.scaled_dot_product_attention(x, x, m.inner(x)), inner=Call())
    x = torch.randn(2, 4, 5, 8)
    with pytest.raises(
        InjectionError,
        match=r"'' \(Host\) calls scaled_dot_product_attention, and it contains another attention, 'inner'",
    ):
        quest_core.inject(outer, "quest", example=x)
    model, report = quest_core.inject(outer, "quest", example=x, allow_partial=True)
    assert [row.path for row in report.replacements] == ["inner"]
    assert report.left_alone == {"": "it contains another attention, 'inner'"}
    assert torch.equal(model(x), F.scaled_dot_product_attention(x, x, quest_core.attention(x, x, x)))


def test_a_host_can_read_which_arguments_a_site_takes():
    model, _ = quest_core.inject(CausalSelfAttention(), "quest", example=torch.randn(2, 5, 32))
    for held in (model, type(model)):
        stock = CausalSelfAttention() if held is model else CausalSelfAttention
        assert inspect.signature(held.forward) == inspect.signature(stock.forward)


def test_the_hook_of_the_host_for_subclasses_is_passed_by():
    known = {}

    class Registered:
        def __init_subclass__(cls):
            known[cls.__name__] = cls

    class Layer(Registered, CausalSelfAttention):
        pass

    quest_core.inject(nn.Sequential(Layer()), "quest", example=torch.randn(2, 5, 32))
    assert known["Layer"] is Layer


def test_nested_tensors_are_refused_by_name():
    model, _ = quest_core.inject(nn.Sequential(CausalSelfAttention()), "quest", example=torch.randn(2, 5, 32))
    nested = torch.nested.nested_tensor([torch.randn(3, 32), torch.randn(5, 32)], layout=torch.jagged)
    with pytest.raises(InputError, match="q is a nested tensor; pad it"):
        model(nested)


def test_a_wrapped_forward_and_a_taken_name_are_refused():
    x = torch.randn(2, 5, 32)
    for example, host in ((x, CausalSelfAttention()), (None, nn.MultiheadAttention(8, 2))):
        model = nn.Sequential(host)
        host._compiled_call_impl = host._call_impl  # as compile() does
        with pytest.raises(InjectionError, match="its forward was replaced on the instance"):
            quest_core.inject(model, "quest", example=example)
        host._compiled_call_impl = None
        host.forward = functools.partial(type(host).forward, host)  # as accelerate does
        with pytest.raises(InjectionError, match=r"'0' \(.*\): its forward was replaced on the instance"):
            quest_core.inject(model, "quest", example=example)
    model = nn.Sequential(CausalSelfAttention())
    model[0].mechanism = "mine"
    with pytest.raises(InjectionError, match="it has an attribute 'mechanism'"):
        quest_core.inject(model, "quest", example=x)


# --- with adapters ---------------------------------------------------------------------------------------------------


def test_adapters_take_precedence():
    """torch.nn.MultiheadAttention has an adapter, and the call next to it has none."""
    parts = {"one": nn.MultiheadAttention(32, 4, batch_first=True), "two": CausalSelfAttention()}
    model = Host(lambda m, x: m.two(m.one(x, x, x, need_weights=False)[0]), **parts)
    x = torch.randn(2, 5, 32)
    with pytest.raises(InjectionError, match=r"leave 1 as they are, .*'two' \(CausalSelfAttention\)"):
        quest_core.inject(model, "quest")
    _, report = quest_core.inject(model, "quest", example=x)
    assert [(row.path, row.adapter) for row in report.replacements] == [("one", "torch"), ("two", "universal")]
    wanted = model(x)
    quest_core.inject(model, "quest", example=x)  # what is QUEST's own is not taken for a call of the host
    torch.testing.assert_close(model(x), wanted)


def test_a_normalizer_drops_as_the_call_says():
    q, k, v = torch.randn(3, 2, 4, 5, 8).unbind()
    model, _ = quest_core.inject(Call(), "sigmoid", example={"q": q, "k": k, "v": v, "dropout_p": 0.5})
    outs = []
    for call in (model, functools.partial(quest_core.attention, attention="sigmoid")):
        torch.manual_seed(0)
        outs.append(call(q, k, v, dropout_p=0.5))
    torch.testing.assert_close(*outs)
