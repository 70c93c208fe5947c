_base_ = "./segmenter_vit-t_mask_standard_1xb8-160k_ade20k-512x512.py"

model = dict(attention="elliptical")  # the weights to start from: model.pretrained=deit_tiny_elliptical.pth
