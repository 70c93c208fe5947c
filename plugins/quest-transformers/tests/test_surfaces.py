"""What users touch: attn_implementation, config.attention, from_pretrained, save_pretrained, generate, Trainer."""

import functools
import json
import warnings

import pytest
import torch
import transformers as hf
from models import BERT, CAUSAL, CLASSES, CONFIGS, LLAMA, SEQ2SEQ_MODELS, SITES, VIT, build, inputs, sharp

import quest_core
from devtools.wrong import WRONG
from quest_core import AttentionConfig, AttentionMismatchWarning, CheckpointError, ConfigError, Mechanism
from quest_core.errors import InjectionError, UnsupportedError
from quest_transformers import TransformersAdapter
from quest_transformers.choice import Choice
from quest_transformers.configs import parts_of


def mechanisms(model):
    return [module for module in model.modules() if isinstance(module, Mechanism)]


def logits(model, arguments):
    return model(**arguments).logits


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", *SEQ2SEQ_MODELS])
def test_every_door_builds_the_same_model(name, capsys):
    config = CONFIGS[name]()
    kind = CLASSES.get(name, hf.AutoModelForCausalLM)
    arguments = inputs(name)
    torch.manual_seed(0)
    one = kind.from_config(config, attn_implementation="quest").eval()
    assert config.attention is None
    assert capsys.readouterr().err.count("attention=quest in") >= 1
    config.attention = "quest"
    torch.manual_seed(0)
    two = type(one)(config).eval()
    torch.manual_seed(0)
    three = type(one)(type(config)(**{**CONFIGS[name]().to_dict(), "attention": "quest"})).eval()
    four = build(name).eval()
    four.set_attn_implementation("quest")
    five = quest_core.inject(build(name).eval(), "quest")[0]
    for model in (one, two, three, four, five):
        assert model.config.attention == "quest"
        assert model.base_model.config is model.config
        assert [str(mechanism.config) for mechanism in mechanisms(model)] == ["quest"] * SITES.get(name, 2)
        assert len(model.attention_report.replacements) == SITES.get(name, 2)
        torch.testing.assert_close(logits(model, arguments), logits(one, arguments))
    assert not torch.allclose(logits(one, arguments), logits(build(name).eval(), arguments), atol=1e-5)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_standard_equals_the_host(name, implementation, padded):
    """Bit for bit, in outputs and gradients, of real tokens."""
    arguments = inputs(name, padded)
    results = []
    for attention in (None, "standard"):
        model = build(name, attn_implementation=implementation)
        if attention is not None:
            model.set_attn_implementation(attention)
        model.eval()
        out = logits(model, arguments)
        if padded and name in CAUSAL:
            out = out[arguments["attention_mask"].bool()]
        out.square().sum().backward()
        results.append((out, {n: p.grad for n, p in model.named_parameters()}))
    (want, theirs), (got, ours) = results
    assert torch.equal(got, want)
    assert theirs.keys() == ours.keys()
    for parameter, grad in theirs.items():
        assert grad is None or torch.equal(ours[parameter], grad)


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "attention"),
    [("vit", "quest"), ("gpt2", "qknorm"), ("mistral", "qknorm-hs+sigmoid+gqa(kv_heads=1)"), ("bart", "qknorm")],
)
def test_save_and_load(name, attention, tmp_path):
    model = build(name, attention=attention).eval()
    with torch.no_grad():
        for mechanism in mechanisms(model):
            for parameter in mechanism.parameters():
                parameter.add_(0.1)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["attn_implementation"] == attention
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert again.config.attention == attention
    arguments = inputs(name)
    torch.testing.assert_close(logits(again, arguments), logits(model, arguments))
    again.save_pretrained(tmp_path / "again")
    assert type(model).from_pretrained(tmp_path / "again").config.attention == attention


@pytest.mark.parametrize("options", [{}, {"dtype": torch.bfloat16}, {"device_map": "cpu"}, {"device_map": {"": "cpu"}}])
def test_ways_to_load(options, tmp_path):
    model = build("llama", attention="qknorm-hs").eval()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    again = hf.AutoModelForCausalLM.from_pretrained(tmp_path, **options)
    assert not any(x.is_meta for x in (*again.parameters(), *again.buffers()))
    dtype = options.get("dtype", torch.float32)
    assert {x.dtype for x in again.parameters()} == {dtype}
    tolerance = 0.1 if dtype == torch.bfloat16 else 1e-6
    arguments = inputs("llama")
    found = logits(again, arguments).float()
    torch.testing.assert_close(found, logits(model, arguments), rtol=tolerance, atol=tolerance)


def test_weights_of_a_base_model_load_into_one_with_a_head(tmp_path):
    build("bert", attention="quest").bert.save_pretrained(tmp_path)
    assert hf.BertForMaskedLM.from_pretrained(tmp_path).config.attention == "quest"


def test_stock_weights_warn_once_and_mechanisms_are_initialized(tmp_path):
    build("llama").save_pretrained(tmp_path)
    with pytest.warns(AttentionMismatchWarning) as caught:
        model = hf.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="qknorm")
    assert len(caught) == 1
    for mechanism in mechanisms(model):
        torch.testing.assert_close(mechanism.score.query_scale, torch.full((4, 8), 8**0.25))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hf.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="qknorm", attention_from="standard")


@pytest.mark.parametrize("attention", ["quest", "qknorm", "quest+gqa(kv_heads=1)"])
def test_weights_on_disk_are_not_converted(attention, tmp_path):
    build("llama").save_pretrained(tmp_path)
    kept = ("model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head")
    options = {"attn_implementation": attention, "attention_from": "standard"}
    places = dict.fromkeys(kept, "cpu") | {"model.layers.1": "disk"}
    offload = {"device_map": places, "offload_folder": tmp_path / "disk"}
    with pytest.raises(UnsupportedError, match="'model.layers.1.self_attn' is offloaded to disk"):
        hf.AutoModelForCausalLM.from_pretrained(tmp_path, **options, **offload)
    hf.AutoModelForCausalLM.from_pretrained(tmp_path, **options).save_pretrained(tmp_path)
    if attention == "qknorm":
        with pytest.raises(UnsupportedError, match="is not read back"):
            hf.AutoModelForCausalLM.from_pretrained(tmp_path, **offload)
        assert hf.AutoModelForCausalLM.from_pretrained(tmp_path, device_map="meta").device.type == "meta"
        return
    models = (hf.AutoModelForCausalLM.from_pretrained(tmp_path, **more) for more in (offload, {}))
    arguments = inputs("llama")
    torch.testing.assert_close(*(logits(model, arguments) for model in models))


def test_key_heads_of_the_host_become_fewer_and_not_more():
    fewer = build("llama", attention="quest+gqa(kv_heads=1)")
    assert fewer.model.layers[0].self_attn.num_key_value_groups == 4
    with pytest.raises(UnsupportedError, match="its 2 key/value heads cannot be reduced to 4"):
        build("llama", attention="quest+gqa(kv_heads=4)")
    config = hf.MixtralConfig(**LLAMA, num_local_experts=2, num_experts_per_tok=1)
    model = hf.AutoModelForCausalLM.from_config(config, attn_implementation="quest+gqa(kv_heads=1)")
    assert logits(model, {"input_ids": torch.randint(3, 50, (2, 7))}).isfinite().all()


# --- encoder and decoder apart ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SEQ2SEQ_MODELS)
def test_encoder_decoder_and_cross_attention_are_chosen_apart(name, tmp_path):
    chosen = {"encoder": "quest", "decoder": "standard", "cross": "qknorm-hs"}
    model = build(name, attention=chosen).eval()
    found = {}
    for site in TransformersAdapter().sites(model):
        role = "encoder" if "encoder." in site.path and "decoder." not in site.path else "decoder"
        role = "cross" if "encoder_attn" in site.path or "EncDec" in site.path else role
        found.setdefault(role, set()).add(str(site.module.mechanism.config))
    assert found == {role: {attention} for role, attention in chosen.items()}
    assert len(model.attention_report.replacements) == 6
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert again.config.attention == str(Choice.parse(chosen))
    arguments = inputs(name)
    torch.testing.assert_close(logits(again, arguments), logits(model, arguments))
    swapped = {"encoder": "standard", "decoder": "quest", "cross": "qknorm-hs"}
    with pytest.raises(CheckpointError):
        type(model).from_pretrained(tmp_path, attn_implementation=swapped)


def clip():
    text, vision = {**BERT, "bos_token_id": 1, "eos_token_id": 2}, {**VIT, "intermediate_size": 48}
    return hf.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)


def pair():
    return {"input_ids": torch.randint(3, 50, (2, 7)), "pixel_values": torch.randn(2, 3, 8, 8)}


@pytest.mark.parametrize(
    ("chosen", "found"),
    [
        ("quest", ("quest", "quest", "quest")),
        ({"vision_config": "quest"}, (None, "quest", None)),
        ({"vision_config": "quest", "text_config": "sigmoid"}, (None, "quest", "sigmoid")),
    ],
)
def test_the_parts_of_a_composite_model_have_configs_of_their_own(chosen, found, tmp_path):
    model = hf.AutoModel.from_config(clip(), attn_implementation=chosen).eval()
    late = hf.CLIPModel(clip()).eval()
    late.set_attn_implementation(chosen)
    late.load_state_dict(model.state_dict())
    model.save_pretrained(tmp_path)
    late.save_pretrained(tmp_path / "late")
    arguments = pair()
    saved = (hf.AutoModel.from_pretrained(path) for path in (tmp_path, tmp_path / "late"))
    for each in (model, late, *saved):
        configs = (each.config, each.config.vision_config, each.config.text_config)
        assert tuple(config.attention for config in configs) == found
        assert each.vision_model.config is each.config.vision_config
        torch.testing.assert_close(each(**arguments).logits_per_image, model(**arguments).logits_per_image)


def test_a_whole_that_asks_and_a_part_that_does_not_are_refused():
    with pytest.raises(InjectionError, match="the configs of 2 modules ask for none: text_model.encoder"):
        hf.CLIPModel._from_config(clip(), attn_implementation={"": "quest", "vision_config": "sigmoid"})


def test_a_part_of_a_model_at_hand_can_be_replaced_apart():
    config = clip()
    model, other = hf.CLIPModel(config), hf.CLIPModel(config)
    model.set_attn_implementation({"vision_config": {"": "quest"}, "text_config": "eager"})
    assert model.config.text_config._attn_implementation == "eager"
    said = str(model.attention_report)
    assert "; kernel=sdpa; not replaced (no attention was chosen for it): text_model.encoder.layers.0.self_attn" in said
    model.set_attn_implementation({"text_config": "sigmoid"})
    assert [model.config.vision_config.attention, model.config.text_config.attention] == ["quest", "sigmoid"]
    assert not any(mechanisms(other))
    assert config.vision_config.attention is None
    model.set_attn_implementation({"vision_config": "eager"})  # the host's function, called with unit keys
    assert (model.config.vision_config.attention, model.config.vision_config._attn_implementation) == ("quest", "eager")
    kernels = {row.path.partition("_")[0]: row.kernel for row in model.attention_report.replacements}
    assert kernels == {"text": "written out", "vision": "eager"}
    with pytest.raises(UnsupportedError, match="'sigmoid'.* takes the place .* build the model again"):
        model.set_attn_implementation({"text_config": "sdpa"})
    with pytest.raises(InjectionError, match="no module of this part of CLIPModel"):
        other.set_attn_implementation({"": "quest"})


@pytest.mark.parametrize("bad", ["nonsense", "flash_attention_2"])
def test_a_name_that_the_host_refuses_leaves_the_other_parts_as_they_were(bad):
    model = hf.CLIPModel(clip()).eval()
    arguments = pair()
    before, keys = model(**arguments).logits_per_image, set(model.state_dict())
    with pytest.raises((ConfigError, ImportError)):
        model.set_attn_implementation({"text_config": "quest", "vision_config": bad})
    assert set(model.state_dict()) == keys
    assert model.config.text_config.attention is None
    assert model.config.vision_config._attn_implementation == "sdpa"
    torch.testing.assert_close(model(**arguments).logits_per_image, before)


def test_a_host_that_says_causal_is_believed_under_a_compiler():
    """A compiler cannot read from a mask of padding that it hides the future too."""
    model = hf.CLIPTextModel._from_config(clip().text_config, attn_implementation="quest+sinkhorn").eval()
    mask = torch.tensor([[0, 1, 1, 1]])
    with pytest.raises(UnsupportedError, match="sinkhorn"):
        torch.compile(model, backend="eager")(torch.tensor([[3, 4, 5, 6]]), attention_mask=mask)


@pytest.mark.parametrize("attention", ["quest+sinkhorn", "quest+pgqa(kv_heads=2)"])
@pytest.mark.parametrize("name", SEQ2SEQ_MODELS)
def test_queries_of_a_decoder_do_not_meet_when_they_attend_across(name, attention):
    with pytest.raises(UnsupportedError, match="cannot be causal"):
        build(name).set_attn_implementation({"encoder": attention, "decoder": "quest", "cross": attention})


SEQUENCES = [
    ("quest", "standard", "sdpa", "eager"),
    ("quest", "quest(scale=2)", "eager", "standard"),
    ("sigmoid", "quest", "quest+sigmoid", "standard", "eager"),
    ("quest", "sdpa", "quest(scale=2)", "standard", "sdpa"),
]


@pytest.mark.parametrize("sequence", SEQUENCES, ids="-".join)
@pytest.mark.parametrize("name", ["llama", "clip"])
def test_every_module_has_the_config_of_its_model_after_any_changes(name, sequence):
    config = CONFIGS["llama"]() if name == "llama" else clip()
    kind = hf.LlamaForCausalLM if name == "llama" else hf.CLIPModel
    model, other = kind(config).eval(), kind(config).eval()
    arguments = pair() if name == "clip" else inputs("llama")
    before = {path: vars(module).get("config") for path, module in model.named_modules()}
    wanted, function = model(**arguments)[0], config._attn_implementation

    def check_configs(owner):
        parts = {id(part) for part in parts_of(owner.config)}
        modules = [module for module in owner.modules() if isinstance(vars(module).get("config"), hf.PretrainedConfig)]
        assert {id(module.config) for module in modules} == parts
        assert {module.config._attn_implementation for module in modules} == {owner.config._attn_implementation}

    for attention in sequence:
        model.set_attn_implementation(attention)
        check_configs(model)
    torch.testing.assert_close(model(**arguments)[0], wanted)
    model.set_attn_implementation("quest")
    now, said = model(**arguments)[0], model.config._attn_implementation
    other.set_attn_implementation("quest")
    other.set_attn_implementation("sigmoid")
    other.set_attn_implementation("standard")
    other.set_attn_implementation("eager" if said == "sdpa" else "sdpa")
    check_configs(other)
    assert (model.config.attention, model.config._attn_implementation) == ("quest", said)
    assert torch.equal(model(**arguments)[0], now)
    quest_core.uninject(model)
    assert all(vars(module).get("config") is before[path] for path, module in model.named_modules())
    assert config._attn_implementation == function
    torch.testing.assert_close(model(**arguments)[0], wanted)


@pytest.mark.parametrize("attention", ["quest", "sigmoid", {"vision_config": "quest"}])
@pytest.mark.parametrize("loads", [False, True])
def test_a_model_that_was_built_with_an_attention_is_stock_after_uninject(attention, loads, tmp_path):
    config = clip()
    config._attn_implementation = attention
    twin = hf.CLIPModel(config).eval()
    twin.save_pretrained(tmp_path)
    model = (hf.CLIPModel.from_pretrained(tmp_path) if loads else hf.CLIPModel(config)).eval()
    stock = hf.CLIPModel(clip()).eval()
    arguments = pair()
    said, before = [part.attention for part in parts_of(config)], twin(**arguments)[0]
    quest_core.uninject(model)
    stock.load_state_dict(model.state_dict())
    model.save_pretrained(tmp_path / "stock")
    for each in (model, hf.CLIPModel.from_pretrained(tmp_path / "stock")):
        assert not any(mechanisms(each))
        torch.testing.assert_close(each(**arguments)[0], stock(**arguments)[0])
        parts = {id(part) for part in parts_of(each.config)}
        assert all(id(module.config) in parts for module in each.modules() if hasattr(module, "config"))
        for part in parts_of(each.config):
            assert (part.attention, part._attn_implementation) == (None, stock.config._attn_implementation)
    assert "attn_implementation" not in (tmp_path / "stock" / "config.json").read_text()
    assert [part.attention for part in parts_of(config)] == said  # other models may be built from it
    assert torch.equal(twin(**arguments)[0], before)


@pytest.mark.parametrize(
    ("chosen", "found"), [("quest", "quest"), ({"vision_config": "quest"}, "quest"), ({"text_config": "quest"}, None)]
)
def test_a_part_of_a_composite_model_loads_from_its_checkpoint(chosen, found, tmp_path):
    model = hf.AutoModel.from_config(clip(), attn_implementation=chosen).eval()
    model.save_pretrained(tmp_path)
    part = hf.CLIPVisionModel.from_pretrained(tmp_path)
    assert part.config.attention == found
    pixels = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(part(pixels).pooler_output, model.vision_model(pixels).pooler_output)
    if found:
        with pytest.raises(CheckpointError, match="trained with attention 'quest', and the model has the host's own"):
            hf.CLIPVisionModel.from_pretrained(tmp_path, attn_implementation="sdpa")


OWN_LAYERS = {
    "OPT": {**BERT, "ffn_dim": 48, "word_embed_proj_dim": 32},  # as many key heads as query heads, whatever the layer
    "GPTNeoX": BERT,  # one layer makes q, k and v
    "Phi3": {**LLAMA, "pad_token_id": 0},
}


@pytest.mark.parametrize("name", OWN_LAYERS)
def test_fewer_key_heads_of_other_layers_are_refused(name):
    config = getattr(hf, f"{name}Config")(**OWN_LAYERS[name])
    with pytest.raises(UnsupportedError, match="the host's projections cannot change their shape"):
        hf.AutoModelForCausalLM.from_config(config, attn_implementation="quest+gqa(kv_heads=1)")


HERE = [
    ({"attention": "quest_core"}, "did you mean 'quest'"),
    ({"attention": "Quest"}, "did you mean 'quest'"),
    ({"attention": {"name": "qest"}}, "did you mean 'quest'"),
    ({"attention": {"nme": "quest"}}, "'nme' is not a part of LlamaConfig"),
    ({"attention": {"encodr": "quest"}}, "'encodr' is not a part of LlamaConfig; did you mean 'encoder'"),
    ({"attention": {"vision_config": "quest"}}, "'vision_config' is not a part of LlamaConfig"),
    ({"attention": {"decoder": "quest"}}, "lacks encoder, cross"),
    ({"attention": {"encoder": "qwest", "decoder": "quest", "cross": "quest"}}, "did you mean 'quest'"),
    ({"attention": "encoder=quest;decoder=quest"}, "lacks cross"),
    ({"attention": "quest", "allow_partial": "yes"}, "allow_partial is 'yes'; write True or False"),
    ({"attention": "quest", "attention_from": "standrad"}, "did you mean 'standard'"),
    ({"attention": "quest(scale=-1)"}, "option 'scale' is -1"),
    ({"attention": "encoder:quest"}, "cannot be read"),
    ({"attention_from": "quest"}, "neither attn_implementation nor the checkpoint names an attention"),
]
OWN_WORDS = ("cannot be read", "has no 'name'", "allow_partial", "attention_from")
"""Parts of rows that transformers refuses in its own words, that mean no part of a config, or that `HERE` has."""
WRONG_HERE = [*(pair for pair in WRONG if not any(word in f"{pair}" for word in OWN_WORDS)), *HERE]


@pytest.mark.parametrize(("options", "said"), WRONG_HERE, ids=str)
def test_a_wrong_option_is_one_error(options, said, tmp_path):
    build("llama").save_pretrained(tmp_path)
    given = {"attn_implementation" if key == "attention" else key: value for key, value in options.items()}
    with pytest.raises(ConfigError, match=said):
        hf.AutoModelForCausalLM.from_pretrained(tmp_path, **given)
    if "attention_from" not in given:  # an option of from_pretrained
        with pytest.raises(ConfigError, match=said):
            hf.AutoModelForCausalLM.from_config(CONFIGS["llama"](), **given)
    if [*given] == ["attn_implementation"]:
        with pytest.raises(ConfigError, match=said):
            build("llama").set_attn_implementation(*given.values())


@pytest.mark.parametrize("name", ["flash_attention_2", "flex_attention", "sdpa"])
@pytest.mark.parametrize("attention", ["stock", "late", "quest"])
def test_a_function_that_a_model_does_not_support_is_the_hosts_own_error(name, attention, monkeypatch):
    for can in ("_supports_sdpa", "_supports_flash_attn", "_supports_flex_attn"):
        monkeypatch.setattr(hf.LlamaForCausalLM, can, False)
    if attention == "stock":
        ask = functools.partial(hf.LlamaForCausalLM._from_config, CONFIGS["llama"](), attn_implementation=name)
    else:
        model = build("llama", attention="quest" if attention == "quest" else None)
        ask = functools.partial(model.set_attn_implementation, name)
    with pytest.raises((ValueError, ImportError)) as caught:
        ask()
    assert not isinstance(caught.value, quest_core.QuestError)
    assert "mechanism" not in str(caught.value)


GIVEN = [{"name": "quest"}, {"name": "quest+gqa", "kv_heads": 1}, {"": "quest"}, "quest+softmax"]


@pytest.mark.parametrize("given", GIVEN, ids=str)
def test_a_text_and_a_mapping_are_an_attention_everywhere(given, tmp_path):
    build("llama").save_pretrained(tmp_path)
    want = str(AttentionConfig.parse(given.get("", given) if isinstance(given, dict) else given))
    model = hf.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=given, attention_from="standard")
    fresh, late = build("llama", attention=given), build("llama")
    late.set_attn_implementation(given)
    config = hf.AutoConfig.from_pretrained(tmp_path, attn_implementation=given)
    own = CONFIGS["llama"]()
    own.attn_implementation = given
    assert [each.attention for each in (model.config, fresh.config, late.config, config, own)] == [want] * 5
    own.attn_implementation = "sdpa"
    assert (own.attention, own._attn_implementation) == (None, "sdpa")


# --- generation -------------------------------------------------------------------------------------------------------

GENERATE = {"greedy": {}, "beams": {"num_beams": 3}, "static": {"cache_implementation": "static"}}
GENERATED = ("standard", "quest", "qknorm-hs", "quest+sigmoid", "elliptical-quest")


@pytest.mark.parametrize(
    ("name", "way", "attention"),
    [
        (name, [*GENERATE][(i + j) % len(GENERATE)], attention)
        for i, name in enumerate((*CAUSAL, *SEQ2SEQ_MODELS))
        for j, attention in enumerate(GENERATED)
        if (i + j) % 2 == 0 or attention == "quest"
    ],
)
def test_generation_with_a_cache_equals_generation_without(name, way, attention):
    model = sharp(build(name, attention=attention))
    arguments = {k: v for k, v in inputs(name, padded=True).items() if k in ("input_ids", "attention_mask")}
    common = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": 2}
    want = model.generate(**arguments, **common, **{**GENERATE[way], "cache_implementation": None}, use_cache=False)
    got = model.generate(**arguments, **common, **GENERATE[way])
    assert torch.equal(got, want)


def test_what_looks_at_all_tokens_is_refused_where_a_mask_hides_some():
    config = {**LLAMA, "attention_dropout": 0.0}
    windowed = hf.MistralConfig(**{**config, "num_key_value_heads": 4}, sliding_window=4)
    with pytest.raises(UnsupportedError, match="sliding window of 4"):
        hf.AutoModelForCausalLM.from_config(windowed, attn_implementation="linear")
    some = hf.Qwen2Config(**config, use_sliding_window=True, sliding_window=4, max_window_layers=1)
    if getattr(some, "layer_types", None):
        with pytest.raises(UnsupportedError, match="compares the tokens of one layer with those of the next"):
            hf.AutoModelForCausalLM.from_config(some, attn_implementation="elliptical-quest")
    for attention, why in (
        ("linear", "needs a key/value head for each of the 4 query heads, and has 2"),
        ("aft-simple", "its queries do not meet keys, where rotary positions act"),
    ):
        with pytest.raises(UnsupportedError, match=why):
            hf.AutoModelForCausalLM.from_config(hf.LlamaConfig(**config), attn_implementation=attention)
