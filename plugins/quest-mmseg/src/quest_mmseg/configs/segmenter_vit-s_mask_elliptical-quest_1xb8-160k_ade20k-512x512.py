_base_ = "./segmenter_vit-s_mask_standard_1xb8-160k_ade20k-512x512.py"

model = dict(
    attention="elliptical-quest"
)  # the weights to start from: model.pretrained=deit_small_elliptical-quest.pth
