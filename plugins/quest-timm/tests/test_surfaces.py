"""create_model, features, pretrained weights, and what is refused."""

import argparse
import contextlib
import inspect
import warnings

import pytest
import timm
import torch
from timm import optim
from timm.models import create_feature_extractor
from timm.models.vision_transformer import ParallelScalingBlock
from timm.utils import ParseKwargs
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import quest_core
import quest_timm  # timm accepts attention= from here on
from devtools.wrong import WRONG
from quest_core import AttentionMismatchWarning, CheckpointError, ConfigError, InjectionError, UnsupportedError
from quest_core.hosts.universal import Routed
from quest_core.mechanisms import naive as reference
from quest_core.projections import Projected

TINY = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 4, "num_classes": 5}


def vit(**options):
    torch.manual_seed(0)
    return timm.create_model("vit_tiny_patch16_224", **{**TINY, **options})


def test_create_model_reports_what_it_did(capsys):
    model = vit(attention="quest")
    said = "attention=quest in 2 modules (Attention; 2,176 parameters as before)"
    assert str(model.attention_report).startswith(said)
    printed = capsys.readouterr().err
    assert said in printed
    assert "; kernel=scaled_dot_product_attention" in printed
    assert all(isinstance(block.attn, timm.layers.Attention) for block in model.blocks)


def test_options_reach_train_py_from_the_command_line():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-kwargs", nargs="*", default={}, action=ParseKwargs)
    for text in ("quest", "quest+gqa(kv_heads=2)", "quest+sigmoid"):
        given = parser.parse_args(["--model-kwargs", f"attention={text}"]).model_kwargs
        assert vit(**given).attention_report.attention == text


@pytest.mark.parametrize("attention", ["standard", "quest"])
@pytest.mark.parametrize(
    ("name", "kernel"), [("vit_tiny_patch16_224", None), ("swin_tiny_patch4_window7_224", SDPBackend.MATH)]
)
def test_pytorchs_flop_counter_counts_as_stock(name, kernel, attention):
    """On a CPU it counts no fused attention, and stock Swin writes its own out."""
    counts = []
    for options in ({}, {"attention": attention}):
        model = timm.create_model(name, img_size=64, **options).eval()
        with sdpa_kernel(kernel) if kernel else contextlib.nullcontext(), FlopCounterMode(display=False) as counter:
            model(torch.randn(1, 3, 64, 64))
        counts.append(counter.get_total_flops())
    assert counts[1] == pytest.approx(counts[0], rel=0.01)


TRACED = [
    ("vit_tiny_patch16_224", {"img_size": 32}, "quest"),
    ("swin_tiny_patch4_window7_224", {"img_size": 32, "window_size": 1}, "quest+sigmoid"),
    ("eva02_tiny_patch14_224", {"img_size": 28}, "standard"),
    ("pvt_v2_b0", {}, "quest"),
]


@pytest.mark.parametrize(("name", "options", "attention"), TRACED)
def test_torch_fx_traces_a_model(name, options, attention):
    """The attention is a leaf, also in traces of timm: timm#1176."""
    model = timm.create_model(name, num_classes=3, **options).eval()
    quest_core.inject(model, attention)
    size = options.get("img_size", 64)
    images = torch.randn(2, 3, size, size)
    torch.testing.assert_close(torch.fx.symbolic_trace(model)(images), model(images))
    found = create_feature_extractor(model, ["head"])(images)
    torch.testing.assert_close(found["head"], model(images))


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "swin_tiny_patch4_window7_224", "maxvit_rmlp_pico_rw_256"])
def test_features_only(name):
    small = {"img_size": 64} if "vit_" in name[:4] else {}
    model = timm.create_model(name, attention="quest", features_only=True, **small)
    assert model.attention_report.attention == "quest"
    mechanisms = [m for m in model.modules() if isinstance(m, quest_core.Mechanism)]
    assert len(mechanisms) == len(model.attention_report.replacements)


@pytest.mark.parametrize("attention", ["standard", "quest", "quest+gqa(kv_heads=2)"])
def test_hooks_on_attn_drop_see_the_weights_in_evaluation(attention):
    model, x = vit(attention=attention).eval(), torch.randn(2, 3, 32, 32)
    before, maps = model(x), []
    for block in model.blocks:
        block.attn.attn_drop.register_forward_hook(lambda _module, _args, weights: maps.append(weights))
    torch.testing.assert_close(model(x), before)
    assert [weights.shape for weights in maps] == [(2, 4, 17, 17)] * 2
    torch.testing.assert_close(maps[1].sum(-1), torch.ones(2, 4, 17))
    model.blocks[0].attn.attn_drop.register_forward_hook(lambda _module, _args, weights: weights * 2)
    with pytest.raises(UnsupportedError, match="only reads"):
        model(x)


def test_a_family_runs_under_tools_that_hook_every_module():
    model, x = vit(attention="linear").eval(), torch.randn(2, 3, 32, 32)
    before = model(x)
    for module in model.modules():
        module.register_forward_hook(lambda _module, _args, _out: None)
    torch.testing.assert_close(model(x), before)


def test_swin_takes_another_window():
    torch.manual_seed(0)
    stock = timm.create_model("swin_tiny_patch4_window7_224", img_size=64, window_size=4, depths=(2,), num_heads=(4,))
    model, _ = quest_core.inject(stock, "quest")
    model.set_input_size(img_size=(96, 96), window_size=(3, 3))
    assert model(torch.randn(1, 3, 96, 96)).shape == (1, 1000)


def test_the_arrays_of_an_npz_file_are_of_standard_attention(tmp_path):
    """timm copies them one by one, so no load hook sees them; the file does not exist, and is opened afterwards."""

    def load(**options):
        with pytest.raises(FileNotFoundError):
            vit(**options).load_pretrained(str(tmp_path / "weights.npz"))

    with pytest.warns(AttentionMismatchWarning, match="trained with standard attention") as caught:
        load(attention="quest")
    assert len(caught) == 1
    with pytest.raises(CheckpointError, match="trained with attention 'standard', and the model has 'quest'"):
        load(attention="quest", attention_from="sigmoid")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(attention="standard")
        load(attention="quest", attention_from="standard")
        load()


@pytest.mark.parametrize("attention", ["qknorm-hs", "qknorm-ds", "qknorm", "cosine", "aft-full"])
@pytest.mark.parametrize("layers", [None, 0.75])
def test_what_a_mechanism_learns_has_no_weight_decay(attention, layers):
    """As the scales of timm's own norms of queries and keys have none; timm decays other parameters with two axes."""
    model = timm.create_model("vit_tiny_patch16_224", depth=1, attention=attention)
    optimizer = optim.create_optimizer_v2(model, "adamw", weight_decay=0.05, layer_decay=layers)
    learned = {id(p) for name, p in model.named_parameters() if ".mechanism." in name}
    assert learned
    for groups in (optimizer.param_groups, optim.param_groups_weight_decay(model, 0.05, True, ["head.weight"])):
        kept = {id(p) for group in groups if group["weight_decay"] == 0 for p in group["params"]}
        assert learned <= kept
        assert id(model.blocks[0].mlp.fc1.weight) not in kept
    assert id(model.head.weight) in kept


@pytest.mark.skipif(not hasattr(optim, "Muon"), reason="this timm has no Muon")
def test_muon_leaves_what_a_mechanism_learns_to_its_fallback():
    model = timm.create_model("vit_tiny_patch16_224", depth=1, attention="qknorm")
    groups = optim.create_optimizer_v2(model, "muon", lr=0.1).param_groups
    left = {id(p) for group in groups if group.get("use_fallback") for p in group["params"]}
    assert {id(p) for name, p in model.named_parameters() if ".mechanism." in name} <= left
    assert id(model.blocks[0].mlp.fc1.weight) not in left


def test_queries_that_timm_normalizes_cannot_be_clipped():
    model = timm.create_model("vit_tiny_patch16_224", depth=1, qk_norm=True, attention="standard")
    with pytest.raises(UnsupportedError, match=r"QK-clip cannot scale .*'blocks\.0\.attn'.*qk_norm=True"):
        quest_core.QKClip(model)
    with pytest.raises(UnsupportedError, match=r"QK-clip cannot scale .*it was found by an example"):
        quest_core.QKClip(timm.create_model("pvt_v2_b0", attention="quest"))


# --- what is refused --------------------------------------------------------------------------------------------------


def test_a_model_without_attention_is_an_error():
    with pytest.raises(InjectionError, match="has no attention that an adapter knows"):
        timm.create_model("resnet18", attention="quest")


FOUND = {
    "caformer_s18": 12,
    "efficientvit_m0": 6,
    "hiera_tiny_224": 12,
    "levit_128s": 11,
    "maxvit_rmlp_pico_rw_256": 22,
    "pit_ti_224": 12,
    "pvt_v2_b0": 8,
    "tiny_vit_5m_224": 10,
    "twins_svt_small": 18,
    "visformer_tiny": 8,
    "vit_relpos_small_patch16_224": 12,
    "xcit_nano_12_p16_224": 2,
}
"""Models whose attention only a run of them finds, with the number of its modules."""
SLOW = ("caformer_s18", "efficientvit_m0", "hiera_tiny_224", "maxvit_rmlp_pico_rw_256", "tiny_vit_5m_224")


@pytest.mark.parametrize(
    ("name", "count"), [pytest.param(*row, marks=[pytest.mark.slow] * (row[0] in SLOW)) for row in FOUND.items()]
)
def test_attention_that_only_a_run_finds_is_replaced(name, count):
    """The plugin runs the model on images of its own; weights and random numbers are those of the stock model."""
    made = []
    for attention in (None, "standard", "quest"):
        torch.manual_seed(0)
        options = {} if attention is None else {"attention": attention}
        model = timm.create_model(name, **options).eval()
        with torch.no_grad():  # heads and branches that start at zero would hide the attention
            made.append((model, [p.normal_(std=0.2) for p in model.parameters() if not p.any()], torch.rand(1)))
    (stock, _, drawn), *others = made
    x = torch.randn(1, *stock.default_cfg["input_size"])
    with torch.no_grad():
        expected = stock(x)
        for (model, _, number), attention in zip(others, ("standard", "quest"), strict=True):
            assert torch.equal(number, drawn)
            assert len(model.attention_report.replacements) == count
            assert all(torch.equal(y, model.state_dict()[key]) for key, y in stock.state_dict().items())
            if attention == "standard":
                torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)
            else:
                assert not torch.equal(model(x), expected)


SHARED = {"attn_type": "rope", "num_kv_heads": 1, "qkv_fused": False}


@pytest.mark.parametrize("attention", ["standard", "quest"])
def test_key_heads_that_timm_shares_itself_are_found_in_a_run(attention):
    model = timm.create_model("eva02_tiny_patch14_224", img_size=28, depth=2, **SHARED).eval()
    x = torch.randn(2, 3, 28, 28)
    stock = model(x)
    _, report = quest_core.inject(model, attention)
    assert [row.host_class for row in report.replacements] == ["AttentionRope"] * 2
    assert torch.allclose(model(x), stock, atol=1e-5) == (attention == "standard")


@pytest.mark.parametrize(
    ("name", "attention", "options", "why"),
    [
        ("maxvit_rmlp_pico_rw_256", "elliptical-quest", {}, "compares the tokens of each layer"),
        ("tiny_vit_5m_224", "elliptical-quest", {}, "compares the tokens of each layer"),
        ("eva02_tiny_patch14_224", "aft-simple", SHARED, "where rotary positions act"),
        ("pvt_v2_b0", "linear", {"attn_drop_rate": 0.2}, "no weights for the attention dropout"),
        ("vit_tiny_patch16_224", "quest(init=5)", {"qk_norm": True}, "qk_norm=True normalizes"),
    ],
)
def test_what_a_model_cannot_have_is_refused(name, attention, options, why):
    with pytest.raises(UnsupportedError, match=why):
        timm.create_model(name, attention=attention, **options)


def test_inject_needs_no_example_for_the_models_of_timm_in_a_model():
    model = torch.nn.ModuleDict({name: timm.create_model(name) for name in ("levit_128s", "pvt_v2_b0")})
    model["levit_128s"].other = torch.nn.Module()
    model["levit_128s"].other.pretrained_cfg = "of another library"
    for adapter, attention in ((None, "quest"), (None, "quest+sigmoid"), ("timm", "qnorm")):
        _, report = quest_core.inject(model, attention, adapter=adapter)
        assert len(report.replacements) == 11 + 8
    with pytest.raises(InjectionError, match=r"say inject\(model, ..., example=batch\)"):
        quest_core.inject(timm.create_model("levit_128s"), "quest", example=False)


def test_a_model_that_does_not_run_on_the_plugins_images_is_an_error_that_says_what_to_do(monkeypatch):
    gray = timm.create_model("xcit_nano_12_p16_224", in_chans=1)
    said = r"images of shape \[2, 3, 224, 224\] .*{}.*example=batch"
    with pytest.raises(InjectionError, match=said.format("to have 1 channels")):
        quest_core.inject(gray, "quest")
    assert len(quest_core.inject(gray, "quest", allow_partial=True)[1].replacements) == 2

    def fails(model, x):
        raise ValueError("needs text too")

    monkeypatch.setattr(timm.models.levit.Levit, "forward", fails)
    with pytest.raises(InjectionError, match=said.format("needs text too")):
        timm.create_model("levit_128s", attention="quest")


def test_cait_needs_allow_partial():
    with pytest.raises(UnsupportedError, match=r"TalkingHeadAttn\): it mixes the logits of its heads"):
        timm.create_model("cait_xxs24_224", attention="quest", **TINY)
    model = timm.create_model("cait_xxs24_224", attention="quest", allow_partial=True, **TINY)
    assert len(model.attention_report.replacements) == 2
    assert model(torch.randn(1, 3, 32, 32)).shape == (1, 5)


def test_volo_keeps_outlook_attention_which_has_no_keys():
    report = timm.create_model("volo_d1_224", attention="quest").attention_report
    assert len(report.replacements) == 16
    assert [*report.left_alone] == [f"network.0.{i}.attn" for i in range(4)]


def test_differential_attention_attends_twice_by_the_mechanism(monkeypatch):
    x, fused = torch.randn(2, 3, 32, 32), torch.nn.functional.scaled_dot_product_attention
    ours = vit(attn_layer="diff", attention="quest").eval()(x)
    stock = vit(attn_layer="diff").eval()

    def on_unit_keys(q, k, v, **options):
        return fused(q, reference.unit(k), v, scale=1.0, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", on_unit_keys)
    torch.testing.assert_close(ours, stock(x), rtol=1e-4, atol=1e-5)


def test_a_registered_function_that_does_not_read_it_is_refused(monkeypatch):
    def swallows(pretrained=False, **options):
        return vit()

    monkeypatch.setitem(timm.models._registry._model_entrypoints, "swallows", swallows)
    with pytest.raises(InjectionError, match="'quest' was given to 'swallows', which did not read it"):
        timm.create_model("swallows", attention="quest")
    assert timm.create_model("swallows").num_classes == 5


HERE = [
    ({"attention": "quest", "qk_norm": True, "attention_from": "quset"}, "did you mean 'quest'"),
    ({"attention": "quest(init=5)", "pretrained": True}, "pretrained=True loads trained ones"),
    ({"attention": "quest+gqa(kv_heads=3)"}, "kv_heads is 3, which does not divide the 4 heads"),
    ({"attention": "quest+gqa(ratio=3)"}, "ratio"),
]


@pytest.mark.parametrize(("options", "why"), [*WRONG, *HERE])
def test_a_wrong_option_is_one_error(options, why):
    with pytest.raises(ConfigError, match=why):
        vit(**options)


def test_parallel_blocks_are_sites_themselves():
    stock, ours = vit(block_fn=ParallelScalingBlock), vit(block_fn=ParallelScalingBlock, attention="standard")
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(ours(x), stock(x), rtol=1e-6, atol=1e-6)
    report = vit(block_fn=ParallelScalingBlock, attention="qknorm").attention_report
    assert [row.path for row in report.replacements] == ["blocks.0", "blocks.1"]


def norms(model, role):
    parts = [part for part in model.modules() if isinstance(part, Projected)]
    return [norm for part in parts for norm in part.projections.norms(part, part.head_sizes, role).tolist()]


def test_a_new_model_starts_as_asked_and_a_checkpoint_is_not_scaled(tmp_path):
    trained = vit(attention="quest(init=5, key_init=2)")
    assert norms(trained, "q") == pytest.approx([5] * 8)
    assert norms(trained, "k") == pytest.approx([2] * 8)
    assert "queries start with norms 5 to 5" in str(trained.attention_report)
    torch.save(trained.state_dict(), tmp_path / "trained.pth")
    loaded = vit(attention="quest(init=7)", checkpoint_path=str(tmp_path / "trained.pth"))
    assert norms(loaded, "q") == norms(trained, "q")


@pytest.mark.skipif(
    "pretrained_model_args" not in inspect.signature(timm.models.build_model_with_cfg).parameters,
    reason="this timm does not say what it has recorded of a saved model",
)
def test_a_saved_model_is_made_again_with_its_start(tmp_path):
    trained = vit(attention="quest(init=5)").eval()
    timm.models.save_for_hf(trained, tmp_path, model_config={}, model_args={**TINY, "attention": "quest(init=5)"})
    loaded = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(loaded(x), trained(x))
    with pytest.raises(ConfigError, match="pretrained=True loads trained ones"):
        timm.create_model(f"local-dir:{tmp_path}", pretrained=True, attention="quest+sigmoid(init=5)")


@pytest.mark.parametrize("text", ["none", "None"])
def test_none_of_a_command_line_asks_for_nothing(text):
    assert not hasattr(vit(attention=text), "attention_report")


def test_uninstall_takes_the_leaf_modules_out_of_timms_graphs():
    adapter = quest_timm.TimmAdapter()
    ours = {quest_core.Mechanism, Routed}
    assert ours <= {*timm.models.get_notrace_modules()}
    adapter.uninstall()
    try:
        assert not ours & {*timm.models.get_notrace_modules()}
    finally:
        adapter.install()
