"""Mask2Former, MaskFormer (mmdetection's decoders) and SAN, in mmseg's own configs made small."""

import copy
from pathlib import Path

import mmseg
import pytest
import torch
from conftest import sample
from mmengine.config import Config
from mmseg.registry import MODELS

from quest_core import inject
from quest_core.errors import UnsupportedError

pytestmark = pytest.mark.filterwarnings("ignore")  # of mmseg
CONFIGS = Path(mmseg.__file__).parent / ".mim" / "configs"
SHAPE = (64, 64)


def mask2former():
    config = Config.fromfile(CONFIGS / "mask2former/mask2former_r50_8xb2-160k_ade20k-512x512.py").model
    config.decode_head.pixel_decoder.encoder.num_layers = 1
    config.decode_head.transformer_decoder.num_layers = 3
    return config


def maskformer():
    config = Config.fromfile(CONFIGS / "maskformer/maskformer_r50-d32_8xb2-160k_ade20k-512x512.py").model
    config.decode_head.transformer_decoder.num_layers = 2
    return config


def small(config):
    config.backbone.update(depth=18, init_cfg=None)
    config.data_preprocessor.size = SHAPE
    config.decode_head.update(in_channels=[64, 128, 256, 512], num_classes=5, num_queries=10)
    config.decode_head.loss_cls.class_weight = [1.0] * 5 + [0.1]
    return config


def build(config, attention):
    config = copy.deepcopy(config)
    if attention is not None:
        config.type, config.attention = "quest_mmseg.EncoderDecoder", attention
    torch.manual_seed(0)
    return MODELS.build(config)


def trained(model):
    """The loss of a batch and every gradient."""
    torch.manual_seed(1)
    losses = model.loss(torch.randn(2, 3, *SHAPE), [sample(SHAPE), sample(SHAPE)])
    loss = sum(x for name, x in losses.items() if "loss" in name)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("make", "sites"), [(mask2former, 6), (maskformer, 4)])
def test_decoders_of_mmdetection(make, sites):
    config = small(make())
    want, grads = trained(build(config, None))
    model = build(config, "standard")
    got, ours = trained(model)
    assert got == pytest.approx(want, rel=1e-5)
    torch.testing.assert_close(ours, grads, rtol=1e-3, atol=1e-4)
    assert len(model.attention_report.replacements) >= sites
    for attention in ("quest+gqa(kv_heads=2)", *["elliptical"] * (make is maskformer)):
        other, grads = trained(build(config, attention))
        assert other != pytest.approx(want, rel=1e-5)
        assert all(grad.isfinite().all() for grad in grads.values())


@pytest.mark.parametrize(
    ("attention", "why"),
    [
        ("linear", "hides or weighs single pairs"),
        ("aft-full", "it needs ordered tokens|hides or weighs single pairs"),  # object queries are a set
        ("elliptical", "layers.0.cross_attn.*those of the one before, which differ here"),  # images of three sizes
    ],
)
def test_masks_for_each_query_need_weights(attention, why):
    with pytest.raises(UnsupportedError, match=why):
        build(small(mask2former()), attention)


def san(attention, **recognition):
    config = Config.fromfile(CONFIGS / "san/san-vit-b16_coco-stuff164k-640x640.py").model
    config.pretrained = None
    config.image_encoder.update(embed_dims=48, num_heads=4, num_layers=3, out_indices=(0, 1, 2), img_size=(32, 32))
    words = {"dataset_name": None, "vocabulary": ["a", "b", "c"], "templates": ["a photo of {}"]}
    config.text_encoder.update(**words, embed_dims=16, num_heads=2, num_layers=2, output_dims=24)
    head = config.decode_head
    head.update(num_classes=3, deep_supervision_idxs=[3])
    head.loss_decode[0].class_weight = [1.0] * 3 + [0.1]
    head.san_cfg.update(clip_channels=48, embed_dims=16, num_queries=5)
    head.san_cfg.cfg_encoder.update(num_encode_layer=4, num_heads=2)
    head.san_cfg.cfg_decoder.update(num_heads=4, embed_channels=8, mlp_channels=8)
    head.maskgen_cfg.update(sos_token_num=5, num_layers=1, embed_dims=48, num_heads=4, out_dims=24, **recognition)
    if attention is not None:
        config.type, config.attention = "quest_mmseg.MultimodalEncoderDecoder", attention
    return MODELS.build(config).eval()


def predicted(model):
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        return model.encode_decode(torch.randn(1, 3, *SHAPE), [sample(SHAPE).metainfo])


def test_san_takes_the_one_key():
    """Its image encoder, text encoder, side adapter, and the recognition with masks for each query."""
    model = san("standard")
    assert len(model.attention_report.replacements) == 10
    want = predicted(san(None))
    torch.testing.assert_close(predicted(model), want)
    for attention in ("elliptical", "quest+gqa(kv_heads=2)"):
        found = predicted(san(attention))
        assert found.isfinite().all()
        assert not torch.allclose(found, want)
    with pytest.raises(UnsupportedError, match="text_encoder.* hides or weighs single pairs"):
        san("linear")
    with pytest.raises(UnsupportedError, match="text_encoder.* cannot be causal"):
        san("quest+sinkhorn")
    with pytest.raises(UnsupportedError, match="with cross_attn=True SAN reads the raw weights"):
        san("quest", cross_attn=True)


def test_what_san_masks_is_hidden_completely():
    """SAN adds −100 to the logits of its own tokens, which would be visible to other normalizers than softmax."""
    recognition, _ = inject(san(None).decode_head.rec_with_attnbias, "sinkhorn")
    layer = recognition.layers[0].attentions[0]
    x, mask = torch.randn(9, 1, 48), torch.zeros(4, 9, 9)
    mask[..., :5] = -100
    hidden = mask.masked_fill(mask < 0, -torch.inf)
    assert torch.equal(layer(x, attn_mask=mask), layer(x, attn_mask=hidden))
