_base_ = ["./semseg-pt-v3m2-0-sonata-scratch.py"]
custom_imports = dict(imports=["quest_pointcept"], allow_failed_imports=False)
model = dict(backbone=dict(attention="quest"))
