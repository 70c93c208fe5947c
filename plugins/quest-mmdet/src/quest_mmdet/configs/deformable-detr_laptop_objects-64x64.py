# A Deformable DETR that trains on a laptop's processor in minutes, on generated images in the layout of COCO:
#   python -m quest_suites.mmdet.objects data/objects --train 512 --validation 64
#   quest run tools/train.py deformable-detr_laptop_objects-64x64.py --cfg-options model.attention=quest
# A path, because mmengine looks mmdet:: up under a name that its maintained fork does not have.
_base_ = __import__("mmdet").__path__[0] + "/.mim/configs/deformable_detr/deformable-detr_r50_16xb2-50e_coco.py"
custom_imports = dict(imports=["quest_mmdet"], allow_failed_imports=False)
data_root = "data/objects"
metainfo = dict(classes=("box", "ball", "tent", "pole"))
width = 64

mmcv_attention = dict(embed_dims=width, num_heads=4, dropout=0.0)
deformable = dict(num_levels=2, **mmcv_attention)
ffn = dict(embed_dims=width, feedforward_channels=4 * width, ffn_drop=0.0)
model = dict(
    type="quest_mmdet.DeformableDETR",
    attention="quest",
    # Queries that start at norm 12; the default, null, is the paper's:
    # attention="quest(init=12)",
    num_queries=32,
    num_feature_levels=2,
    with_box_refine=True,
    data_preprocessor=dict(mean=[127.5] * 3, std=[127.5] * 3),
    backbone=dict(
        depth=18,
        base_channels=32,
        num_stages=3,
        strides=(1, 2, 2),
        dilations=(1, 1, 1),
        out_indices=(1, 2),
        frozen_stages=-1,
        norm_cfg=dict(requires_grad=True),
        init_cfg=None,
    ),
    neck=dict(in_channels=[64, 128], out_channels=width, norm_cfg=dict(num_groups=8), num_outs=2),
    encoder=dict(num_layers=2, layer_cfg=dict(self_attn_cfg=deformable, ffn_cfg=ffn)),
    decoder=dict(num_layers=2, layer_cfg=dict(self_attn_cfg=mmcv_attention, cross_attn_cfg=deformable, ffn_cfg=ffn)),
    positional_encoding=dict(num_feats=width // 2),
    bbox_head=dict(num_classes=4, embed_dims=width),
    test_cfg=dict(max_per_img=32),
)

pack = dict(type="PackDetInputs", meta_keys=("img_id", "img_path", "ori_shape", "img_shape", "scale_factor"))
resize = dict(type="Resize", scale=(64, 64), keep_ratio=True)
load = [dict(type="LoadImageFromFile"), dict(type="LoadAnnotations", with_bbox=True)]
train_dataloader = dict(
    _delete_=True,
    batch_size=16,
    num_workers=2,
    persistent_workers=True,
    sampler=dict(type="InfiniteSampler", shuffle=True),
    dataset=dict(
        type="CocoDataset",
        data_root=data_root,
        metainfo=metainfo,
        ann_file="train.json",
        data_prefix=dict(img="train/"),
        pipeline=[*load, resize, dict(type="RandomFlip", prob=0.5), pack],
    ),
)
val_dataloader = dict(
    _delete_=True,
    batch_size=16,
    num_workers=0,
    sampler=dict(type="DefaultSampler", shuffle=False),
    dataset=dict(
        type="CocoDataset",
        data_root=data_root,
        metainfo=metainfo,
        ann_file="validation.json",
        data_prefix=dict(img="validation/"),
        test_mode=True,
        pipeline=[*load, resize, pack],
    ),
)
test_dataloader = val_dataloader
val_evaluator = dict(ann_file=f"{data_root}/validation.json")
test_evaluator = val_evaluator

iterations = 1000
train_cfg = dict(_delete_=True, type="IterBasedTrainLoop", max_iters=iterations, val_interval=250)
optim_wrapper = dict(
    _delete_=True,
    type="OptimWrapper",
    optimizer=dict(type="AdamW", lr=1e-3, weight_decay=1e-4),
    clip_grad=dict(max_norm=1.0, norm_type=2),
)
param_scheduler = [
    dict(type="LinearLR", start_factor=0.01, by_epoch=False, begin=0, end=50),
    dict(type="CosineAnnealingLR", by_epoch=False, begin=0, end=iterations),
]
default_hooks = dict(logger=dict(interval=10, log_metric_by_epoch=False), checkpoint=dict(by_epoch=False, interval=250))
log_processor = dict(window_size=10, by_epoch=False)
env_cfg = dict(dist_cfg=dict(backend="gloo"))
