"""Scores and the function `attention`: what tests/grid and check_mechanism do not ask."""

import io
import math
import warnings
from types import MappingProxyType

import pytest
import torch
from models import Host
from test_normalizers import tensors
from torch._dynamo.testing import CompileCounterWithBackend

import quest_core
from quest_core.errors import UnsupportedError
from quest_core.registry import mechanisms
from quest_core.testing.truth import exact

SCORES = [name for name, part in mechanisms().items() if part.axis == "score" and not part.chained]
FREE = [name for name in SCORES if not mechanisms()[name].learnable]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_wide_mask_of_half_precision_queries_hides_only_by_infinity(dtype):
    """−1e9 and 1e5 are finite in these types, and beyond float16."""
    mask = torch.tensor([[-1e9, -1e9], [1e5, 0.0], [-math.inf, -1e9]])
    q, k, v = (x.half() for x in tensors(1, 1, 1, 3, 2, 4))
    mask = mask.to(dtype)
    shown = torch.tensor([[True, True], [True, False], [False, True]])  # as much as each row shows
    out, expected = (quest_core.attention(q, k, v, "quest", attn_mask=m) for m in (mask, shown))
    torch.testing.assert_close(out, expected, atol=5e-3, rtol=0)


def test_quest_ignores_how_loud_a_key_is():
    """The property that QUEST is made for: a key's norm cannot draw attention, a query's norm sharpens its own."""
    q, k, v = tensors(1, 2, 2, 5, 7, 4)
    loud = k.clone()
    loud[:, :, 3] *= 1000
    torch.testing.assert_close(quest_core.attention(q, k, v, "quest"), quest_core.attention(q, loud, v, "quest"))
    assert not torch.allclose(quest_core.attention(q, k, v, "standard"), quest_core.attention(q, loud, v, "standard"))


@pytest.mark.parametrize("score", FREE)
def test_scale_option_replaces_the_own_factor(score):
    q, k, v = tensors(2, 2, 2, 4, 4, 8)
    got = quest_core.attention(q, k, v, {"name": score, "scale": 0.7})
    plain = exact(quest_core.Mechanism(score), q, k, v)[2] / quest_core.Mechanism(score).score.scale(8)
    want = (0.7 * plain).softmax(-1) @ v
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_starting_values_are_those_of_the_specification():
    hs = quest_core.Mechanism("qknorm-hs", num_heads=3, head_dim=16).score
    ds = quest_core.Mechanism("qknorm-ds", num_heads=3, head_dim=16).score
    full = quest_core.Mechanism("qknorm+gqa(kv_heads=1)", num_heads=3, head_dim=16).score
    torch.testing.assert_close(hs.log_scale.exp(), torch.full((3,), 10.0))
    assert ds.query_scale.shape == ds.key_scale.shape == (16,)
    assert full.query_scale.shape == (3, 16)
    assert full.key_scale.shape == (1, 16)
    torch.testing.assert_close(ds.query_scale, torch.full((16,), 2.0))
    q, k, _ = tensors(1, 3, 3, 4, 4, 16)
    cosine = (q / q.norm(dim=-1, keepdim=True)) @ (k / k.norm(dim=-1, keepdim=True)).mT
    got = quest_core.Mechanism("qknorm-ds", num_heads=3, head_dim=16).double().logits(q, k)
    torch.testing.assert_close(got, math.sqrt(16) * cosine)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cap", [1.0, 3.0, 10.0, 100.0])
def test_a_head_scale_at_its_cap_has_a_gradient_and_one_above_has_none(cap, dtype):
    made = quest_core.Mechanism(f"qknorm-hs(init={cap}, cap={cap})", num_heads=1, head_dim=2).to(dtype)
    unit_vector = torch.tensor([[[[1.0, 0.0]]]], dtype=dtype)
    for above, slope in ((0.0, cap), (0.5, 0.0)):
        with torch.no_grad():
            made.score.log_scale.add_(above)
        (logit,) = made.logits(unit_vector, unit_vector).flatten()
        assert logit.item() == pytest.approx(cap, rel=0.02)
        (grad,) = torch.autograd.grad(logit, made.score.log_scale)
        assert grad.item() == pytest.approx(slope, rel=0.02)  # bfloat16 rounds the logarithm


def calling(model, q, k, v):
    """As users call the function."""
    return quest_core.attention(q, k, v, model.spec) + quest_core.attention(q, k, v, "qnorm")


CALLS = {
    "a name": ("quest", "standard"),
    "a name with options": ("quest+sigmoid(scale=0.5)", "quest+sigmoid(scale=2)"),
    "a mapping": ({"name": "quest", "scale": 0.5}, {"name": "quest", "scale": 2.0}),
    "a config": (quest_core.AttentionConfig.parse("linear"), quest_core.AttentionConfig.parse("aft-simple")),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.drawn(1)
def test_the_function_compiles_without_a_graph_break_and_exports(call):
    q, k, v = (x.float().requires_grad_() for x in tensors(2, 4, 4, 6, 6, 8))
    first, second = CALLS[call]
    model = Host(calling, spec=first)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v), model(q, k, v))
    for strict in (False, True):
        exported = torch.export.export(model, (q, k, v), strict=strict).module()
        torch.testing.assert_close(exported(q, k, v), model(q, k, v))
    model.spec = second  # the specification must not become a constant of the graph
    assert not torch.allclose(quest_core.attention(q, k, v, first), quest_core.attention(q, k, v, second))
    torch.testing.assert_close(compiled(q, k, v), model(q, k, v))


def test_a_mapping_that_changes_is_compiled_anew():
    q, k, v = (x.float() for x in tensors(2, 4, 4, 6, 6, 8))
    options = {"name": "quest", "scale": 0.5}
    torch._dynamo.reset()
    compiled = torch.compile(lambda: quest_core.attention(q, k, v, options), fullgraph=True, backend="eager")
    for name in ("quest", "qnorm"):
        options["name"] = name
        torch.testing.assert_close(compiled(), quest_core.attention(q, k, v, {"name": name, "scale": 0.5}))


def test_compiling_a_wrong_name_says_what_is_wrong():
    q, k, v = (x.float() for x in tensors(2, 4, 4, 6, 6, 8))
    for name, message in (("qest", "did you mean 'quest'"), ("qknorm", "has learnable parameters")):
        torch._dynamo.reset()
        with pytest.raises(Exception, match=message):
            torch.compile(quest_core.attention, fullgraph=True, backend="eager")(q, k, v, name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v: (q[0], k, v, None), "q has shape .*four axes"),
        (lambda q, k, v: (q, k.float(), v, None), "q is torch.float64 but k is torch.float32"),
        (lambda q, k, v: (q.long(), k, v, None), "q is torch.int64; attention takes float32, bfloat16, float16 or fl"),
        (
            lambda q, k, v: (*[x.to(torch.float8_e4m3fn) for x in (q, k, v)], None),
            "q is torch.float8_e4m3fn; attention",
        ),
        (lambda q, k, v: (q, k[..., :3], v, None), "k has head_dim 3; expected 8, as q"),
        (lambda q, k, v: (q, k[:1], v, None), "batch sizes differ: q 2, k 1"),
        (lambda q, k, v: (q, k[:, :2], v[:, :2], None), r"shared key heads add a grouping"),
        (lambda q, k, v: (q, k, v[:, :, :3], None), r"k has .* but v has"),
        (lambda q, k, v: (q, k, v, torch.ones(2, 5, 6, dtype=torch.bool)), r"mask\[:, None\]"),
        (lambda q, k, v: (q, k, v, torch.ones(6, 5, dtype=torch.bool)), r"attn_mask has shape \[6, 5\]"),
        (lambda q, k, v: (q, k, v, torch.ones(5, 6, dtype=torch.long)), "attn_mask is torch.int64"),
        (
            lambda q, k, v: (q, k, v, torch.ones(5, 6).to(torch.float8_e5m2)),
            "attn_mask is torch.float8_e5m2; expected bool",
        ),
    ],
)
def test_wrong_inputs_are_named(change, message):
    q, k, v, mask = change(*tensors(2, 4, 4, 5, 6, 8))
    with pytest.raises(quest_core.InputError, match=message):
        quest_core.attention(q, k, v, "quest", attn_mask=mask)


@pytest.mark.parametrize(
    ("groups", "spec", "options", "message"),
    [
        (4, "quest", {"dropout_p": 1.5}, "dropout_p is 1.5"),
        (3, "quest+gqa", {}, "kv_heads is 3, which does not divide the 4 heads; choose from: 1, 2, 4"),
    ],
)
def test_wrong_options_of_the_function_are_named(groups, spec, options, message):
    with pytest.raises(quest_core.InputError, match=message):
        quest_core.attention(*tensors(1, 4, groups, 2, 2, 2), spec, **options)


def test_mappings_of_any_kind_are_specifications():
    q, k, v = tensors(1, 2, 2, 3, 3, 4)
    spec = MappingProxyType({"name": "quest", "scale": 2.0})
    torch.testing.assert_close(quest_core.attention(q, k, v, spec), quest_core.attention(q, k, v, "quest(scale=2.0)"))


@pytest.mark.needs_torch("2.6", "torch.compile of floats as inputs")
def test_a_dynamic_graph_is_compiled_once():
    x, counting = torch.randn(2, 3, 5, 4), CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    torch.compile(quest_core.Mechanism("quest", num_heads=3, head_dim=4), backend=counting, dynamic=True)(x, x, x)
    assert counting.frame_count == 1


def causal_or_not(spec, causal):
    model = Host(lambda m, x: m.attention(x, is_causal=causal), attention=quest_core.Attention(16, 4, spec).eval())
    quest_core.chain(model)
    return model


def traced_to_onnx(module):
    """The file of the exporter that was the default before PyTorch 2.9, with a dynamic batch and length."""
    file = io.BytesIO()
    options = {"input_names": ["x"], "dynamic_axes": {"x": {0: "batch", 1: "tokens"}}, "dynamo": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(module, (torch.randn(2, 9, 16),), file, opset_version=17, **options)
    return file.getvalue()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "spec",
    ["standard", "quest", "qnorm", "qknorm", "qknorm-hs", "elliptical-quest", "quest+gqa(kv_heads=2)", "quest+mqa"],
)
def test_a_trace_exported_to_onnx_takes_any_length(spec, causal):
    runtime = pytest.importorskip("onnxruntime")
    module = causal_or_not(spec, causal)
    session = runtime.InferenceSession(traced_to_onnx(module), providers=["CPUExecutionProvider"])
    for shape in ((2, 9, 16), (3, 9, 16), (2, 5, 16), (1, 14, 16)):
        x = torch.randn(shape)
        x[0, 0] = 0
        found = torch.from_numpy(session.run(None, {"x": x.numpy()})[0])
        torch.testing.assert_close(found, module(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("spec", ["quest", "quest+sigmoid", "quest+sinkhorn"])
def test_a_trace_warns_of_nothing_that_it_fixes(spec):
    with warnings.catch_warnings():
        warnings.simplefilter("error", torch.jit.TracerWarning)
        torch.jit.trace(causal_or_not(spec, False), torch.randn(2, 9, 16), check_trace=False)


@pytest.mark.parametrize("spec", ["quest+sigmoid", "cosine", "aft-conv(grid=3x3)", "linear"])
def test_a_trace_that_would_fix_the_number_of_keys_is_not_exported(spec):
    with pytest.raises(UnsupportedError, match="counts its keys, and torch.onnx.export"):
        traced_to_onnx(causal_or_not(spec, spec == "linear"))
