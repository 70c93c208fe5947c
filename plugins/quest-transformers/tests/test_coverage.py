"""Models that people try first work, are saved and loaded, or are an error that says why; docs/coverage.csv is true."""

import contextlib
import copy
import datetime
import importlib.util
import random
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import quest_core
from quest_core.errors import UnsupportedError
from quest_transformers.inputs import inputs

spec = importlib.util.spec_from_file_location("docs_coverage", Path(__file__).parents[3] / "docs" / "coverage.py")
coverage = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(coverage)

FIRST = {  # model type -> the ways of its modules, or the words of the error
    "bloom": "written out 2",
    "deberta-v2": "written out 4",
    "falcon": "universal 4",
    "gemma2": "transformers 4",
    "gemma3": "torch 1, transformers 8",
    "gpt_oss": "transformers 4",
    "idefics": "transformers 12",
    "inkling2_text": "transformers 4",
    "jamba": "transformers 2",
    "mimo_v2_flash": "transformers 4",
    "mpt": "written out 4",
    "qwen3_5": "transformers 5",
    "qwen3_next": "transformers 1",
    "rf_detr": "transformers 4, universal 2",
    "sam": "transformers 7, universal 4",
    "sam2": "transformers 7, universal 12",
    "siglip": "torch 1, transformers 8",
    "swinv2": "it is cosine attention",
    "wavlm": "universal 4",
}


def needs(model_type):
    if model_type not in hf.CONFIG_MAPPING:
        pytest.skip(f"transformers {hf.__version__} has no {model_type}")


def built(config, attention=None):
    torch.manual_seed(0)
    options = {} if attention is None else {"attn_implementation": attention}
    return hf.AutoModel.from_config(config, **options).eval()


def outputs(model, train=False):
    """Return the tensors of a run on inputs of the plugin's own; none where the whole model does not run on them."""
    for number in range(2):  # the main input only, or several
        hf.set_seed(0)  # also of numpy, with which hosts mask spectra
        with torch.set_grad_enabled(train), contextlib.suppress(Exception):
            made = inputs(model, model.config, number, torch.Generator().manual_seed(1))
            return [x for x in model.train(train)(**made).to_tuple() if isinstance(x, torch.Tensor)]
    return []


def training(model):
    """Return the outputs of a training step with dropout, and the gradients."""
    found = outputs(model, train=True)
    if losses := [x.double().square().mean() for x in found if x.requires_grad]:
        sum(losses).backward()
    model.eval()
    return found + [p.grad for p in model.parameters() if p.grad is not None]


def by_hand(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **options):
    """QUEST in float64."""
    if options.get("s_aux") is not None or options.get("softcap") or scaling == 1:
        raise NotImplementedError  # sdpa has no sinks and no soft cap; or the host has scaled its queries before
    q, k, v = query.double(), F.normalize(key.double(), dim=-1), value.double()
    mask = attention_mask.to(q) if attention_mask is not None and attention_mask.dtype != torch.bool else attention_mask
    if not hasattr(module, "is_causal"):  # sdpa takes it for a decoder, which would hold its place among the layers
        options = {"is_causal": hasattr(module, "layer_idx"), **options}
    out, weights = ALL_ATTENTION_FUNCTIONS["sdpa"](module, q, k, v, mask, dropout=dropout, scaling=1.0, **options)
    return out.to(query.dtype), weights


ALL_ATTENTION_FUNCTIONS.register("by_hand", by_hand)
ALL_MASK_ATTENTION_FUNCTIONS.register("by_hand", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


def check(config, tmp_path):
    """Test a model of a config; return what `judge` says of it, and whether it ran and was computed by hand."""
    models = []
    made = coverage.judge(lambda: models.append(built(config, "quest")) or models[0])
    if made["outcome"] != "taken":
        return made, False, False
    stock, (quest,) = built(config), models
    want, got = outputs(stock), outputs(quest)
    exactly = {"rtol": 0, "atol": 0, "equal_nan": True}
    as_stock = {} if "torch" in made["ways"] else exactly  # nn.MultiheadAttention scales before the product
    standard = built(config, "standard")
    torch.testing.assert_close(outputs(standard), want, **as_stock)
    torch.testing.assert_close(training(standard), training(stock), **as_stock)
    truth = outputs(built(config, "by_hand")) if set(made["ways"].split()[::2]) == {"transformers"} else []
    if truth:
        torch.testing.assert_close(got, truth, rtol=1e-5, atol=1e-5, equal_nan=True)  # all layers round to float32
        exact = [outputs(built(config, attention).double()) for attention in ("quest", "by_hand")]
        if all(exact):  # some models run only in float32
            torch.testing.assert_close(*exact, rtol=1e-6, atol=1e-6, equal_nan=True)
    quest.save_pretrained(tmp_path)
    again = hf.AutoModel.from_pretrained(tmp_path).eval()
    assert again.config.attention == "quest"
    assert coverage.judge(lambda: again) == made
    stock.save_pretrained(tmp_path / "stock")
    loaded = outputs(hf.AutoModel.from_pretrained(tmp_path / "stock").eval())
    exact = all(torch.equal(one.nan_to_num(), two.nan_to_num()) for one, two in zip(loaded, want, strict=True))
    as_loaded = exactly if exact else {"rtol": 1e-5, "atol": 3e-6, "equal_nan": True}  # hy_v4 is not, by itself
    torch.testing.assert_close(outputs(again), got, **as_loaded)
    pairs = zip(got, want, strict=True)  # of other lengths in vits, whose attention predicts durations
    moved = any(one.shape != other.shape or not torch.allclose(one, other, atol=1e-6) for one, other in pairs)
    return made, moved, bool(truth)


# The slow ones are large, or what they do is in another model and in OWN of test_architectures.py.
SLOW = {"gemma2", "gemma3", "gpt_oss", "idefics", "qwen3_5", "sam", "sam2"}


@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in FIRST]
)
def test_models_that_people_try_first(model_type, tmp_path):
    needs(model_type)
    config, _ = next(coverage.configs(model_type))
    made, moved, _ = check(config, tmp_path)
    if made["outcome"] != "taken":
        assert FIRST[model_type] in made["reason"]
        return
    assert made["ways"] == FIRST[model_type]
    assert moved or not outputs(built(config))


def test_grounding_dino_keeps_its_fusion_if_that_is_asked_for():
    """It takes one softmax over texts and one over images of the same logits."""
    needs("grounding-dino")
    config, _ = next(coverage.configs("grounding-dino"))
    with pytest.raises(UnsupportedError, match=r"two softmaxes share one product; say allow_partial=True"):
        built(config, "quest")
    report = hf.AutoModel.from_config(config, attn_implementation="quest", allow_partial=True).attention_report
    assert len(report.replacements) == 22
    assert {f"encoder.layers.{layer}.fusion_layer.attn" for layer in (0, 1)} <= {*report.left_alone}


def test_a_detector_whose_file_has_other_names_is_saved_and_loaded(tmp_path):
    """RF-DETR chooses queries among the places of an image, and its files say transformer.decoder for model.decoder."""
    needs("rf_detr")
    stages = ("stage_names", "out_features", "_out_features", "_out_indices")
    backbone = {k: v for k, v in hf.RfDetrConfig().backbone_config.to_dict().items() if k not in stages}
    backbone |= {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "out_indices": [2, 4]}
    heads = {"decoder_self_attention_heads": 2, "decoder_cross_attention_heads": 2}
    sizes = {"d_model": 32, "decoder_layers": 2, "decoder_ffn_dim": 32, "num_queries": 100, "group_detr": 1}
    config = hf.RfDetrConfig(backbone_config=backbone, **heads, **sizes)
    model = hf.AutoModelForObjectDetection.from_config(config, attn_implementation="qknorm-hs").eval()
    with torch.no_grad():
        for one in model.attention_report.replacements:
            model.get_submodule(one.path).mechanism.score.log_scale.uniform_(0, 3)
    model.save_pretrained(tmp_path)
    images = torch.randn(1, 3, 224, 224)
    again = hf.AutoModelForObjectDetection.from_pretrained(tmp_path).eval()
    assert torch.equal(again(pixel_values=images).logits, model(pixel_values=images).logits)


@pytest.mark.parametrize("model_type", ["lxmert", "neomme", pytest.param("perceiver", marks=pytest.mark.slow)])
def test_models_with_configs_and_inputs_of_their_own(model_type):
    needs(model_type)
    assert coverage.attempt("transformers", model_type).outcome == "taken"


SIZES = {"vocab_size": 99, "num_attention_heads": 4, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
SIZES |= {name: 32 for name in ("hidden_size", "d_model", "intermediate_size", "encoder_ffn_dim", "decoder_ffn_dim")}
SIZES |= {name: 2 for name in ("num_hidden_layers", "encoder_layers", "decoder_layers", "num_random_blocks")}
SPARSE = {  # model type -> sizes of its own, and whether some tokens see all others
    "bigbird_pegasus": ({"block_size": 4}, False),
    "big_bird": ({"block_size": 4}, False),
    "led": ({"attention_window": [8, 8]}, True),
    "longformer": ({"attention_window": [8, 8]}, True),
    "pegasus_x": ({"block_size": 8, "num_global_tokens": 4}, False),
}


def tiny(model_type, **own):
    kind = hf.CONFIG_MAPPING[model_type]
    return kind(**{name: size for name, size in SIZES.items() if hasattr(kind(), name)}, **own)


@pytest.mark.parametrize("model_type", SPARSE)
def test_sparse_attention_has_unit_keys(model_type):
    """Each joins the logits of several products; here the keys of the host's own code have the norm √D before 1/√D."""
    needs(model_type)
    own, sees_all = SPARSE[model_type]
    config = tiny(model_type, **own)
    stock = built(config).double()
    by_hand = copy.deepcopy(stock)
    for name, layer in by_hand.named_modules():
        if name.rpartition(".")[2] in ("key", "key_global", "k_proj"):
            layer.register_forward_hook(
                lambda _, x, out: (F.normalize(out.unflatten(-1, (4, 8)), dim=-1, eps=1e-30) * 8**0.5).flatten(-2)
            )
    batch = {
        "input_ids": torch.randint(5, 99, (2, 64)),
        "attention_mask": (torch.arange(64) < torch.tensor([[64], [50]])).long(),
    }
    if sees_all:
        batch["global_attention_mask"] = (torch.arange(64) % 30 == 0).long().expand(2, -1)
    if config.is_encoder_decoder:
        batch["decoder_input_ids"] = torch.randint(5, 99, (2, 9))

    def run(model):
        hf.set_seed(0)
        return model(**batch)[0]

    standard, _ = quest_core.inject(copy.deepcopy(stock), "standard", example=batch)
    assert torch.equal(run(standard), run(stock))
    quest, _ = quest_core.inject(stock, "quest", example=batch)
    torch.testing.assert_close(run(quest), run(by_hand), rtol=1e-6, atol=1e-6)  # Longformer's softmax is in float32
    assert not torch.allclose(run(quest), run(standard), atol=1e-3)


def test_bigbird_does_not_change_to_the_attention_of_the_host():
    model = built(tiny("big_bird", block_size=4), "quest")
    short, long = (torch.randint(5, 99, (2, tokens)) for tokens in (36, 40))
    wanted = model(long)[0]
    with pytest.raises(UnsupportedError, match=r"host's attention; build the model .* below 37 tokens"):
        model(short)
    assert torch.equal(model(long)[0], wanted)


def test_examples_are_runs_of_the_whole_model():
    """For classification, Longformer lets the first token see all others, which its base model does not."""
    config = tiny("longformer", attention_window=8)
    model = hf.AutoModelForSequenceClassification.from_config(config, attn_implementation="quest")
    assert model(torch.randint(5, 99, (2, 37)), labels=torch.tensor([0, 1])).loss.isfinite()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_sample_of_the_coverage_is_as_its_data_say(tmp_path):
    taken = [row for row in coverage.read().values() if row.package == "transformers" and row.outcome == "taken"]
    rows = [row for row in taken if "timm" not in row.ways]  # which the environment does not have
    moved = counted = 0
    for row in random.Random(datetime.date.today().toordinal()).sample(rows, 60):
        again = coverage.attempt("transformers", row.name)
        if "requires the timm library" in again.reason:
            continue
        assert again == row
        config, size = next(coverage.configs(row.name))
        if size <= coverage.MOST:
            found = check(config, tmp_path / row.name)
            moved, counted = moved + found[1], counted + found[2]
    assert moved >= 30
    assert counted >= 20
