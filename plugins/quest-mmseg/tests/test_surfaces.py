"""What a user of mmseg writes and gets: configs, parts, checkpoints, crops, refusals."""

import argparse
import copy
import re
import runpy
import sys
from pathlib import Path

import mmseg
import pytest
import torch
from conftest import CLASSES, sample, segmenter
from fvcore.nn import FlopCountAnalysis
from mmengine.analysis import get_model_complexity_info
from mmengine.config import Config, ConfigDict, DictAction
from mmengine.optim import build_optim_wrapper
from mmengine.runner.activation_checkpointing import turn_on_activation_checkpointing
from mmseg.apis import MMSegInferencer
from mmseg.models import backbones, decode_heads
from mmseg.models.decode_heads.knet_head import KernelUpdateHead
from mmseg.registry import MODELS
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import quest_core
from quest_core import Mechanism
from quest_core.checkpoints import ENTRY
from quest_core.errors import CheckpointError, ConfigError, InputError, UnsupportedError
from quest_core.projections import Projected
from quest_mmengine.adapter import Mmengine, MmengineAdapter, check_config
from quest_mmseg.adapter import REFUSED, TYPES, MmsegAdapter

MIM = Path(mmseg.__file__).parent / ".mim"


def build(**options):
    """Segmenter, initialized as the Runner does."""
    torch.manual_seed(0)
    model = MODELS.build(segmenter(**options))
    model.init_weights()
    return model


def images(height=32, width=48):
    return torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(1))


def loss(model):
    torch.manual_seed(3)
    return model.loss(images(), [sample(), sample()])["decode.loss_ce"]


def attentions(model):
    return {name: str(m.config) for name, m in model.named_modules() if isinstance(m, Mechanism)}


# --- configs --------------------------------------------------------------------------------------------------------


def test_the_whole_model(log):
    model = build(attention="quest")
    assert log == [str(model.attention_report)]
    assert list(attentions(model).values()) == ["quest"] * 4
    assert log[0].startswith("attention=quest in 4 modules (MultiheadAttention; ")
    assert "; kernel=scaled_dot_product_attention" in log[0]


def test_parts_with_mechanisms_of_their_own():
    config = segmenter()
    config.backbone.update(type="quest_mmseg.VisionTransformer", attention="elliptical-quest")
    head = {"type": "quest_mmseg.SegmenterMaskTransformerHead", "attention": {"name": "quest", "kv_heads": 1}}
    config.decode_head.update(head)
    model = MODELS.build(config)
    assert list(attentions(model).values()) == ["elliptical-quest"] * 2 + ["quest+gqa(kv_heads=1)"] * 2
    loss(model).backward()


def query_norms(model):
    parts = [part for part in model.modules() if isinstance(part, Projected)]
    return torch.cat([part.projections.norms(part, part.head_sizes, "q") for part in parts]).tolist()


def test_the_start_survives_init_weights():
    assert query_norms(build(attention="quest(init=5)")) == pytest.approx([5] * 16)
    config = segmenter()
    config.backbone.update(type="quest_mmseg.VisionTransformer", attention="quest(init=3)")
    model = MODELS.build(config)
    model.init_weights()
    assert query_norms(model) == pytest.approx([3] * 8)


def test_pretrained_weights_are_not_scaled(tmp_path):
    trained = build(attention="quest")
    torch.save(trained.backbone.state_dict(), tmp_path / "vit.pth")
    config, start = segmenter(), {"type": "Pretrained", "checkpoint": str(tmp_path / "vit.pth")}
    config.backbone.update(type="quest_mmseg.VisionTransformer", attention="quest(init=3)", init_cfg=start)
    model = MODELS.build(config)
    model.init_weights()
    weight = "layers.0.attn.attn.in_proj_weight"
    assert torch.equal(model.backbone.get_parameter(weight), trained.backbone.get_parameter(weight))


def test_attention_at_the_top_level_of_a_config_is_that_of_the_model():
    """It may be a variable of the file, which sets model.attention. What is refused is in test_configs.py."""
    quest = build(attention="quest")
    check_config(Config({"attention": "quest"}), quest)
    check_config(Config({"model": {"type": "User", "attention": "cbam"}}), build())
    with pytest.raises(ConfigError, match="top level"):
        quest.cfg = Config({"attention": "standard"})  # as init_model does
    assert not hasattr(quest, "cfg")


def stock_inferencer(weights=None, **options):
    meta = {"classes": list("abcde"), "palette": [[0, 0, 0]] * CLASSES}
    pipeline = [{"type": "LoadImageFromFile"}, {"type": "PackSegInputs"}]
    dataset = {"type": "BaseSegDataset", "metainfo": meta, "pipeline": pipeline}
    made = {"model": segmenter(), "default_scope": "mmseg", "test_pipeline": pipeline, **options}
    return MMSegInferencer(Config({**made, "test_dataloader": {"dataset": dataset}}), weights, device="cpu")


def test_an_inferencer_refuses_a_key_that_nothing_reads_and_weights_of_another_attention(tmp_path):
    """It does not set `cfg` of the model, as `init_model` does, and only logs the keys that a model does not have."""
    with pytest.raises(ConfigError, match="top level .* the model has mmseg's own attention; write model.attention"):
        stock_inferencer(attention="quest")
    torch.save({"state_dict": build(attention="quest").state_dict(), "meta": {}}, tmp_path / "quest.pth")
    with pytest.raises(CheckpointError, match="trained with attention 'quest', and the model has mmseg's own"):
        stock_inferencer(str(tmp_path / "quest.pth"))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["model.attention=standard"], "standard"),
        (["model.attention=quest+gqa(kv_heads=2)"], "quest+gqa(kv_heads=2)"),
        (["model.attention.kv_heads=2"], "quest+gqa(kv_heads=2)"),  # the config says attention="quest"
        (["model.attention.ratio=2", "model.attention=standard"], "gqa(ratio=2)"),
        # mmengine cannot read a comma inside of brackets.
        (["model.attention=aft-conv(window=3;query=false)"], "aft-conv(query=false, window=3)"),
    ],
)
def test_command_line(given, expected):
    """What tools/train.py does with --cfg-options."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cfg-options", nargs="+", action=DictAction)
    config = Config({"model": segmenter(attention="quest")})
    config.merge_from_dict(parser.parse_args(["--cfg-options", *given]).cfg_options)
    assert set(attentions(MODELS.build(config.model)).values()) == {expected}


# --- standard is stock ----------------------------------------------------------------------------------------------


def test_a_key_of_the_config_keeps_what_a_mechanism_learns_out_of_weight_decay():
    model, rule = build(attention="qknorm"), {"custom_keys": {"mechanism": {"decay_mult": 0.0}}}
    optimizer = {"type": "AdamW", "lr": 0.1, "weight_decay": 0.1}
    groups = build_optim_wrapper(model, {"optimizer": optimizer, "paramwise_cfg": rule}).optimizer.param_groups
    free = {id(p) for group in groups if group["weight_decay"] == 0 for p in group["params"]}
    names = {name for name, p in model.named_parameters() if id(p) in free}
    assert names == {name for name, _ in model.named_parameters() if ".mechanism." in name} != set()


def test_standard_initializes_as_stock():
    theirs = build().state_dict()
    ours, quest = (build(attention=name).state_dict() for name in ("standard", "quest"))
    assert list(ours) == list(theirs)
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    assert [name for name in quest if not name.endswith(ENTRY)] == list(theirs)


@pytest.mark.parametrize("attention", ["quest", "elliptical", "aft-conv(window=3)"])
def test_checkpointed_activations_give_the_same_gradients(attention):
    """By mmseg's with_cp, and by mmengine."""
    backbone = {**segmenter().backbone, "with_cp": True}
    plain, cheap = build(attention=attention), build(attention=attention)
    turn_on_activation_checkpointing(cheap, ["backbone.layers.0", "decode_head.layers.1"])
    models = (plain, cheap, build(attention=attention, backbone=backbone))
    for model in models:
        loss(model).backward()
    want = dict(plain.named_parameters())
    for name, parameter in (pair for model in models[1:] for pair in model.named_parameters()):
        torch.testing.assert_close(parameter.grad, want[name].grad, msg=name)


# --- mechanisms on the grid -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["quest", "aft-simple", "aft-full", "aft-local", "aft-conv(window=3)"])
def test_every_mechanism_trains_and_predicts_at_any_size(attention):
    model = build(attention=attention)
    loss(model).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters()), attention
    model.eval()
    with torch.no_grad():
        assert model(images()).isfinite().all()
        for size in ((48, 32), (64, 40)):
            if attention in ("aft-full", "aft-local"):
                with pytest.raises(InputError, match=rf"'{attention}' belong to a grid of \(4, 6\) .*slide.*aft-conv"):
                    model(images(*size))
            else:
                assert model(images(*size)).isfinite().all()


@pytest.mark.parametrize("whole", [True, False])
def test_aft_conv_knows_the_grid_and_the_class_tokens(whole):
    """A patch far outside the window reaches a query only through the global sum; its neighbors have a bias."""
    if whole:
        model = build(attention="aft-conv(window=3)").eval()
    else:  # each part has an attention of its own
        config = segmenter()
        for part in (config.backbone, config.decode_head):
            part.update(type=f"quest_mmseg.{part.type}", attention="aft-conv(window=3)")
        model = MODELS.build(config).eval()
    families = [m.family for m in model.modules() if isinstance(m, Mechanism)]
    assert [family.prefix for family in families] == [1, 1, CLASSES, CLASSES]
    for height, width in ((32, 48), (64, 40)):
        model(images(height, width))
        assert {tuple(family.grid) for family in families} == {(height // 8, width // 8)}
    head = model.decode_head.layers[0].attn
    x = torch.randn(2, 24 + CLASSES, 16)  # class tokens last, as the head has them
    for family in families:
        family.grid = (4, 6)
        nn.init.normal_(family.gain)
    swapped = x.clone()
    swapped[:, -1], swapped[:, -2] = x[:, -2], x[:, -1]
    # Class tokens have no bias, so their order does not matter to the patches; that of patches does.
    torch.testing.assert_close(head(swapped)[:, :24], head(x)[:, :24])
    moved = x.clone()
    moved[:, 0], moved[:, 1] = x[:, 1], x[:, 0]
    assert not torch.allclose(head(moved)[:, 2:24], head(x)[:, 2:24], atol=1e-6)


def test_kernels_are_a_set():
    """The attention of K-Net lies directly inside the module that says what its tokens are."""
    update = {"type": "KernelUpdator", "in_channels": 16, "feat_channels": 16, "out_channels": 16}
    head = KernelUpdateHead(num_classes=3, num_heads=4, in_channels=16, out_channels=16, kernel_updator_cfg=update)
    assert [site.capabilities.ordered for site in MmsegAdapter().sites(head)] == [False]


def test_copies_of_aft_conv_have_grids_of_their_own():
    model = build(attention="aft-conv(window=3)").eval()
    twin = copy.deepcopy(model)
    model(images(32, 48))
    twin(images(64, 40))
    for m, grid in ((model, (4, 6)), (twin, (8, 5))):
        assert {tuple(p.family.grid) for p in m.modules() if isinstance(p, Mechanism)} == {grid}
    torch.testing.assert_close(twin(images()), model(images()))
    model, _ = quest_core.inject(build(attention="aft-simple"), "quest", adapter="mmseg")
    assert "forward" not in vars(model.decode_head)


def test_learned_positions_need_their_number_and_their_grid():
    build(attention="aft-full(max_length=29)")(images())  # 24 patches and 5 classes
    with pytest.raises(InputError, match="29 tokens are more than max_length=28"):
        build(attention="aft-full(max_length=28)")  # before the first image
    config = segmenter()
    config.decode_head.update(type="quest_mmseg.SegmenterMaskTransformerHead", attention="aft-full")
    with pytest.raises(UnsupportedError, match="does not know the size of the images; name the attention on the whole"):
        MODELS.build(config)


def test_elliptical_is_chained_through_each_part():
    model = build(attention="elliptical")
    scores = [m.score for m in model.modules() if isinstance(m, Mechanism)]
    assert [score._previous[0] for score in scores] == [None, scores[0], None, scores[2]]


# --- checkpoints ----------------------------------------------------------------------------------------------------


DEIT = Path(__file__).parent / "data" / "deit.pth"


@pytest.fixture
def converted(tmp_path, monkeypatch):
    """DeiT's weights after the converter that mmseg ships."""
    path = str(tmp_path / "converted.pth")
    monkeypatch.setattr(sys, "argv", ["vit2mmseg.py", str(DEIT), path])
    runpy.run_path(str(MIM / "tools/model_converters/vit2mmseg.py"), run_name="__main__")
    return path


@pytest.mark.parametrize("attention", ["quest", "quest+gqa(kv_heads=2)", "aft-conv(window=3)"])
def test_deit_weights_for_another_image_size(attention, converted):
    """mmseg resizes the positions, and the weights arrive; with narrower keys they are pooled."""
    stock = build(pretrained=converted).backbone
    names = [*stock.state_dict()]
    loaded = build(attention=attention, attention_from="standard", pretrained=converted).backbone.state_dict()
    want = quest_core.inject(stock, attention, adapter="mmseg")[0].state_dict()
    assert all(torch.equal(loaded[name], want[name]) for name in names)


def test_deit_has_the_features_that_timm_gives_it(converted):
    """data/deit.pth is a tiny ViT of timm 1.0.31 in DeiT's file format, with what its forward_features made of images.

    VisionTransformer(img_size=24, patch_size=8, embed_dim=16, depth=2, num_heads=4), all parameters drawn from
    N(0, 0.3). mmseg leaves out the bias of the patch embedding by default, and drops it from the weights.
    """
    made = torch.load(DEIT, weights_only=True)
    config = segmenter().backbone
    config.update(type="quest_mmseg.VisionTransformer", img_size=(24, 24), patch_bias=True, pretrained=converted)
    features = {}
    for attention in ("standard", "quest"):
        backbone = MODELS.build({**config, "attention": attention, "attention_from": "standard"})
        backbone.init_weights()
        backbone.eval()
        backbone.load_state_dict(torch.load(converted, weights_only=True), strict=True)
        features[attention] = backbone(made["images"])[-1].flatten(2).transpose(1, 2)
    torch.testing.assert_close(features["standard"], made["features"][:, 1:])
    assert not torch.allclose(features["quest"], made["features"][:, 1:], atol=1e-3)


def test_torch_export():
    model = build(attention="aft-conv(window=3)").eval()
    with torch.no_grad():  # the biases for places start at zero
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.2)
    batch = torch.export.Dim("batch", min=1, max=16)
    exported = torch.export.export(model, (images(),), dynamic_shapes={"inputs": {0: batch}}).module()
    for x in (images(), torch.cat([images(), images().flip(0)])):
        torch.testing.assert_close(exported(x), model(x), rtol=1e-4, atol=1e-4)


# --- refusals -------------------------------------------------------------------------------------------------------


def test_convolutional_models_have_nothing_to_replace():
    config = segmenter(attention="quest")
    config.backbone = ConfigDict(type="ResNet", depth=18)
    config.decode_head = ConfigDict(type="FCNHead", in_channels=512, channels=8, num_classes=CLASSES)
    with pytest.raises(quest_core.InjectionError, match="EncoderDecoder has no attention"):
        MODELS.build(config)


def test_every_file_with_attention_is_in_a_table():
    """A backbone or head of mmseg that speaks of attention is honored or refused by name, or its gates are listed."""
    names = {*TYPES, *REFUSED}
    elsewhere = {"ann_head", "isa_head", "ocr_head"}  # their blocks are refused under the name that they share
    gates = {"bisenetv1", "pidnet", "resnest", "resnet", "stdc", "ham_head"}  # no queries and keys: weights of channels
    for home in (backbones, decode_heads):
        for path in Path(home.__file__).parent.glob("*.py"):
            source = path.read_text()
            if re.search(r"attention|softmax\(|multihead", source, re.IGNORECASE):
                found = set(re.findall(r"^(?:    ?)?class (\w+)", source, re.MULTILINE))
                known = found & names or path.stem in gates | elsewhere
                assert known, f"{path.name}: honor it, refuse it or say why not"


def test_each_class_is_registered():
    for name in TYPES:
        assert MODELS.get(f"quest_mmseg.{name}").__mro__[2].__name__ == name


@pytest.mark.parametrize("name", REFUSED)
def test_each_refusal_is_of_a_class_that_exists(name):
    homes = [made for key, made in sys.modules.items() if re.match(r"mmseg\.models\.(backbones|decode_heads)\.", key)]
    kinds = [vars(home)[name] for home in homes if getattr(vars(home).get(name), "__module__", "") == home.__name__]
    assert kinds
    for kind in kinds:
        made = nn.Module.__new__(kind)
        nn.Module.__init__(made)  # the refusal looks at what a module is; some cannot be built without a GPU
        with pytest.raises(UnsupportedError, match=f"with {name} .at '0'.: "):
            quest_core.inject(nn.Sequential(made), "quest", adapter="mmseg")


def by_mmengine(model):
    return get_model_complexity_info(model, inputs=(images(),), show_table=False, show_arch=False)["flops"]


def by_fvcore(model):
    return FlopCountAnalysis(model, images()).unsupported_ops_warnings(False).total()


def by_torch(model):
    with FlopCounterMode(display=False) as counter:
        model(images()).sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("count", [by_mmengine, by_fvcore, by_torch])
@pytest.mark.parametrize("attention", ["standard", "quest"])
def test_flop_counters_count_the_fused_attention(attention, count):
    """Stock forms the weights by two products; a fused call that is not counted would look like a saving."""
    stock, own = (count(build(**options).eval()) for options in ({}, {"attention": attention}))
    assert own == pytest.approx(stock, rel=0.01)


class Other(MmengineAdapter):
    """The adapter of a second plugin."""

    name, package, types = "other", "quest_other", frozenset()
    models = MODELS


def test_a_second_plugin_changes_mmengine_no_further(log):
    wanted, changed = build(attention="quest"), [*Mmengine.patches]
    other = Other()
    other.install()
    try:
        assert [*Mmengine.patches] == changed
        model = segmenter(attention="quest")
        check_config(Config({"attention": "quest", "model": model}), model)
        log.clear()
        build(attention="quest")
        assert len(log) == len(set(log))
    finally:
        other.uninstall()
    assert by_torch(wanted.eval()) == pytest.approx(by_torch(build().eval()), rel=0.01)
