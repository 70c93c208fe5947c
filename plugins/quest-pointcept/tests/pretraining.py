"""What Pointcept's pretraining models need to be run small: rooms in its layout, and its configurations shrunk.

Sonata and Concerto train a PT-v3m2 without labels, by a teacher that follows it; PPT trains a PT-v3m1 whose norms know
the dataset, on several datasets.
"""

import json
from pathlib import Path

import numpy as np
from PIL import Image

from quest_suites.pointcept.scenes import CLASSES, RANGE, scan, seeds

ROOMS = 6
"""Rooms of a dataset."""

PIXELS = 148
"""Edge of a picture: four for each of the 37 patches that Concerto cuts it into."""

BACKBONE = """
        order=["z", "z-trans", "hilbert", "hilbert-trans"], stride=(2, 2, 2),
        enc_depths=(1, 2, 2, 1), enc_channels=(24, 48, 96, 96), enc_num_head=(2, 4, 8, 8),
        enc_patch_size=(64, 64, 64, 64), drop_path=0.1, shuffle_orders=True, enable_flash=False{attention},
"""
COMMON = """
epoch = eval_epoch = 2
batch_size, num_worker, seed = 2, 1, 0
enable_amp, enable_wandb, evaluate, mix_prob = False, False, False, 0
"""
WITHOUT_LABELS = """
param_dicts = [dict(keyword="block", lr=0.0004)]
scheduler = dict(max_lr=[0.004, 0.0004])
hooks = [
    dict(type=name)
    for name in ("CheckpointLoader", "ModelHook", "WeightDecaySchedular", "InformationWriter", "CheckpointSaver")
]
"""
# Views of one set of channels, so that losses of points are few numbers; everything else is the configuration's own.
HEADS = (
    "head_in_channels=240, head_hidden_channels=64, head_embed_channels=32, head_num_prototypes=64, up_cast_level=2,"
)

CONFIGS = {
    "Sonata": (
        "sonata/pretrain-sonata-v1m1-0-base.py",
        """
model = dict(backbone=dict({backbone}), {heads})
data = dict(train=dict(_delete_=True, type="ConcatDataset", datasets=[
    dict(type="DefaultDataset", split="train", data_root={data!r}, transform={{{{_base_.transform}}}}),
]))
"""
        + WITHOUT_LABELS,
    ),
    # The image encoder is a DINOv2 with registers, as there, with two layers and no training.
    "Concerto": (
        "concerto/pretrain-concerto-v1m1-0-base.py",
        """
model = dict(
    backbone=dict({backbone}), {heads} image_weight_path={data!r} + "/dinov2", backbone_out_channels=240,
    enc2d_upcast_level=2, enc2d_head_in_channels=32, enc2d_head_hidden_channels=64, enc2d_head_embed_channels=32,
    enc2d_head_num_prototypes=64,
)
data = dict(train=dict(_delete_=True, type="ConcatDataset", datasets=[
    dict(type="DefaultImagePointDataset", crop_h=518, crop_w=518, patch_size=14, split=["train"], data_root={data!r},
         transform={{{{_base_.transform}}}}),
]))
"""
        + WITHOUT_LABELS,
    ),
    # v1m1 and v1m3 differ only in the head, which needs CLIP's weights.
    "PPT": (
        "scannet/semseg-pt-v3m1-1-ppt-extreme.py",
        """
conditions = ("ScanNet", "Structured3D")
model = dict(
    _delete_=True, type="PPT-v1m2", conditions=conditions, num_classes=(16, 16), backbone_out_channels=24,
    backbone=dict(
        type="PT-v3m1", in_channels=6, {backbone} dec_depths=(1, 1, 1), dec_channels=(24, 48, 96),
        dec_num_head=(2, 4, 8), dec_patch_size=(64, 64, 64), pdnorm_bn=True, pdnorm_ln=True, pdnorm_decouple=True,
        pdnorm_adaptive=True, pdnorm_conditions=conditions, pdnorm_affine=True,
    ),
    criteria=[
        dict(type="CrossEntropyLoss", loss_weight=1.0, ignore_index=-1),
        dict(type="LovaszLoss", mode="multiclass", loss_weight=1.0, ignore_index=-1),
    ],
)
data = dict(train=dict(_delete_=True, type="ConcatDataset", datasets=[
    dict(type="DefaultDataset", split="train", data_root={data!r}, transform=[
        dict(type="CenterShift", apply_z=True),
        dict(type="RandomRotate", angle=[-1, 1], axis="z", center=[0, 0, 0], p=0.5),
        dict(type="RandomFlip", p=0.5),
        dict(type="GridSample", grid_size=0.02, hash_type="fnv", mode="train", return_grid_coord=True),
        dict(type="NormalizeColor"),
        dict(type="Update", keys_dict=dict(condition=condition)),
        dict(type="ToTensor"),
        dict(type="Collect", keys=("coord", "grid_coord", "segment", "condition"), feat_keys=("color", "normal")),
    ])
    for condition in conditions
]))
hooks = [dict(type=name) for name in ("CheckpointLoader", "ModelHook", "InformationWriter", "CheckpointSaver")]
""",
    ),
}
"""For each pretraining, one of Pointcept's own configurations and what shrinks it."""


def config(root: Path, model: str, attention: str, data: Path, plugin: str) -> str:
    """The text of a native configuration for one of CONFIGS; `attention` is the text of the key, or empty."""
    base, text = CONFIGS[model]
    backbone = BACKBONE.format(attention=attention)
    shrunk = text.format(backbone=backbone, heads=HEADS, data=str(data / "rooms"))
    return "\n".join([f"_base_ = [{str(root / 'configs' / base)!r}]", plugin, shrunk, COMMON])


def write_rooms(folder: Path) -> None:
    """Write generated scenes as small as rooms, in the layout of Pointcept's indoor datasets, and Concerto's encoder.

    A room has coordinates, colors, normals and classes, and two pictures with the pixel that each point lies on.
    """
    split = {}
    for seed in seeds("train", ROOMS):
        seen = scan(seed, rings=16, rays=120)
        room = folder / "train" / f"room{seed}"
        room.mkdir(parents=True)
        random = np.random.default_rng(seed)
        coord = (4 * seen.points / RANGE).astype(np.float32)  # meters: rooms, not streets
        shade = 255 * seen.strength[:, None] * np.array([1.0, 0.8, 0.6])
        color = np.clip(shade + random.normal(0, 10, coord.shape), 0, 255).astype(np.float32)
        normal = -coord / np.linalg.norm(coord, axis=1, keepdims=True)
        assert seen.labels.max() < len(CLASSES)
        for name, values in (("coord", coord), ("color", color), ("normal", normal), ("segment", seen.labels)):
            np.save(room / f"{name}.npy", values)
        entry: dict[str, object] = {"pointclouds": str(room), "images": [], "correspondences": []}
        # Each picture shows half of the horizon.
        right = (np.arctan2(coord[:, 1], coord[:, 0]) + np.pi) / np.pi  # [N], 0..2
        down = 0.5 - np.arctan2(coord[:, 2], np.hypot(coord[:, 0], coord[:, 1])) / np.pi  # [N], 0..1
        for half in (0, 1):
            shown = np.flatnonzero((right >= half) & (right < half + 1))
            x = ((right[shown] - half) * PIXELS).astype(int)
            y = np.clip(down[shown] * PIXELS, 0, PIXELS - 1).astype(int)
            picture = np.full((PIXELS, PIXELS, 3), 128, np.uint8)
            picture[y, x] = color[shown]
            files = [room / f"picture{half}.png", room / f"pixels{half}.npy"]
            Image.fromarray(picture).save(files[0])
            np.save(files[1], np.stack([x, y, shown], axis=1))
            entry["images"] += [str(files[0])]
            entry["correspondences"] += [str(files[1])]
        split[room.name] = entry
    (folder / "splits").mkdir()
    (folder / "splits" / "train.json").write_text(json.dumps(split))

    import torch
    from transformers import Dinov2WithRegistersConfig, Dinov2WithRegistersModel

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 518, "patch_size": 14}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        encoder = Dinov2WithRegistersModel(Dinov2WithRegistersConfig(**sizes))
    encoder.save_pretrained(folder / "dinov2")
