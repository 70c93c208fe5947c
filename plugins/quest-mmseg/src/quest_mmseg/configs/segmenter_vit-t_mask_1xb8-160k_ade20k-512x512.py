# Segmenter (ICCV 2021) with ViT-T/16 on ADE20K, as the QUEST paper trains it: 160k iterations, batch 8, SGD 1e-3, poly.
# A path, for mmengine looks mmseg:: up under the name mmsegmentation, which its maintained fork does not have.
_base_ = __import__("mmseg").__path__[0] + "/.mim/configs/segmenter/segmenter_vit-t_mask_8xb1-160k_ade20k-512x512.py"
custom_imports = dict(imports=["quest_mmseg"], allow_failed_imports=False)

# Another attention: --cfg-options model.attention=standard. Half precision: --amp.
# The paper starts from DeiT weights that were trained with the same attention. Convert them with mmseg's
# tools/model_converters/vit2mmseg.py, then: --cfg-options model.pretrained=deit_tiny_quest.pth
# DeiT expects ImageNet's mean and deviation, and has a bias in its patch embedding, which mmseg leaves out by default.
data_preprocessor = dict(mean=[123.675, 116.28, 103.53], std=[58.395, 57.12, 57.375])
model = dict(
    type="quest_mmseg.EncoderDecoder",
    attention="quest",
    # Queries that start at norm 12, if no weights are loaded; the default, null, is the paper's:
    # attention="quest(init=12)",
    pretrained=None,
    data_preprocessor=data_preprocessor,
    backbone=dict(patch_bias=True),
)
# 8 images an iteration over all processes. torchrun sets WORLD_SIZE; under Slurm mmengine sets it later.
slurm = "--launcher slurm" in " ".join(__import__("sys").argv).replace("=", " ")
processes = int(__import__("os").environ.get("SLURM_NTASKS" if slurm else "WORLD_SIZE", 1))
if 8 % processes:
    raise ValueError(f"8 images an iteration cannot be divided among {processes} processes; start 1, 2, 4 or 8")
train_dataloader = dict(batch_size=8 // processes)
