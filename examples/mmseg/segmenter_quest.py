# Segmenter with QUEST: the two lines that matter are in `model`; the rest makes it small.
_base_ = "mmseg::segmenter/segmenter_vit-t_mask_8xb1-160k_ade20k-512x512.py"

data_preprocessor = dict(size=(64, 64))
model = dict(
    type="quest_mmseg.EncoderDecoder",
    attention="quest",
    # Queries that start at norm 12; the default, null, is the paper's:
    # attention="quest(init=12)",
    pretrained=None,
    data_preprocessor=data_preprocessor,
    backbone=dict(img_size=(64, 64), patch_size=8, embed_dims=48, num_layers=4, num_heads=3),
    decode_head=dict(in_channels=48, channels=48, embed_dims=48, num_heads=3),
    test_cfg=dict(_delete_=True, mode="whole"),
)

train_pipeline = [
    dict(type="LoadImageFromFile"),
    dict(type="LoadAnnotations", reduce_zero_label=True),
    dict(type="RandomFlip", prob=0.5),
    dict(type="PackSegInputs"),
]
test_pipeline = [
    dict(type="LoadImageFromFile"),
    dict(type="LoadAnnotations", reduce_zero_label=True),
    dict(type="PackSegInputs"),
]
loader = dict(num_workers=0, persistent_workers=False)
train_dataloader = dict(batch_size=8, dataset=dict(data_root="data/scenes", pipeline=train_pipeline), **loader)
val_dataloader = dict(dataset=dict(data_root="data/scenes", pipeline=test_pipeline), **loader)
test_dataloader = val_dataloader

optim_wrapper = dict(optimizer=dict(_delete_=True, type="AdamW", lr=1e-3))
train_cfg = dict(max_iters=100, val_interval=50)
default_hooks = dict(logger=dict(interval=10), checkpoint=dict(interval=50))
env_cfg = dict(dist_cfg=dict(backend="gloo"))
