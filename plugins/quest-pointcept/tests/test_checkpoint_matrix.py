"""Load checkpoints of another attention by every loader of torch-pointcloud; the table is in docs/checkpoints.md."""

import copy
import functools
import warnings

import pytest
import torch
from clouds import SEGMENTATION
from outcomes import check
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch_pointcloud import create_model
from torch_pointcloud.utils import state_dict

import quest_core
import quest_pointcept
from quest_core.checkpoints import ENTRY

NAME = "ptv3-base.scannet20.pointcept"
SMALL = {**SEGMENTATION, "num_classes": 3}


def build(attention, **options):
    return create_model(NAME, **SMALL, **({} if attention is None else {"attention": attention}), **options)


def weights(path):
    return torch.load(path, weights_only=True)["state_dict"]


def create(path, attention):
    return build(attention, checkpoint_path=path)


def warm_start(path, attention):
    model = build(attention)
    state_dict.load_state_dict(model, state_dict.read_state_dict(path), source=path.name, strict=False)
    return model


def plain(path, attention, strict=True):
    model = build(attention)
    model.load_state_dict(weights(path), strict=strict)
    return model


def moving_average(path, attention):
    average = AveragedModel(build(attention), multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    average.load_state_dict({"n_averaged": torch.tensor(1), **{f"module.{k}": v for k, v in weights(path).items()}})
    average.update_parameters(copy.deepcopy(average.module))
    return average.module


LOADERS = {
    "`create_model(checkpoint_path=)`": create,
    "`utils.state_dict.load_state_dict`": warm_start,
    "`load_state_dict`": plain,
    "`load_state_dict(strict=False)`": functools.partial(plain, strict=False),
    "`AveragedModel`": moving_average,
}


@pytest.mark.parametrize("loader", LOADERS)
def test_a_checkpoint_of_another_attention(loader, tmp_path):
    check("torch-pointcloud", loader, LOADERS, build, tmp_path)


def save(folder, attention):
    torch.manual_seed(0)
    model = build(attention)
    torch.save({"state_dict": model.state_dict()}, folder / "model.pth")
    return model, folder / "model.pth"


@pytest.mark.parametrize("attention", ["quest", "quest+gqa(kv_heads=1)"])
def test_attention_from_is_silent_in_create_model(attention, tmp_path):
    """stock -> quest and gqa: the weights arrive, pooled if the model has fewer key heads."""
    stock, path = save(tmp_path, None)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model = build(attention, checkpoint_path=path, attention_from="standard")
    converted = quest_core.inject(stock, attention, adapter=quest_pointcept.PointceptAdapter())[0]
    torch.testing.assert_close(model.state_dict(), converted.state_dict())


def test_learned_scales_that_only_one_side_has_are_no_error_if_the_change_is_meant(tmp_path):
    fresh = build("qknorm-hs").state_dict()
    _, path = save(tmp_path, None)
    loaded = build("qknorm-hs", checkpoint_path=path, attention_from="standard").state_dict()
    scales = [name for name in fresh if name.endswith("log_scale")]
    assert scales
    assert all(torch.equal(loaded[name], fresh[name]) for name in scales)
    _, path = save(tmp_path, "qknorm-hs")
    build("qknorm-hs", checkpoint_path=path)
    build("quest", checkpoint_path=path, attention_from="qknorm-hs")


@pytest.mark.parametrize("strict", [True, False])
def test_key_heads_of_another_number_are_refused(strict, tmp_path):
    """torch-pointcloud would keep the initialization without a word."""
    _, path = save(tmp_path, "quest+gqa(kv_heads=1)")
    model = build("sigmoid", attention_from="quest+gqa(kv_heads=1)")
    with pytest.raises(quest_core.CheckpointError, match=r"model.pth: (.*\n.*)size mismatch for encoder.*qkv.weight"):
        state_dict.load_state_dict(model, state_dict.read_state_dict(path), source="model.pth", strict=strict)


def test_stock_weights_start_a_stock_model_of_another_shape(tmp_path):
    """torch-pointcloud keeps the initialization of what does not fit, and the plugin does not change that."""
    stock, path = save(tmp_path, None)
    wider = create_model(NAME, **SMALL | {"encoder_channels": (16, 48)}, checkpoint_path=path)
    name = "encoder.blocks.0.blocks.0.attn.qkv.weight"
    assert torch.equal(wider.get_parameter(name), stock.get_parameter(name))
    state_dict.load_state_dict(model=wider, state_dict=stock.state_dict(), source="by name", strict=True)


def test_the_key_survives_a_mapping_of_keys(tmp_path):
    """transform_state_dict keeps what no pattern names; a pattern can rename the key like any other."""
    trained = {f"module.backbone.{key}": value for key, value in build("quest").state_dict().items()}
    names = {f"module.backbone.{key}": key for key in build("quest").state_dict()}
    mapped = state_dict.transform_state_dict(trained, names)
    state_dict.load_state_dict(build("quest"), mapped, source="model.pth")
    for attention in (None, "standard", "sigmoid"):
        with pytest.raises(quest_core.CheckpointError, match="trained with attention 'quest'"):
            state_dict.load_state_dict(build(attention), mapped, source="model.pth")
    partly = {old: new for old, new in names.items() if not new.endswith(ENTRY)}
    kept = state_dict.transform_state_dict(trained, partly)
    with pytest.warns(UserWarning, match=f"Ignoring checkpoint keys.*module.backbone.*{ENTRY}"):
        state_dict.load_state_dict(build(None), kept, source="model.pth")
