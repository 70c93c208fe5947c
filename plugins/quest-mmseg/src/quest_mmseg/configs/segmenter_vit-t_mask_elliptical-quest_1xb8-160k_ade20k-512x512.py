_base_ = "./segmenter_vit-t_mask_standard_1xb8-160k_ade20k-512x512.py"

model = dict(attention="elliptical-quest")  # the weights to start from: model.pretrained=deit_tiny_elliptical-quest.pth
# Queries that start at norm 12, if no weights are loaded; the default, null, is the paper's:
# model = dict(attention="elliptical-quest(init=12)")
