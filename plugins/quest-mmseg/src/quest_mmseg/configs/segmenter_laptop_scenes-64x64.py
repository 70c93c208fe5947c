# A Segmenter that trains on a laptop's processor in minutes, on generated scenes in the layout of ADE20K:
#   python -m quest_suites.mmseg.scenes data/scenes --train 512 --validation 64
#   python tools/train.py segmenter_laptop_scenes-64x64.py --cfg-options model.attention=quest
# Real data in the same layout: --cfg-options data_root=... does not reach the loaders; set
# train_dataloader.dataset.data_root and val_dataloader.dataset.data_root.
custom_imports = dict(imports=["quest_mmseg"], allow_failed_imports=False)
default_scope = "mmseg"
data_root = "data/scenes"
crop_size = (64, 64)
classes = ("wall", "sky", "floor", "grass", "box", "ball", "tent", "pole")

data_preprocessor = dict(
    type="SegDataPreProcessor",
    mean=[127.5, 127.5, 127.5],
    std=[127.5, 127.5, 127.5],
    bgr_to_rgb=True,
    pad_val=0,
    seg_pad_val=255,
    size=crop_size,
)
model = dict(
    type="quest_mmseg.EncoderDecoder",
    attention="quest",
    # Queries that start at norm 12; the default, null, is the paper's:
    # attention="quest(init=12)",
    data_preprocessor=data_preprocessor,
    backbone=dict(
        type="VisionTransformer",
        img_size=crop_size,
        patch_size=8,
        embed_dims=96,
        num_layers=4,
        num_heads=4,
        drop_path_rate=0.1,
        final_norm=True,
        norm_cfg=dict(type="LN", eps=1e-6, requires_grad=True),
    ),
    decode_head=dict(
        type="SegmenterMaskTransformerHead",
        in_channels=96,
        channels=96,
        num_classes=len(classes),
        num_layers=2,
        num_heads=4,
        embed_dims=96,
        dropout_ratio=0.0,
        loss_decode=dict(type="CrossEntropyLoss", use_sigmoid=False, loss_weight=1.0, avg_non_ignore=True),
    ),
    test_cfg=dict(mode="whole"),
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
tta_pipeline = [
    dict(type="LoadImageFromFile"),
    dict(
        type="TestTimeAug",
        transforms=[
            [dict(type="Resize", scale_factor=ratio, keep_ratio=True) for ratio in (0.75, 1.0, 1.25)],
            [dict(type="RandomFlip", prob=chance, direction="horizontal") for chance in (0.0, 1.0)],
            [dict(type="LoadAnnotations", reduce_zero_label=True)],
            [dict(type="PackSegInputs")],
        ],
    ),
]
tta_model = dict(type="SegTTAModel")
# 16 images an iteration over all processes. torchrun sets WORLD_SIZE; under Slurm mmengine sets it later.
slurm = "--launcher slurm" in " ".join(__import__("sys").argv).replace("=", " ")
processes = int(__import__("os").environ.get("SLURM_NTASKS" if slurm else "WORLD_SIZE", 1))
if 16 % processes:
    raise ValueError(f"16 images an iteration cannot be divided among {processes} processes; start 1, 2, 4, 8 or 16")
train_dataloader = dict(
    batch_size=16 // processes,
    num_workers=0,
    sampler=dict(type="InfiniteSampler", shuffle=True),
    dataset=dict(
        type="ADE20KDataset",
        data_root=data_root,
        metainfo=dict(classes=classes),
        data_prefix=dict(img_path="images/training", seg_map_path="annotations/training"),
        pipeline=train_pipeline,
    ),
)
val_dataloader = dict(
    batch_size=1,
    num_workers=0,
    sampler=dict(type="DefaultSampler", shuffle=False),
    dataset=dict(
        type="ADE20KDataset",
        data_root=data_root,
        metainfo=dict(classes=classes),
        data_prefix=dict(img_path="images/validation", seg_map_path="annotations/validation"),
        pipeline=test_pipeline,
    ),
)
test_dataloader = val_dataloader
val_evaluator = dict(type="IoUMetric", iou_metrics=["mIoU"])
test_evaluator = val_evaluator

optim_wrapper = dict(type="OptimWrapper", optimizer=dict(type="AdamW", lr=1e-3, weight_decay=0.01))
param_scheduler = [
    dict(type="LinearLR", start_factor=0.01, begin=0, end=100, by_epoch=False),
    dict(type="PolyLR", eta_min=0.0, power=0.9, begin=100, end=1000, by_epoch=False),
]
train_cfg = dict(type="IterBasedTrainLoop", max_iters=1000, val_interval=250)
val_cfg = dict(type="ValLoop")
test_cfg = dict(type="TestLoop")
default_hooks = dict(
    timer=dict(type="IterTimerHook"),
    logger=dict(type="LoggerHook", interval=50, log_metric_by_epoch=False),
    param_scheduler=dict(type="ParamSchedulerHook"),
    checkpoint=dict(type="CheckpointHook", by_epoch=False, interval=250, max_keep_ckpts=1),
    sampler_seed=dict(type="DistSamplerSeedHook"),
    visualization=dict(type="SegVisualizationHook"),
)
env_cfg = dict(
    cudnn_benchmark=True,
    mp_cfg=dict(mp_start_method="fork", opencv_num_threads=0),
    dist_cfg=dict(backend="nccl"),
)
vis_backends = [dict(type="LocalVisBackend")]
visualizer = dict(type="SegLocalVisualizer", vis_backends=vis_backends, name="visualizer")
log_processor = dict(by_epoch=False)
log_level = "INFO"
load_from = None
resume = False
