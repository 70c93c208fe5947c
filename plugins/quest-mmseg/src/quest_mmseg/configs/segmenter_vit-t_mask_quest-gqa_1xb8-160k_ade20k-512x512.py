_base_ = "./segmenter_vit-t_mask_standard_1xb8-160k_ade20k-512x512.py"

# One key/value head for three query heads; weights with three are pooled on load.
model = dict(attention="quest+gqa(kv_heads=1)")
# Queries that start at norm 12, if no weights are loaded; the default, null, is the paper's:
# model = dict(attention="quest+gqa(kv_heads=1, init=12)")
