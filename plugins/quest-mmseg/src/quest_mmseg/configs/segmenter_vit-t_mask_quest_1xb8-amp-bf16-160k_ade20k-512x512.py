_base_ = "./segmenter_vit-t_mask_quest_1xb8-160k_ade20k-512x512.py"

optim_wrapper = dict(type="AmpOptimWrapper", dtype="bfloat16", loss_scale=1.0)
