# The same with ViT-S/16.
_base_ = "./segmenter_vit-t_mask_1xb8-160k_ade20k-512x512.py"

model = dict(
    backbone=dict(embed_dims=384, num_heads=6),
    decode_head=dict(in_channels=384, channels=384, num_heads=6, embed_dims=384),
)
