# A Segmenter that trains on a laptop's processor in minutes, on generated scenes in the layout of ADE20K:
#   python -m quest_suites.mmseg.scenes data/scenes --train 512 --validation 64
#   python tools/train.py segmenter_laptop_scenes-64x64.py --cfg-options model.attention=quest
# Real data in the same layout: --cfg-options data_root=... does not reach the loaders; set
# train_dataloader.dataset.data_root and val_dataloader.dataset.data_root.
_base_ = "./segmenter_vit-t_mask_1xb8-160k_ade20k-512x512.py"
data_root = "data/scenes"
crop_size = (64, 64)
classes = ("wall", "sky", "floor", "grass", "box", "ball", "tent", "pole")

data_preprocessor = dict(mean=[127.5] * 3, std=[127.5] * 3, size=crop_size)
model = dict(
    attention="quest",
    # Queries that start at norm 12; the default, null, is the paper's:
    # attention="quest(init=12)",
    data_preprocessor=data_preprocessor,
    backbone=dict(img_size=crop_size, patch_size=8, patch_bias=False, embed_dims=96, num_layers=4, num_heads=4),
    decode_head=dict(
        in_channels=96,
        channels=96,
        embed_dims=96,
        num_heads=4,
        num_classes=len(classes),
        loss_decode=dict(avg_non_ignore=True),
    ),
    test_cfg=dict(_delete_=True, mode="whole"),
)

train_pipeline = [
    dict(type="LoadImageFromFile"),
    dict(type="LoadAnnotations", reduce_zero_label=True),
    dict(type="RandomResize", scale=(256, 64), ratio_range=(0.75, 1.5), keep_ratio=True),
    dict(type="RandomCrop", crop_size=crop_size, cat_max_ratio=0.75),
    dict(type="RandomFlip", prob=0.5),
    dict(type="PackSegInputs"),
]
test_pipeline = [
    dict(type="LoadImageFromFile"),
    dict(type="Resize", scale=(256, 64), keep_ratio=True),
    dict(type="LoadAnnotations", reduce_zero_label=True),
    dict(type="PackSegInputs"),
]
scenes = dict(data_root=data_root, metainfo=dict(classes=classes))
workers = dict(num_workers=0, persistent_workers=False)
images = 16 // _base_.processes  # type: ignore[attr-defined]  # 16 an iteration over all processes
train_dataloader = dict(batch_size=images, dataset=dict(pipeline=train_pipeline, **scenes), **workers)
val_dataloader = dict(dataset=dict(pipeline=test_pipeline, **scenes), **workers)
test_dataloader = val_dataloader

optim_wrapper = dict(optimizer=dict(_delete_=True, type="AdamW", lr=1e-3, weight_decay=0.01))
param_scheduler = [
    dict(type="LinearLR", start_factor=0.01, begin=0, end=100, by_epoch=False),
    dict(type="PolyLR", eta_min=0.0, power=0.9, begin=100, end=1000, by_epoch=False),
]
train_cfg = dict(max_iters=1000, val_interval=250)
default_hooks = dict(checkpoint=dict(interval=250, max_keep_ckpts=1))
