"""Any architecture: equal to the host's own attention, and with a cache as without one; or refused by name."""

import contextlib
import inspect
import random

import pytest
import torch
import transformers as hf
from models import LLAMA
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.bloom.modeling_bloom import BloomAttention
from transformers.models.llama.modeling_llama import ALL_ATTENTION_FUNCTIONS, LlamaAttention, eager_attention_forward

import quest_core
from quest_core.errors import CheckpointError, InjectionError, UnsupportedError
from quest_core.mechanism import has_mechanism

DRAWN = 3
LARGEST = 2_000_000  # parameters
IDS = torch.randint(3, 50, (2, 9), generator=torch.Generator().manual_seed(0))
MLA = {
    **LLAMA,
    **{"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 8, "first_k_dense_replace": 2},
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
}
SIZES = {  # each architecture takes from it what it knows
    **MLA,
    **dict.fromkeys(
        ("num_layers", "n_layer", "decoder_layers", "num_experts", "num_local_experts", "n_routed_experts"), 2
    ),
    **dict.fromkeys(("n_head", "n_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("n_embd", "d_model"), 32),
    **dict.fromkeys(("ffn_dim", "decoder_ffn_dim", "n_positions"), 64),
    **{"num_experts_per_tok": 1, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1},
    **{"head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}


def built(config, attention, kind=hf.AutoModelForCausalLM):
    torch.manual_seed(0)
    model = kind.from_config(config, attn_implementation=attention).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # the weights of a new model are too small to show a difference
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.15)
    return model


def ways(model, ids=IDS):
    """The logits of all tokens without a cache, with one, and in two pieces."""
    with torch.no_grad():
        without, first = model(ids, use_cache=False).logits, model(ids, use_cache=True)
        begun = model(ids[:, :6], use_cache=True)
        rest = model(ids[:, 6:], past_key_values=begun.past_key_values, use_cache=True).logits
    return without, first.logits, torch.cat([begun.logits, rest], 1)


def equal(one, other):
    scale = other.abs().max().item()
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-4, atol=1e-4 * scale)


def stock(name):
    """The host's own model, or None where these sizes make none, or one that has no cache to compare."""
    try:
        config = CONFIG_MAPPING[name](**SIZES)
        with torch.device("meta"):
            size = sum(p.numel() for p in hf.AutoModelForCausalLM.from_config(config).parameters())
        if size > LARGEST:
            return None
        model = built(config, "eager")
        first, *others = ways(model)
    except Exception:  # whatever a config of another architecture raises
        return None
    return (config, first) if all(equal(other, first) for other in others) else None


def check(name):
    """Return what is wrong with an architecture, or None; raises LookupError where `stock` has nothing to compare."""
    found = stock(name)
    if found is None:
        raise LookupError(name)
    config, want = found
    for attention in ("standard", "quest", "quest+sigmoid"):
        try:
            model = built(config, attention)
        except (UnsupportedError, InjectionError):
            continue
        first, *others = ways(model)
        if attention == "standard" and not equal(first, want):
            return f"{name}: standard is {(first - want).abs().max():.2g} away from the host's own"
        from_last_key = attention == "quest+sigmoid" and name == "mpt"  # its bias, so all tokens that follow count
        if not from_last_key and not all(equal(other, first) for other in others):
            return f"{name}: {attention} with a cache is not {attention} without"
    return None


def test_any_architecture_is_right_or_refused(seed):
    names = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    random.Random(seed).shuffle(names)
    wrong, checked = [], []
    for name in names:
        try:
            wrong.append(check(name))
        except LookupError:
            continue
        checked.append(name)
        if len(checked) == DRAWN:
            break
    assert len(checked) == DRAWN
    assert not any(wrong), "\n".join(filter(None, wrong))


# A decoder that does not say that it is causal, scaled queries, one layer for q, k and v, experts, a cache of latents.
@pytest.mark.parametrize("name", ["bigbird_pegasus", "opt", "gpt_neox", "phi3", "mixtral", "deepseek_v2"])
def test_an_architecture_is_right_and_not_refused(name):
    assert check(name) is None
    assert built(CONFIG_MAPPING[name](**SIZES), "quest").attention_report.replacements


@pytest.mark.parametrize("attention", ["standard", "quest"])
def test_layers_that_share_keys_may_get_the_last_queries_only(attention):
    sizes = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 50, "global_head_dim": 8, "head_dim": 8}
    sizes |= {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "sliding_window": 4}
    config = hf.Gemma4TextConfig(**{**LLAMA, **sizes}, layer_types=["sliding_attention", "full_attention"] * 2)
    model = built(config, attention)
    with torch.no_grad():
        want = model(IDS, use_cache=False).logits
        for last in (1, 3):
            for cache in (None, hf.StaticCache(config=model.config, max_cache_len=32)):
                got = model(IDS, logits_to_keep=last, past_key_values=cache).logits
                assert equal(got, want[:, -last:])


SPARSE = {"index_topk": 4, "index_n_heads": 2, "index_head_dim": 8}
EXPERTS = {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1}
KINDS = ["full_attention", "sliding_attention"]
OWN = {  # what only the host's function does, and why other mechanisms than a score are refused
    "GptOssConfig": ({**LLAMA, **EXPERTS, "sliding_window": 4}, "attention sinks"),
    "Gemma2Config": ({**LLAMA, "head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8}, "caps its logits"),
    "DeepseekV32Config": ({**MLA, **SPARSE}, "the host chooses the keys of each query"),
    "GlmMoeDsaConfig": ({**MLA, **SPARSE}, "the host chooses the keys of each query"),
}
OWN = {kind: row for kind, row in OWN.items() if hasattr(hf, kind)}


@pytest.mark.parametrize("kind", [*OWN, "LlamaConfig"])
def test_the_hosts_function_gets_prepared_keys(kind, monkeypatch):
    """In float64, equal to the host's own function with q, k/‖k‖ and the scale 1 written by hand."""
    config = getattr(hf, kind)(**OWN.get(kind, (LLAMA,))[0])
    config._experts_implementation = "eager"
    stock, quest = built(config, "eager").double(), [built(config, "quest").double()]
    try:
        theirs = ways(stock)
    except RuntimeError as error:  # GLM-MoE-DSA of transformers 5.8
        pytest.skip(f"the model of transformers {hf.__version__} does not decode in pieces: {error}")
    if stock._supports_sdpa:
        quest[0].set_attn_implementation("eager")
        if equal(ways(built(config, "sdpa").double())[0], theirs[0]):  # Gemma 2 of transformers 5.8 forgets its cap
            quest.append(built(config, "quest").double())
    for model in quest:
        own = ways(model)
        for one, other in zip(own, theirs, strict=True):  # DeepSeek's depends on the pieces
            assert equal(one, own[0]) == equal(other, theirs[0])
    sites = [site.module for site in quest_core.hosts.plugins.adapter("transformers").sites(stock)]
    spaces = inspect.unwrap(type(sites[0]).forward).__globals__
    function = spaces["eager_attention_forward"]

    def by_hand(module, query, key, value, attention_mask, scaling, **options):
        key = key / key.norm(dim=-1, keepdim=True)
        return function(module, query, key, value, attention_mask, scaling=1.0, **options)

    monkeypatch.setitem(spaces, "eager_attention_forward", by_hand)
    with torch.no_grad():
        want = stock(IDS, use_cache=False).logits
        for model in quest:
            torch.testing.assert_close(model(IDS, use_cache=False).logits, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", OWN)
def test_what_only_the_hosts_function_does_is_refused_where_another_takes_its_place(kind):
    sizes, match = OWN[kind]
    with pytest.raises(UnsupportedError, match=match):
        built(getattr(hf, kind)(**sizes), "quest+sigmoid")


@pytest.mark.parametrize("attention", ["quest", "quest+sigmoid", "quest+sinkhorn"])
@pytest.mark.parametrize("name", ["AlignText", "ClapText", "MarkupLM", "Splinter"])
def test_an_encoder_that_does_not_say_that_it_is_none_sees_later_tokens(name, attention):
    """Its attention has no `is_causal`, and without padding it gets no mask."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = getattr(hf, f"{name}Config")(vocab_size=50, max_position_embeddings=16, pad_token_id=1, **sizes)
    model = getattr(hf, f"{name}Model")._from_config(config, attn_implementation=attention).eval()
    one, other = (model(torch.tensor([[5, 6, 7, last]])).last_hidden_state for last in (8, 9))
    assert not torch.equal(one[0, 0], other[0, 0])


class Newer(LlamaAttention):
    """An attention of a transformers to come, which hands its function more than those of today."""

    def forward(self, hidden_states, **kwargs):
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        heads = hidden_states.unflatten(-1, (4, 8)).transpose(1, 2)
        return attend(self, heads, heads, heads, None, dropout=0.0, scaling=self.scaling, temperature=2.0, **kwargs)


def test_a_keyword_that_is_not_known_is_refused():
    module = Newer(hf.LlamaConfig(**LLAMA), 0)
    with pytest.raises(UnsupportedError, match="the host hands temperature to its attention function"):
        quest_core.inject(torch.nn.Sequential(module), "quest+sigmoid")


@pytest.mark.parametrize("position", ["rotary", "absolute"])
def test_a_factor_before_rope_is_undone(position, monkeypatch):
    """ESM multiplies its queries by 1/√D and calls with a scale of 1."""
    sizes = {"vocab_size": 20, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 32, "position_embedding_type": position, "pad_token_id": 1, "mask_token_id": 2}
    model = hf.AutoModel.from_config(hf.EsmConfig(**sizes), attn_implementation="quest").eval()
    made, norms = [], []
    query = model.encoder.layer[0].attention.self.query
    query.register_forward_hook(lambda _, __, out: made.append(out.unflatten(-1, (2, 16)).norm(dim=-1)))
    stock = torch.nn.functional.scaled_dot_product_attention

    def attend(q, *others, **options):
        assert options["scale"] == 1
        norms.append(q.norm(dim=-1).mT)
        return stock(q, *others, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
    model(torch.randint(3, 20, (2, 7)))
    torch.testing.assert_close(norms, made)


def test_a_learned_factor_is_no_scaling():
    sizes = {"head_dim": 8, "horizon_length": 8, "patch_length": 4, "context_length": 16}
    config = hf.TimesFmConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32, **sizes)
    series = {"past_values": torch.randn(2, 16), "past_values_padding": torch.zeros(2, 16, dtype=torch.long)}
    series["freq"] = torch.zeros(2, 1, dtype=torch.long)
    models = (built(config, attention, hf.AutoModel) for attention in ("eager", "standard", "quest"))
    eager, standard, quest = (model(**series).last_hidden_state for model in models)
    torch.testing.assert_close(standard, eager)
    assert not equal(quest, eager)


VISION = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
WRITTEN = {
    "bloom": lambda: hf.BloomConfig(vocab_size=50, hidden_size=32, n_layer=2, n_head=4),
    "falcon": lambda: hf.FalconConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4),
    "siglip": lambda: hf.SiglipVisionConfig(**VISION, image_size=16, patch_size=4),
}


@pytest.mark.parametrize("attention", ["quest", "quest+sigmoid"])
@pytest.mark.parametrize("name", WRITTEN)
def test_attention_without_the_interface_is_found_by_a_run(name, attention):
    """The run changes neither weights, random numbers nor the mode; test_coverage saves and loads such models."""
    arguments = {"pixel_values": torch.randn(2, 3, 16, 16)} if name == "siglip" else {"input_ids": IDS}
    made = []
    for options in ({}, {"attn_implementation": attention}):
        torch.manual_seed(0)
        made.append((hf.AutoModel.from_config(WRITTEN[name](), **options), torch.rand(1)))
    (late, wanted), (model, drawn) = made
    assert torch.equal(drawn, wanted)
    assert model.training == late.training
    stock, got = (one.eval()(**arguments).last_hidden_state for one in (late, model))
    assert not torch.allclose(got, stock, atol=1e-6)
    late.set_attn_implementation(attention)
    assert late.config.attention == attention
    torch.testing.assert_close(late(**arguments).last_hidden_state, got)


def test_inject_needs_no_example_for_the_models_of_transformers_in_a_model():
    model = torch.nn.ModuleDict({name: hf.AutoModel.from_config(config()) for name, config in WRITTEN.items()})
    _, report = quest_core.inject(model, "quest")
    assert len(report.replacements) == 2 + 2 + 3
    model["other"] = torch.nn.ModuleList([BloomAttention(WRITTEN["bloom"]())])
    with pytest.raises(
        InjectionError, match=r"leave 1 as they are.*'other\.0' \(BloomAttention\); say inject.*example="
    ):
        quest_core.inject(model, "quest+sigmoid")
    _, report = quest_core.inject(model, "quest+sigmoid", allow_partial=True)
    assert [*report.left_alone] == ["other.0"]


def test_a_model_that_the_plugin_cannot_run_is_an_error_or_partial():
    with torch.device("meta"):
        model = torch.nn.ModuleList([hf.AutoModel.from_config(WRITTEN["bloom"]()), torch.nn.MultiheadAttention(8, 2)])
    with pytest.raises(InjectionError, match="on the meta device"):
        quest_core.inject(model, "quest")
    assert [row.path for row in quest_core.inject(model, "quest", allow_partial=True)[1].replacements] == ["1"]


class Around(hf.PreTrainedModel):
    """A user's model around another; it asks for no attention itself."""

    config_class = hf.PretrainedConfig

    def __init__(self, config, inner, ends):
        super().__init__(config)
        self.inner = hf.AutoModel.from_config(inner, attn_implementation="quest")
        if ends:
            self.post_init()


@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize("name", WRITTEN)
def test_a_part_that_asks_for_an_attention_has_it_whatever_is_around_it(name, ends):
    assert has_mechanism(Around(hf.PretrainedConfig(), WRITTEN[name](), ends))


def test_a_checkpoint_that_lacks_the_attention_of_a_module_is_refused(tmp_path):
    model = hf.AutoModel.from_config(WRITTEN["bloom"](), attn_implementation="quest")
    kept = {key: value for key, value in model.state_dict().items() if "h.1.self_attention.mechanism" not in key}
    model.save_pretrained(tmp_path, state_dict=kept)
    with pytest.raises(CheckpointError, match="checkpoint lacks h.1.self_attention.mechanism"):
        hf.AutoModel.from_pretrained(tmp_path)


def test_a_layer_that_the_checkpoint_lacks_starts_fresh(tmp_path):
    hf.AutoModel.from_config(WRITTEN["bloom"](), attn_implementation="quest").save_pretrained(tmp_path)
    longer = hf.BloomConfig(vocab_size=50, hidden_size=32, n_layer=3, n_head=4)
    model = hf.AutoModel.from_pretrained(tmp_path, config=longer, attn_implementation="quest")
    assert len(model.attention_report.replacements) == 3


class OwnConfig(hf.PretrainedConfig):
    model_type = "own"


class Own(hf.PreTrainedModel):
    """A user's model: attention of transformers, a call of PyTorch's function, and attention that is written out.

    Its config does not hold the config of the inner model.
    """

    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.inner = hf.BertModel(hf.BertConfig(**VISION, vocab_size=50), add_pooling_layer=False)
        self.call, self.written = (Projected(kind) for kind in ("call", "written"))
        self.post_init()

    def forward(self, ids, factor):
        x = self.inner(ids).last_hidden_state
        return x + self.call(x) + factor * self.written(x)


class Projected(torch.nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind, self.qkv = kind, torch.nn.Linear(32, 96)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        if self.kind == "call":
            return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return ((q @ k.mT * 8**-0.5).softmax(-1) @ v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("attention", ["standard", "quest", "qknorm-hs", "quest+sigmoid"])
def test_a_model_that_an_example_was_given_for_is_loaded_with_an_example(attention, tmp_path):
    hf.AutoModel.register(OwnConfig, Own, exist_ok=True)
    hf.AutoConfig.register("own", OwnConfig, exist_ok=True)
    batch = {"ids": IDS, "factor": torch.rand(())}
    model = Own(OwnConfig()).eval()
    model.save_pretrained(tmp_path / "stock")
    _, report = quest_core.inject(model, attention, example=batch)
    assert len(report.replacements) == 4
    for parameter in (p for name, p in model.named_parameters() if "mechanism" in name):
        torch.nn.init.uniform_(parameter, 0.5, 2)
    model.save_pretrained(tmp_path / "quest")
    refused = contextlib.nullcontext()  # standard attention has the numbers of the host's
    if attention != "standard":
        refused = pytest.raises(CheckpointError, match=r"from_pretrained\(\.\.\., example=batch\)")
    with refused:
        Own.from_pretrained(tmp_path / "quest")
    for kind, example in ((Own, batch), (hf.AutoModel, tuple(batch.values()))):
        again = kind.from_pretrained(tmp_path / "quest", example=example)
        assert again.attention_report.attention == attention
        torch.testing.assert_close(again(**batch), model(**batch))
    options = {"attn_implementation": attention, "attention_from": "standard"}
    other = Own.from_pretrained(tmp_path / "stock", example=batch, **options)
    assert len(other.attention_report.replacements) == 4


class Transformers4Attention(torch.nn.Module):
    """Attention as models for transformers 4 write it: AttentionInterface is not asked for eager attention."""

    is_causal, attention_dropout, scaling, num_heads, head_dim, num_key_value_groups = False, 0.0, 8**-0.5, 4, 8, 1

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (torch.nn.Linear(32, 32) for _ in range(4))

    def operands(self, x):
        return (made(x).unflatten(-1, (4, 8)).transpose(1, 2) for made in (self.q_proj, self.k_proj, self.v_proj))

    def forward(self, x):
        function = eager_attention_forward
        if self.config._attn_implementation != "eager":
            function = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        q, k, v = self.operands(x)
        return self.o_proj(function(self, q, k, v, None, dropout=0.0, scaling=self.scaling)[0].flatten(2))


class Transformers4Model(hf.PreTrainedModel):
    config_class, _supports_sdpa = hf.PretrainedConfig, True

    def __init__(self, config):
        super().__init__(config)
        self.attention = Transformers4Attention(config)
        self.post_init()

    def forward(self, x):
        return self.attention(x)


@torch.no_grad()
def test_a_function_that_the_interface_does_not_return_is_refused():
    x = torch.randn(2, 5, 32)
    model = Transformers4Model._from_config(hf.PretrainedConfig(), attn_implementation="quest").eval()
    q, k, v = model.attention.operands(x)
    unit, plain = (q @ torch.nn.functional.normalize(k, dim=-1).mT, q @ k.mT * 8**-0.5)
    want, stock = (model.attention.o_proj((z.softmax(-1) @ v).transpose(1, 2).flatten(2)) for z in (unit, plain))
    torch.testing.assert_close(model(x), want)
    model.set_attn_implementation("eager")
    with pytest.raises(UnsupportedError, match=r"every function but eager attention.*sdpa"):
        model(x)
    model.set_attn_implementation("standard")
    torch.testing.assert_close(model(x), stock)


@torch.no_grad()
@pytest.mark.parametrize("kind", [hf.GPT2Model, hf.DecisionTransformerGPT2Model])
def test_eager_attention_that_gpt2_writes_out_is_refused(kind):
    sizes = {"n_embd": 32, "hidden_size": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    configs = (kind.config_class(**sizes, reorder_and_upcast_attn=reorders) for reorders in (False, True))
    plain, model = (kind._from_config(config, attn_implementation="quest").eval() for config in configs)
    model.load_state_dict(plain.state_dict())
    x = torch.randn(2, 5, 32)
    for function in ("eager", "sdpa")[: 1 + kind._supports_sdpa]:
        plain.set_attn_implementation(function)
        model.set_attn_implementation(function)
        if function == "eager":
            with pytest.raises(UnsupportedError, match="'quest' therefore cannot reach.*reorder_and_upcast_attn=False"):
                model(inputs_embeds=x)
        else:
            torch.testing.assert_close(model(inputs_embeds=x)[0], plain(inputs_embeds=x)[0])
    quest_core.uninject(model)
    model.set_attn_implementation("eager")
    host = model(inputs_embeds=x)[0]
    torch.testing.assert_close(quest_core.inject(model, "standard")[0](inputs_embeds=x)[0], host)
