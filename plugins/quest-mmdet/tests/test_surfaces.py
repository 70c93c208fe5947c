"""What a user of mmdet writes and gets: configs, the Runner, mAP, checkpoints, refusals."""

import copy
import json
import re

import pytest
import torch
from conftest import DAB, DETR, LAPTOP, MIM, SIDE, read, samples, small, without_dropout
from mmdet.registry import MODELS
from mmengine.config import Config
from mmengine.runner import Runner

import quest_core
from devtools.wrong import WRONG
from quest_core.errors import CheckpointError, ConfigError, InjectionError, UnsupportedError
from quest_core.hosts.adapter import HostAttention
from quest_mmdet.adapter import TYPES, MmdetAdapter
from quest_mmengine.adapter import check_config
from quest_suites.mmdet import objects


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("objects")
    objects.write(folder, train=8, validation=4)
    return folder


def config(data, work, **model):
    made = Config.fromfile(LAPTOP)
    made.model.update(model)
    for loader in (made.train_dataloader, made.val_dataloader, made.test_dataloader):
        loader.update(batch_size=4, num_workers=0, persistent_workers=False)
        loader.dataset.data_root = str(data)
    made.val_evaluator.ann_file = made.test_evaluator.ann_file = str(data / "validation.json")
    made.train_cfg.update(max_iters=2, val_interval=2)
    made.default_hooks.checkpoint.interval = 2
    made.update(work_dir=str(work), log_level="WARNING", experiment_name=work.name, randomness={"seed": 0})
    return made


# --- what is replaced -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "count", "left"),
    [
        ("detr/detr_r50_8xb2-150e_coco.py", 18, 0),
        ("conditional_detr/conditional-detr_r50_8xb2-50e_coco.py", 18, 0),
        ("dab_detr/dab-detr_r50_8xb2-50e_coco.py", 18, 0),
        ("deformable_detr/deformable-detr_r50_16xb2-50e_coco.py", 6, 12),
        ("dino/dino-4scale_r50_8xb2-12e_coco.py", 6, 12),
        ("ddq/ddq-detr-4scale_r50_8xb2-12e_coco.py", 6, 12),
        ("mask2former/mask2former_r50_8xb2-lsj-50e_coco.py", 18, 6),
        ("maskformer/maskformer_r50_ms-16xb1-75e_coco.py", 18, 0),
        ("swin/mask-rcnn_swin-t-p4-w7_fpn_1x_coco.py", 12, 0),
        ("pvt/retinanet_pvt-t_fpn_1x_coco.py", 8, 0),
        ("pvt/retinanet_pvtv2-b0_fpn_1x_coco.py", 8, 0),
    ],
)
def test_configs_of_mmdet(path, count, left):
    model = Config.fromfile(MIM / path).model
    model.update(type=f"quest_mmdet.{model.type}", attention="quest")
    report = MODELS.build(model).attention_report
    assert (len(report.replacements), len(report.left_alone)) == (count, left)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("retinanet/retinanet_r50_fpn_1x_coco.py", "RetinaNet has no attention"),
        ("empirical_attention/faster-rcnn_r50-attn0010-dcn_fpn_1x_coco.py", "FasterRCNN has no attention"),
    ],
)
def test_models_without_attention_of_tokens(path, said):
    model = Config.fromfile(MIM / path).model
    model.update(type=f"quest_mmdet.{model.type}", attention="quest")
    with pytest.raises(InjectionError, match=said):
        MODELS.build(model)


def test_non_local_blocks_are_attention_that_stays():
    model = Config.fromfile(MIM / "swin" / "mask-rcnn_swin-t-p4-w7_fpn_1x_coco.py").model
    refine = {"type": "BFP", "in_channels": 256, "num_levels": 5, "refine_level": 2, "refine_type": "non_local"}
    model.update(type="quest_mmdet.MaskRCNN", attention="quest", neck=[model.neck, refine])
    with pytest.raises(InjectionError, match=r"'neck.1.refine' \(NonLocal2d\)"):
        MODELS.build(model)


def test_each_class_is_registered():
    for name in TYPES:
        assert MODELS.get(f"quest_mmdet.{name}").__mro__[2].__name__ == name


# --- wrong configs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        *(({"attention": None, **options}, ConfigError, said) for options, said in WRONG),
        ({"attentoin": "quest", "attention": "quest"}, ConfigError, "did you mean 'attention'"),
        ({"attention": "quest", "kv_heads": 2}, ConfigError, "has no option 'kv_heads'"),
        ({"type": "DeformableDETR"}, ConfigError, re.escape("write model.type='quest_mmdet.DeformableDETR' too")),
        ({"attention": None}, ConfigError, "has no attention"),
        ({"attention": "aft-full"}, UnsupportedError, "aft-full"),
    ],
)
def test_a_wrong_config_is_an_error_before_the_work_folder_is_made(options, error, said, data, tmp_path):
    with pytest.raises(error, match=said):
        Runner.from_cfg(config(data, tmp_path / "work", **options))
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize("scope", ["", "mmdet.", "quest_mmdet."])
def test_heads_that_ignore_unknown_keys_do_not_take_attention(scope):
    model = read(MIM / "mask2former" / "mask2former_r50_8xb2-lsj-50e_coco.py")
    model.panoptic_head.update(type=f"{scope}Mask2FormerHead", attention="quest")
    with pytest.raises(ConfigError, match=r"panoptic_head.attention is 'quest', and mmdet's Mask2FormerHead does not"):
        check_config(Config({"model": model}), model)


# In cross-attention of DAB-DETR a query has positions next to its contents.
NARROW = r"cross_attn' of mmdet: query heads have 64 features and value heads 32"


@pytest.mark.parametrize(
    ("detector", "attention", "said"),
    [
        ("DABDETR", "elliptical", NARROW),
        ("DABDETR", "aft-simple", NARROW),
        ("DABDETR", "quest(init=12)", "queries are made of several projections; leave init out"),
        ("DINO", "linear", "'linear' cannot be used .*self_attn' of mmdet: .* hides or weighs single pairs"),
    ],
)
def test_what_would_fail_in_the_first_step_is_refused(detector, attention, said):
    config = small(DAB) if detector == "DABDETR" else read(MIM / "dino" / "dino-4scale_r50_8xb2-12e_coco.py")
    config.update(type=f"quest_mmdet.{detector}", attention=attention)
    with pytest.raises(UnsupportedError, match=said):
        MODELS.build(config)


# --- training ---------------------------------------------------------------------------------------------------------


def test_the_runner_trains_evaluates_logs_and_continues(data, tmp_path):
    """quest-mmseg's tests compare the numbers of the hook."""
    made = config(data, tmp_path / "work")
    made.custom_hooks = [{"type": "quest_mmdet.WatchAttention", "every": 1}]
    made.default_hooks.logger.interval = 1
    runner = Runner.from_cfg(made)
    runner.train()
    said = str(runner.model.attention_report)
    assert said.startswith("attention=quest in 2 modules (MultiheadAttention; ")
    assert "; kernel=scaled_dot_product_attention; not replaced (deformable attention, no q·k): " in said
    log = next((tmp_path / "work").glob("*/vis_data/scalars.json")).read_text().splitlines()
    values = {}
    for line in log:
        values |= json.loads(line)
    assert 0 <= values["coco/bbox_mAP"] <= 1
    assert values["max_logit"] == values["attention/max_logit"]
    assert sum(key.endswith("/max_logit/max") for key in values) == 2  # deformable attention has a softmax too

    saved = tmp_path / "work" / "iter_2.pth"
    again = config(data, tmp_path / "again", attention="quest")
    again.load_from = str(saved)
    tester = Runner.from_cfg(again)
    tester.test()
    torch.testing.assert_close(tester.model.state_dict(), runner.model.state_dict())
    for options in ({"attention": "qknorm-hs"}, {"type": "DeformableDETR"}):
        other = config(data, tmp_path / "other", **options)
        if "type" in options:
            del other.model.attention
        other.load_from = str(saved)
        with pytest.raises(CheckpointError, match="quest"):
            Runner.from_cfg(other).test()


@pytest.mark.parametrize("injected", [False, True])
@pytest.mark.parametrize("attention", ["qknorm", "quest(init=12)"])
def test_init_weights_of_detr_leaves_a_mechanism_its_start(attention, injected):
    """DETR draws every parameter of its Transformer that has two axes."""
    given = {} if injected else {"type": "quest_mmdet.DETR", "attention": attention}
    model = MODELS.build(without_dropout(small(DETR, **given)))
    if injected:
        quest_core.inject(model, attention, fresh=True)
    model = copy.deepcopy(model)
    parts = [part for part in model.modules() if isinstance(part, HostAttention)]

    def start():
        norms = [part.projections.norms(part, part.head_sizes, "q") for part in parts if "init" in attention]
        return [[own.detach().clone() for own in part.mechanism.parameters()] for part in parts] + norms

    before, drawn = start(), model.encoder.layers[0].ffn.layers[1].weight.clone()
    model.init_weights()
    torch.testing.assert_close(start(), before)
    assert not torch.equal(model.encoder.layers[0].ffn.layers[1].weight, drawn)


def test_padding_of_a_batch_changes_no_image():
    """mmdet pads images to the largest of a batch, and hides the padding by masks."""
    model = MODELS.build(small(DETR, type="quest_mmdet.DETR", attention="quest")).eval()
    model.init_weights()
    both = samples()
    both[1].set_metainfo({"img_shape": (32, 48)})
    x = torch.randn(2, 3, SIDE, SIDE)
    other = x.clone()
    other[1, :, 32:] = torch.randn(3, SIDE - 32, SIDE)
    masked = [model.forward_transformer(model.extract_feat(images), both)["hidden_states"] for images in (x, other)]
    assert torch.equal(masked[0][:, 0], masked[1][:, 0])
    assert isinstance(MmdetAdapter.models.get("quest_mmdet.DETR"), type)
