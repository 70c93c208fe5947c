_base_ = ["./semseg-pt-v3m1-0-base.py"]
custom_imports = dict(imports=["quest_pointcept"], allow_failed_imports=False)
model = dict(backbone=dict(attention=dict(name="quest", kv_heads=2)))
# Queries that start at norm 12; the default, null, is the paper's:
# model = dict(backbone=dict(attention=dict(name="quest", kv_heads=2, init=12)))
