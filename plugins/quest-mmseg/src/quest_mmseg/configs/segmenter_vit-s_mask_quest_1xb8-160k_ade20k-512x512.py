_base_ = "./segmenter_vit-s_mask_standard_1xb8-160k_ade20k-512x512.py"

model = dict(attention="quest")  # the weights to start from: model.pretrained=deit_small_quest.pth
# Queries that start at norm 12, if no weights are loaded; the default, null, is the paper's:
# model = dict(attention="quest(init=12)")
