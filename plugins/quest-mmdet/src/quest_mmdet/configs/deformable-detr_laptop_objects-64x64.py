# A Deformable DETR that trains on a laptop's processor in minutes, on generated images in the layout of COCO:
#   python -m quest_suites.mmdet.objects data/objects --train 512 --validation 64
#   quest run tools/train.py deformable-detr_laptop_objects-64x64.py --cfg-options model.attention=quest
custom_imports = dict(imports=["quest_mmdet"], allow_failed_imports=False)
default_scope = "mmdet"
data_root = "data/objects"
metainfo = dict(classes=("box", "ball", "tent", "pole"))
width = 64

mmcv_attention = dict(embed_dims=width, num_heads=4, dropout=0.0, batch_first=True)
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
    data_preprocessor=dict(
        type="DetDataPreprocessor", mean=[127.5] * 3, std=[127.5] * 3, bgr_to_rgb=True, pad_size_divisor=1
    ),
    backbone=dict(
        type="ResNet",
        depth=18,
        base_channels=32,
        num_stages=3,
        strides=(1, 2, 2),
        dilations=(1, 1, 1),
        out_indices=(1, 2),
        frozen_stages=-1,
        norm_cfg=dict(type="BN", requires_grad=True),
    ),
    neck=dict(
        type="ChannelMapper",
        in_channels=[64, 128],
        kernel_size=1,
        out_channels=width,
        act_cfg=None,
        norm_cfg=dict(type="GN", num_groups=8),
        num_outs=2,
    ),
    encoder=dict(num_layers=2, layer_cfg=dict(self_attn_cfg=deformable, ffn_cfg=ffn)),
    decoder=dict(
        num_layers=2,
        layer_cfg=dict(self_attn_cfg=mmcv_attention, cross_attn_cfg=deformable, ffn_cfg=ffn),
        return_intermediate=True,
        post_norm_cfg=None,
    ),
    positional_encoding=dict(num_feats=width // 2, normalize=True, offset=-0.5),
    bbox_head=dict(
        type="DeformableDETRHead",
        num_classes=4,
        embed_dims=width,
        sync_cls_avg_factor=True,
        loss_cls=dict(type="FocalLoss", use_sigmoid=True, gamma=2.0, alpha=0.25, loss_weight=2.0),
        loss_bbox=dict(type="L1Loss", loss_weight=5.0),
        loss_iou=dict(type="GIoULoss", loss_weight=2.0),
    ),
    train_cfg=dict(
        assigner=dict(
            type="HungarianAssigner",
            match_costs=[
                dict(type="FocalLossCost", weight=2.0),
                dict(type="BBoxL1Cost", weight=5.0, box_format="xywh"),
                dict(type="IoUCost", iou_mode="giou", weight=2.0),
            ],
        )
    ),
    test_cfg=dict(max_per_img=32),
)

pack = dict(type="PackDetInputs", meta_keys=("img_id", "img_path", "ori_shape", "img_shape", "scale_factor"))
resize = dict(type="Resize", scale=(64, 64), keep_ratio=True)
load = [dict(type="LoadImageFromFile"), dict(type="LoadAnnotations", with_bbox=True)]
train_dataloader = dict(
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
val_evaluator = dict(type="CocoMetric", ann_file=f"{data_root}/validation.json", metric="bbox")
test_evaluator = val_evaluator

iterations = 1000
train_cfg = dict(type="IterBasedTrainLoop", max_iters=iterations, val_interval=250)
val_cfg = dict(type="ValLoop")
test_cfg = dict(type="TestLoop")
optim_wrapper = dict(
    type="OptimWrapper",
    optimizer=dict(type="AdamW", lr=1e-3, weight_decay=1e-4),
    clip_grad=dict(max_norm=1.0, norm_type=2),
)
param_scheduler = [
    dict(type="LinearLR", start_factor=0.01, by_epoch=False, begin=0, end=50),
    dict(type="CosineAnnealingLR", by_epoch=False, begin=0, end=iterations),
]
default_hooks = dict(
    logger=dict(type="LoggerHook", interval=10, log_metric_by_epoch=False),
    checkpoint=dict(type="CheckpointHook", by_epoch=False, interval=250),
)
log_processor = dict(type="LogProcessor", window_size=10, by_epoch=False)
visualizer = dict(type="DetLocalVisualizer", name="visualizer", vis_backends=[dict(type="LocalVisBackend")])
env_cfg = dict(cudnn_benchmark=False, mp_cfg=dict(mp_start_method="fork"), dist_cfg=dict(backend="gloo"))
