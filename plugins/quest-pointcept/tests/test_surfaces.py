"""What users touch: `attention` in torch-pointcloud, training, flash, parts, calibration, and wrong keys."""

import copy
import functools
import pickle
import pickletools
import warnings
from types import SimpleNamespace

import pytest
import torch
from clouds import ENCODER, clouds, segmentation
from stand_in import Stages, patches_by_definition, serialized
from torch import nn
from torch_pointcloud.models.concerto import ConcertoSegmentation
from torch_pointcloud.models.point_transformer_v3 import PointTransformerV3Classification, PointTransformerV3Encoder
from torch_pointcloud.models.sonata import SonataSegmentation
from torch_pointcloud.models.utonia import UtoniaSegmentation

import quest_core
from devtools.wrong import WRONG
from quest_core import ConfigError, Mechanism, UnsupportedError
from quest_core.mechanisms import elliptical
from quest_pointcept import PointceptAdapter
from quest_pointcept.hosts import BATCHES, build, calibrate_what_was_loaded, check, reduce


def mechanisms(model):
    return [part for part in model.modules() if isinstance(part, Mechanism)]


def injected(attention, **options):
    torch.manual_seed(0)
    fresh = {"fresh": True} if "init" in attention else {}
    return quest_core.inject(Stages(**options), attention, adapter=PointceptAdapter(), **fresh)[0]


# --- torch-pointcloud, end to end -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (PointTransformerV3Encoder, ENCODER),
        (PointTransformerV3Classification, {**ENCODER, "num_classes": 3}),
        (SonataSegmentation, {**ENCODER, "num_classes": 3}),
        (ConcertoSegmentation, {**ENCODER, "num_classes": 3}),
        (UtoniaSegmentation, {**ENCODER, "encoder_channels": (24, 48), "num_classes": 3}),
    ],
)
def test_every_model_takes_the_key(kind, options, capsys):
    model = kind(**options, attention="quest")
    assert len(mechanisms(model)) == 4
    shown = capsys.readouterr().err
    assert shown.count("attention=quest in 4 modules") == 1
    assert str(model.attention_report) in shown
    for none in (None, "None"):  # the text is of a command line
        assert not mechanisms(kind(**options, attention=none))


# --- parts and kernels ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("attention", "encoder", "decoder"),
    [
        ({"enc": "quest"}, ["quest", "quest"], "standard"),
        ({"enc": "sigmoid", "dec": {"name": "quest", "ratio": 2}}, ["sigmoid", "sigmoid"], "quest+gqa(ratio=2)"),
        ({"stages": ["quest", None]}, ["quest", "standard"], "quest"),  # the decoder's stage is the finest
    ],
)
def test_each_part_has_an_attention_of_its_own(attention, encoder, decoder, capsys):
    model = segmentation(attention=attention)
    assert [str(m.config) for m in mechanisms(model)] == [encoder[0]] * 2 + [encoder[1]] * 2 + [decoder]
    assert "in 5 modules" in capsys.readouterr().err
    assert [row.path for row in model.attention_report.replacements] == [
        s.path for s in PointceptAdapter().sites(model)
    ]
    model(*clouds(30, 20)).sum().backward()
    with pytest.raises(quest_core.CheckpointError):
        segmentation(attention="qnorm").load_state_dict(model.state_dict())


@pytest.mark.parametrize("attention", ["quest+gqa(kv_heads=4)", {"dec": "quest+gqa(kv_heads=4)"}])
def test_heads_that_do_not_fit_are_an_error_that_says_what_fits_all_stages(attention):
    stages = {"decoder_depths": (1, 1), "decoder_channels": (16, 24), "decoder_num_heads": (2, 6), "strides": (2, 2)}
    encoder = {"encoder_depths": (1, 1, 1), "encoder_channels": (16, 32, 48), "encoder_num_heads": (4, 4, 12)}
    patches = {"encoder_patch_size": (8,) * 3, "decoder_patch_size": (8,) * 2}
    with pytest.raises(ConfigError, match=r"layers of 2,.* 6.* heads: all of them take kv_heads=1, 2 .*ratio=1, 2 "):
        segmentation(attention=attention, **stages, **encoder, **patches)


@pytest.mark.parametrize(
    ("attention", "options", "capability", "kernel"),
    [
        ("quest", {"use_flash_attn": True}, (8, 0), "varlen"),
        ("quest", {"use_flash_attn": True}, (7, 0), "buckets"),  # V100
        ("quest", {"use_flash_attn": True}, None, "buckets"),
        ("sinkhorn", {"use_flash_attn": True}, (8, 0), "buckets"),
        ("quest", {"use_flash_attn": True, "attn_drop": 0.1}, (8, 0), "buckets"),
        ("elliptical", {"use_flash_attn": True}, (8, 0), "dense"),
        ("quest", {}, (8, 0), "dense"),
    ],
)
def test_the_report_says_which_kernel_runs(attention, options, capability, kernel, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    kind = {**ENCODER, **options, "encoder_channels": (16, 32)}
    report = str(PointTransformerV3Encoder(**kind, attention=attention).attention_report)
    assert f"kernel={kernel}" in report
    assert ("; heads have 8 features; on text" in report) == (attention == "quest")


def test_calibration_after_a_checkpoint_is_loaded(tmp_path, capsys):
    """As Pointcept's CheckpointLoader calls it; its trainer loads and calibrates in test_pointcept.py."""
    stock = segmentation().eval()
    model = segmentation(1, attention={"name": "quest", "calibrate": 2}, attention_from="standard")
    assert vars(model)[BATCHES] == 2
    (tmp_path / "model.pth").touch()
    batches = [dict(zip(("x", "grid", "batch"), clouds(40, 20), strict=True)) for _ in range(3)]
    cfg = SimpleNamespace(weight=str(tmp_path / "model.pth"), resume=False)
    trainer = SimpleNamespace(cfg=cfg, model=model, train_loader=batches)
    model.load_state_dict(stock.state_dict())
    loaded = copy.deepcopy(model.state_dict())
    # A copy of the model has a copy of this partial, which calls the copy; a closure would call the model.
    model.forward = functools.partial(lambda forward, batch: forward(*batch.values()), model.forward)
    calibrate_what_was_loaded(PointceptAdapter(), lambda hook: None, SimpleNamespace(trainer=trainer))
    assert "attention=quest calibrated in 5 modules" in capsys.readouterr().err
    changed = {name for name, x in model.state_dict().items() if not torch.equal(x, loaded[name])}
    assert changed == {name for name in loaded if ".qkv." in name}
    cfg.resume, calibrated = True, copy.deepcopy(model.state_dict())
    calibrate_what_was_loaded(PointceptAdapter(), lambda hook: None, SimpleNamespace(trainer=trainer))
    assert all(torch.equal(x, calibrated[name]) for name, x in model.state_dict().items())


# --- without flash-attn -----------------------------------------------------------------------------------------------


def test_flash_is_not_needed():
    """The default of torch-pointcloud cannot be built without flash-attn; with an attention it can and runs."""
    with pytest.raises(ImportError, match="flash_attn"):
        segmentation(use_flash_attn=True)
    models = segmentation(use_flash_attn=True, attention="standard").eval(), segmentation().eval()
    whole = clouds(64, 40)  # no cloud smaller than a patch: there both layouts are the same
    outputs = []
    for model in models:
        torch.manual_seed(1)
        outputs.append(model(*whole))
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-5)


def test_relative_positions_need_no_option():
    """The class of torch-pointcloud for them turns the fused kernel off, which the model's default asks for."""
    model = segmentation(use_flash_attn=True, attn_kind="rpe", attention="quest")
    assert not any(getattr(module, "use_flash_attn", False) for module in model.modules())


def test_rotary_positions_need_pos():
    model = segmentation(attn_kind="rope", encoder_channels=(24, 48), decoder_channels=(24,), attention="quest")
    with pytest.raises(quest_core.InputError, match=r"attn_kind='rope' .* pass pos \[N, 3\] to the model"):
        model(*clouds(30, 20))


def test_with_flash_a_small_cloud_is_a_shorter_patch():
    """torch-pointcloud fills it up to a whole patch with copies of its points only without flash."""
    encoder = PointTransformerV3Encoder(**{**ENCODER, "use_flash_attn": True}, attention="standard")
    attention, x = encoder.blocks[0].blocks[0].attn, torch.randn(5, 16)
    q, k, v = attention.qkv(x).unflatten(1, (3, 2, 8)).permute(1, 2, 0, 3)  # [H, N, D]
    attended = nn.functional.scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(1)
    torch.testing.assert_close(attention(x, None, torch.zeros(5, dtype=torch.long)), attention.proj(attended))


def test_maps_are_of_the_patches_in_their_order():
    """Packed, patches of similar length share a batch, the longest first."""
    model = segmentation(use_flash_attn=True, attention="quest").eval()
    x, grid, batch = clouds(3, 37, 12)
    maps = quest_core.attention_maps(model, (x, grid, batch))
    assert list(maps) == [row.path for row in model.attention_report.replacements]
    assert (maps["encoder.blocks.0.blocks.0.attn"][:, 0, 0] > 0).sum(-1).tolist() == [3, *[8] * 7]


def test_learned_positions_keep_patches_of_one_size():
    """The host's patches shrink to the smallest cloud without flash; here a cloud gives the same with others."""
    model = injected("aft-full(max_length=8)").eval()
    x, grid, batch = clouds(40, 5)
    together, alone = model(x, grid, batch), model(x[:40], grid[:40], batch[:40])
    torch.testing.assert_close(together[: len(alone)], alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("attention", "flash", "half"),
    [("quest", True, True), ("quest", False, False), ("aft-full(max_length=8)", False, False)],
)
def test_half_precision_on_a_gpu_is_only_for_the_hosts_flash_path(attention, flash, half, monkeypatch):
    """Also where learned positions keep the patches that flash would have, without flash."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    model = injected(attention, enable_flash=flash)
    on_gpu = SimpleNamespace(is_cuda=True, device=torch.device("cuda"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no CUDA here
        for site in PointceptAdapter().sites(model):
            assert isinstance(site.module._precision(on_gpu), torch.autocast) == half


@pytest.mark.parametrize(("upcast", "dtype"), [(True, torch.float32), (False, torch.bfloat16)])
def test_upcast_attention_attends_in_float32_under_autocast(upcast, dtype):
    model, seen = injected("quest", upcast_attention=upcast), []
    for mechanism in mechanisms(model):
        mechanism.register_forward_pre_hook(lambda _, given: seen.append((given[0] @ given[1].mT).dtype))
    with torch.autocast("cpu", torch.bfloat16):
        model(*clouds(20, 9))
    assert seen == [dtype] * 4


# --- elliptical -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flash", [False, True])
def test_elliptical_compares_each_point_with_itself(flash, monkeypatch):
    """Blocks follow other curves, so a point lies in another patch; its values are still compared with its own."""
    model = injected("elliptical", enable_flash=flash).double().eval()
    first, second = (model.enc0[name].attn for name in ("block0", "block1"))
    values, got = {}, {}
    for name, attention in (("before", first), ("own", second)):
        attention.qkv.register_forward_hook(
            lambda module, given, out, name=name: values.update({name: out[:, 48:].unflatten(1, (4, 6))})
        )
    metric = elliptical._metric
    x, grid, batch = clouds(37, 12, 6)

    def spy(*values, **masked):
        got["metric"] = metric(*values, **masked)
        return got["metric"]

    monkeypatch.setattr(elliptical, "_metric", spy)  # the first block has nothing to compare with
    point = serialized(model.stem(x.double()), grid, batch)
    model.enc0["block1"](model.enc0["block0"](point))
    change = (values["own"] - values["before"]).abs()[point.serialized_order[1]]  # [N, H, D]
    patches = patches_by_definition((37, 12, 6), 8 if flash else 6)
    means = torch.stack([change[held].mean(0) for held, _ in patches])  # [P, H, D]
    torch.testing.assert_close(got["metric"][:, :, 0], means / means.amax(-1, keepdim=True))


def test_elliptical_is_plain_at_the_border_of_a_stage():
    """Also where the next stage happens to have as many heads and features."""
    model = injected("elliptical", heads=(4, 4))
    follows = [site.module.mechanism.score._previous[0] is not None for site in PointceptAdapter().sites(model)]
    assert follows == [False, True, False, True]


# --- what is wrong ----------------------------------------------------------------------------------------------------

HERE = [
    ({"attention": {"encoder": "quest"}}, "has no 'name'"),
    ({"attention": {"enc": "quset"}}, "did you mean 'quest'"),
    ({"attention": {"enc": "quest", "decoder": "quest"}}, r"keys 'enc', 'decoder'; write dict\(enc=..., dec=...\)"),
    ({"attention": {"name": "quest", "enc": "quest"}}, "keys 'name', 'enc'; write"),
    ({"attention": {"stages": "quest"}}, "an attention for each stage, the finest first"),
    ({"attention": {"stages": ["quest"]}}, "has 1 entries; the model has 2 stages"),
    ({"attention": "quest(calibrate=8)"}, r"write calibrate into a mapping, attention=dict"),
    ({"attention": "quest", "calibrate": 8}, r"write calibrate into a mapping, attention=dict"),
    ({"attention": {"name": "quest", "calibrate": "yes"}}, "calibrate is 'yes'; write a number of batches"),
    ({"attention": {"name": "quest", "calibrate": 8}}, "add attention_from='standard'"),
    ({"attention": {"name": "qnorm", "calibrate": 8}, "attention_from": "standard"}, "cannot be calibrated"),
    ({"attention": {"enc": "quest", "calibrate": 8}}, "leave out enc, dec and stages"),
    ({"attention": {"name": "qknorm-ds", "calibrate": 8}, "attention_from": "standard"}, "miss the parameters of"),
    ({"attention": {"name": "quest", "init": 5, "calibrate": 8}, "attention_from": "standard"}, "leave out init"),
]


@pytest.mark.parametrize(("options", "why"), [*WRONG, *HERE])
def test_a_wrong_key_is_one_error_before_anything_is_built(options, why):
    before = torch.get_rng_state()
    with pytest.raises(ConfigError, match=why):
        PointTransformerV3Encoder(**ENCODER, **options)
    assert torch.equal(torch.get_rng_state(), before)  # building draws numbers


@pytest.mark.parametrize(
    ("attention", "options", "why"),
    [
        ("aft-conv", {}, r"lie on a line; write aft-conv\(dims=1\)"),
        ("aft-conv(dims=1, prefix=1)", {}, "without grid and prefix"),
        ("aft-local(max_length=7)", {}, r"patches have 8 points and max_length is 7; write aft-local\(max_length=8\)"),
        ("linear", {"enable_rpe": True}, "hides or weighs single pairs"),
        ("aft-full", {"rotary": True}, "queries do not meet keys, where rotary positions act"),
        ("linear", {"attn_drop": 0.1}, "no weights for the attention dropout"),
    ],
)
def test_what_a_site_cannot_honor(attention, options, why):
    with pytest.raises(UnsupportedError, match=f"{why}.*Possible here: .*quest"):
        quest_core.inject(Stages(**options), attention, adapter=PointceptAdapter())


@pytest.mark.parametrize(
    ("options", "error", "why"),
    [
        ({"attention": "gqa(kv_heads=3)"}, ConfigError, "kv_heads is 3, which does not divide the 2 heads"),
        ({"attention": "elliptical", "encoder_depths": (1, 1)}, quest_core.InjectionError, "no layer follows another"),
        *(
            ({"attention": "quest", "use_flash_attn": True, **one}, UnsupportedError, "build with use_flash_attn=False")
            for one in ({"upcast_attn": True}, {"upcast_softmax": True})
        ),
    ],
)
def test_what_a_model_cannot_honor(options, error, why):
    with pytest.raises(error, match=why):
        segmentation(**options)


def test_an_attention_that_is_not_replaced_needs_allow_partial():
    """A user's own encoder that mixes another attention into a stage."""

    class OtherAttention(nn.Module):
        pass

    class Encoder(nn.Module):
        def __init__(self, use_flash_attn=False):
            super().__init__()
            self.stages = Stages()
            self.mixer = OtherAttention()

    adapter = PointceptAdapter()
    adapter.install()
    adapter.patches.around(Encoder, "__init__", functools.partial(build, adapter))
    with pytest.raises(quest_core.InjectionError, match="'mixer' .OtherAttention.*allow_partial=True"):
        Encoder(attention="quest")
    assert [*Encoder(attention="quest", allow_partial=True).attention_report.left_alone] == ["mixer"]


# --- Pointcept's Config ----------------------------------------------------------------------------------------------


class Backbone:
    def __init__(self, attention=None, attention_from=None, fits=True):
        if not fits:
            raise UnsupportedError("does not fit")
        if attention == "linear":
            raise KeyError("an error of the host's, which raises it when it builds the model")


class Segmentor:
    def __init__(self, backbone=None):
        pass


REGISTRY = {"PT-v3m1": Backbone, "Other": Backbone, "Segmentor": Segmentor}


def backbone(**options):
    return {"model": {"backbone": {"type": "PT-v3m1", **options}}}


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"attention": "quest"}, "^attention='quest' is not read by Pointcept; .* as in model.backbone.attention"),
        ({"backbone": {"attention": "quest"}}, "^backbone.attention='quest' is not read by Pointcept"),
        ({"attention_from": "standard"}, "^attention_from='standard' is not read"),
        ({"model": {"type": "Segmentor", "attention": "quest"}}, "^model.attention='quest' is not read by Segmentor"),
        ({"model": {"parts": [{"type": Segmentor, "attention": "quest"}]}}, "^model.parts.0.attention='quest'"),
        (backbone(attention="quest(inti=5)"), "did you mean 'init'"),
        (backbone(atention="quest"), "no option 'atention'; did you mean 'attention'"),
        (backbone(attention="quest", kv_heads=2), "no option 'kv_heads'; write attention={"),
        (backbone(attention_from="quest"), "^model.backbone: attention_from='.*' is given without"),
        (backbone(attention="quest", fits=False), "does not fit"),
    ],
)
def test_a_config_is_refused_before_a_file_is_written(config, why):
    with pytest.raises((ConfigError, UnsupportedError), match=why):
        check(config, REGISTRY)


@pytest.mark.parametrize(
    "config",
    [
        {"model": {"type": "Segmentor", "backbone": {"type": "PT-v3m1", "attention": "quest"}}, "hooks": [{"type": 1}]},
        backbone(attention={"name": "quest"}, attention_from="standard"),
        backbone(attention=None),
        backbone(attention="linear"),
        {"model": {"backbone": {"type": "Other", "attention": "its own"}}},
        {"model": {"type": "Segmentor", "image": {"attention": "what an image encoder reads"}}},
        {"data": {"type": "Dataset", "attention": "its own"}},
    ],
)
def test_other_configs_are_left_to_their_readers(config):
    check(config, REGISTRY)


class Config:
    """Pickled as Pointcept's Config is, and rebuilt by a function of the plugin, which that imports."""

    __reduce__ = reduce

    def __getstate__(self):
        return (self.options,)

    def __setstate__(self, state):
        (self.options,) = state


def test_a_process_that_is_handed_a_config_imports_the_plugin():
    config = Config()
    config.options = {"model": {"attention": "quest"}}
    pickled = pickle.dumps(config)
    assert pickle.loads(pickled).options == config.options
    assert "quest_pointcept.hosts" in [word for _, word, _ in pickletools.genops(pickled)]
