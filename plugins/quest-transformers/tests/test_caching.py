"""A cache that a quest model fills holds unit keys; whatever happens to it, outputs equal those of a whole forward."""

import copy
import pickle

import pytest
import torch
import transformers as hf
from models import CONFIGS, SEQ2SEQ_MODELS, build, inputs, sharp

import quest_core
from quest_core.errors import UnsupportedError
from quest_core.mechanisms import Output, scores
from quest_core.registry import register, temporary
from quest_transformers import caching
from quest_transformers.layers import attend

IDS = torch.randint(3, 50, (2, 12), generator=torch.Generator().manual_seed(0))
LENGTH = IDS.shape[1]


def cache_of(kind, model):
    if kind == "static":
        return hf.StaticCache(config=model.config, max_cache_len=32)
    return hf.DynamicCache(config=model.config) if kind == "dynamic" else hf.DynamicCache()


def feed(model, cache, *pieces, ids=IDS, **more):
    """The logits [B, N, vocabulary] of the tokens in the given pieces, one call each."""
    with torch.no_grad():
        found = [model(input_ids=part, past_key_values=cache, **more).logits for part in ids.split(pieces, 1)]
    return torch.cat(found, 1)


def whole(model, ids=IDS):
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


def marked(cache):
    return [hasattr(layer, caching.MARK) for layer in cache.layers]


@pytest.fixture
def normalized(monkeypatch):
    """Numbers of the tokens whose keys were normalized, one entry for each call."""
    counted = []

    def unit(x):
        counted.append(x.shape[2])
        return stock(x)

    stock = caching.unit
    monkeypatch.setattr(scores.Quest, "key", staticmethod(unit))
    monkeypatch.setattr(caching, "unit", unit)
    return counted


@pytest.mark.parametrize("kind", ["dynamic", "static", "without config"])
@pytest.mark.parametrize("name", ["gpt2", "mistral"])
def test_each_key_is_normalized_once(name, kind, normalized):
    model = build(name, attention="quest").eval()
    cache = cache_of(kind, model)
    got = feed(model, cache, 5, 3, 1, 1, 2)  # a prompt, a further chunk, steps, a draft
    layers = len(cache.layers)
    assert all(marked(cache))
    assert normalized == [n for n in (5, 3, 1, 1, 2) for _ in range(layers)]
    torch.testing.assert_close(got, whole(model), rtol=1e-5, atol=1e-5)
    keys = cache.layers[0].keys
    norms = keys.norm(dim=-1)
    torch.testing.assert_close(norms[norms > 0], torch.ones_like(norms[norms > 0]))


UNIT = ["quest", "quest+sigmoid", "qknorm-hs", "quest(scale=2)"]


@pytest.mark.parametrize("attention", [*UNIT, "standard", "qnorm", "qknorm", "elliptical-quest"])
def test_what_decodes_with_unit_keys_and_what_keeps_the_hosts(attention):
    model = build("llama" if attention in UNIT else "gpt2", attention=attention).eval()
    cache = cache_of("dynamic", model)
    torch.testing.assert_close(feed(model, cache, 11, 1), whole(model), rtol=1e-5, atol=1e-5)
    assert set(marked(cache)) == {attention in UNIT}


CHANGES = {
    "reorder": (lambda cache: cache.reorder_cache(torch.tensor([1, 1])), lambda ids: ids[[1, 1]]),
    "crop": (lambda cache: cache.crop(-2), lambda ids: ids),
    "repeat": (lambda cache: cache.batch_repeat_interleave(2), lambda ids: ids.repeat_interleave(2, 0)),
    "select": (lambda cache: cache.batch_select_indices(torch.tensor([1])), lambda ids: ids[[1]]),
    "copy": (copy.deepcopy, lambda ids: ids),
    "pickle": (lambda cache: pickle.loads(pickle.dumps(cache)), lambda ids: ids),
    "reset": (lambda cache: cache.reset(), lambda ids: ids),
}


@pytest.mark.parametrize(
    ("change", "kind"),
    [*((change, "dynamic") for change in CHANGES), *((change, "static") for change in ("reorder", "copy", "reset"))],
)
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_what_is_done_to_a_cache_is_done_to_its_unit_keys(name, change, kind, normalized):
    model = build(name, attention="quest").eval()
    if name == "mistral":
        model.config.sliding_window = 8  # a sliding window that was full cannot be cropped
    cache = cache_of(kind, model)
    feed(model, cache, 6, ids=IDS[:, :6])
    normalized.clear()
    act, expect = CHANGES[change]
    cache = act(cache) or cache
    if (change, kind) == ("reset", "dynamic") and cache.layers[0].keys is not None:
        return  # an older transformers, where a dynamic cache keeps zeros of its old length
    ids, start = expect(IDS), {"crop": 4, "reset": 0}.get(change, 6)
    got = feed(model, cache, *[1] * (LENGTH - start), ids=ids[:, start:])
    assert set(normalized) == {1}
    torch.testing.assert_close(got, whole(model, ids)[:, start:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["mistral", *SEQ2SEQ_MODELS])
def test_the_cache_of_a_stock_model_is_normalized_in_each_step(name):
    stock, model, plain = build(name).eval(), build(name, attention="quest").eval(), build(name, attention="quest")
    plain.load_state_dict(model.state_dict())
    for module in plain.eval().modules():
        module._forward_pre_hooks.clear()  # no cache is marked
    given = inputs(name)
    token = {"decoder_input_ids" if name in SEQ2SEQ_MODELS else "input_ids": torch.tensor([[4], [5]])}
    with torch.no_grad():
        made = stock(**{k: v for k, v in given.items() if k != "attention_mask"}, use_cache=True)
        more = {"encoder_outputs": (made.encoder_last_hidden_state,)} if name in SEQ2SEQ_MODELS else {}
        caches = [copy.deepcopy(made.past_key_values) for _ in range(2)]
        for _ in range(2):
            pairs = zip((model, plain), caches, strict=True)
            got, want = (each(**token, **more, past_key_values=cache).logits for each, cache in pairs)
            torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("other", [None, "qnorm"])
@pytest.mark.parametrize(
    ("name", "kind"), [*(("mistral", kind) for kind in ("dynamic", "static")), *((n, None) for n in SEQ2SEQ_MODELS)]
)
def test_another_attention_cannot_use_unit_keys(name, kind, other):
    model, another = build(name, attention="quest").eval(), build(name, attention=other).eval()
    given = inputs(name)
    given.pop("attention_mask")
    with torch.no_grad():
        cache = model(**given, past_key_values=kind and cache_of(kind, model)).past_key_values
        with pytest.raises(UnsupportedError, match="give every model a cache of its own"):
            another(**given, past_key_values=cache)
        model(**given, past_key_values=cache)  # the refusal has changed nothing that quest needs


class Doubled(hf.cache_utils.DynamicLayer):
    def update(self, key_states, value_states, *arguments, **options):
        keys, values = super().update(2 * key_states, value_states, *arguments, **options)
        return keys / 2, values


QUANTIZED = getattr(hf.cache_utils, "Fp8QuantizedLayer", None)  # an older transformers needs another package


@pytest.mark.parametrize("kind", ["a class of its own", "initialized early", *["quantized"] * (QUANTIZED is not None)])
def test_other_caches_keep_the_hosts_keys(kind):
    model, near = build("llama", attention="quest").eval(), 0.1 if kind == "quantized" else 1e-5
    if kind == "initialized early":  # as transformers does for chunked prefill and export
        cache = cache_of("static", model)
        cache.early_initialization(2, 2, 8, torch.float32, torch.device("cpu"))
    elif kind == "quantized":
        cache = hf.Cache(layers=[QUANTIZED() for _ in range(2)])
    else:
        cache = hf.Cache(layer_class_to_replicate=Doubled)
    torch.testing.assert_close(feed(model, cache, 5, 5, 1, 1), whole(model), rtol=near, atol=near)
    assert not any(marked(cache))


def test_keys_that_a_host_changes_after_the_cache_are_normalized(monkeypatch, normalized):
    """Such keys are not the tensor that the layer returned."""
    model = build("llama", attention="quest").eval()
    want = whole(model)
    stock = hf.cache_utils.Cache.update

    def update(self, *arguments, **options):
        keys, values = stock(self, *arguments, **options)
        return 3 * keys, values

    monkeypatch.setattr(hf.cache_utils.Cache, "update", update)
    torch.testing.assert_close(feed(model, hf.DynamicCache(), 11, 1), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", SEQ2SEQ_MODELS)
def test_cross_attention_keeps_unit_keys_where_the_decoder_does(name, normalized):
    for attention, kept in (("quest", True), ({"encoder": "quest", "decoder": "standard", "cross": "quest"}, False)):
        model = build(name, attention=attention).eval()
        given = inputs(name)
        ids = given.pop("decoder_input_ids")
        with torch.no_grad():
            want = model(**given, decoder_input_ids=ids, use_cache=False).logits
            made = model(**given, decoder_input_ids=ids[:, :5], use_cache=True)
            cache = made.past_key_values
            assert set(marked(cache.cross_attention_cache)) == {kept}
            normalized.clear()
            given["encoder_outputs"] = (made.encoder_last_hidden_state,)
            given.pop("input_ids")
            for i in range(5, ids.shape[1]):
                got = model(**given, decoder_input_ids=ids[:, i : i + 1], past_key_values=cache).logits
                torch.testing.assert_close(got, want[:, i : i + 1], rtol=1e-5, atol=1e-5)
        assert set(normalized) == ({1} if kept else {9})


def test_gpt2_with_cross_attention():
    config = CONFIGS["gpt2"]()
    config.add_cross_attention = True
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config, attn_implementation="quest").eval()
    seen = torch.randn(2, 7, 32)
    with torch.no_grad():
        want = model(input_ids=IDS, encoder_hidden_states=seen, use_cache=False).logits
    cache = hf.EncoderDecoderCache(hf.DynamicCache(), hf.DynamicCache())
    got = feed(model, cache, 10, 1, 1, encoder_hidden_states=seen)
    assert all(marked(cache.self_attention_cache) + marked(cache.cross_attention_cache))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "first"), [("dynamic", "eager"), ("static", "compiled")])
def test_compiled_decoding_equals_eager(kind, first, normalized):
    model = build("llama", attention="quest").eval()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    cache = cache_of(kind, model)
    with torch.no_grad():
        start = (model if first == "eager" else compiled)(input_ids=IDS[:, :8], past_key_values=cache).logits
        steps = [compiled(input_ids=IDS[:, i : i + 1], past_key_values=cache).logits for i in range(8, LENGTH)]
    assert all(marked(cache))
    torch.testing.assert_close(torch.cat([start, *steps], 1), whole(model), rtol=1e-5, atol=1e-5)
    torch._dynamo.reset()


def test_a_forward_with_a_cache_has_the_same_gradients():
    models = [build("llama", attention="quest").eval() for _ in range(2)]
    for model, use_cache in zip(models, (True, False), strict=True):
        model(input_ids=IDS, use_cache=use_cache).logits.square().mean().backward()
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_a_monitor_sees_the_hosts_keys_or_refuses():
    model = build("llama", attention="quest").eval()
    begun = hf.DynamicCache()
    feed(model, begun, 4, ids=IDS[:, :4])
    monitor = quest_core.Monitor(model)
    with pytest.raises(UnsupportedError, match="begin a new cache"):
        feed(model, begun, 1, ids=IDS[:, :1])
    cache = hf.DynamicCache()
    feed(model, cache, 4, 1, ids=IDS[:, :5])
    assert not any(marked(cache))
    norms = next(iter(monitor.collect().values()))["key_norm_mean"]
    assert all(abs(norm - 1) > 1e-3 for norm in norms)


@pytest.mark.parametrize("attention", ["standard", "qnorm", "cosine", "quest+kdgqa(kv_heads=2)"])
def test_a_mechanism_that_needs_other_keys_refuses_unit_keys(attention):
    mechanism = quest_core.Mechanism(attention, num_heads=2, head_dim=4)
    q = torch.randn(1, 2, 3, 4)
    with pytest.raises(UnsupportedError, match=r"needs the keys before any normalization"):
        mechanism(q, q, q, unit_keys=True)


@pytest.mark.parametrize("kind", ["static", "without config"])
def test_a_cache_that_was_reset_serves_a_stock_model(kind):
    """It holds no unit keys any more."""
    ours, stock = build("llama", attention="quest").eval(), build("llama").eval()
    caches = [cache_of(kind, stock) for _ in range(2)]
    ids = torch.arange(10)[None] + 3
    with torch.no_grad():
        ours(ids, past_key_values=caches[0])
        caches[0].reset()
        if caches[0].get_seq_length():
            pytest.skip(f"transformers {hf.__version__} resets this cache to as many tokens of zeros")
        found, want = (stock(ids, past_key_values=cache).logits for cache in caches)
    torch.testing.assert_close(found, want)


@pytest.mark.parametrize("function", ["sdpa", "eager"])
@pytest.mark.parametrize("attention", ["standard", "quest", "quest(scale=2)", "qknorm-hs"])
def test_continuous_batching_equals_generation(attention, function):
    model = sharp(build("llama", attention=attention))
    model.set_attn_implementation(function)
    common = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    prompts = [[5, 6, 7, 8], [9, 10]]
    small = hf.ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=32)  # of all the memory there is
    options = {"generation_config": hf.GenerationConfig(**common), "continuous_batching_config": small}
    want = [model.generate(torch.tensor([x]), **common)[0].tolist() for x in prompts]  # transformers 5.8 cannot, later
    made = model.generate_batch(inputs=prompts, **options).values()
    assert not any(one.error for one in made)
    assert [x + one.generated_tokens for x, one in zip(prompts, made, strict=True)] == want


def test_what_continuous_batching_cannot_do_is_refused_by_name():
    options = hf.GenerationConfig(max_new_tokens=2, do_sample=False, eos_token_id=-1, pad_token_id=0)
    with pytest.raises(UnsupportedError, match=r"'quest\+sigmoid' takes the place"):
        build("llama", attention="quest+sigmoid").generate_batch(inputs=[[5, 6]], generation_config=options)
    module = build("llama", attention="quest").eval().model.layers[0].self_attn
    pages = {"scaling": module.scaling, "block_table": torch.zeros(1, 1)}
    x = torch.randn(1, 4, 1, 8)
    with pytest.raises(UnsupportedError, match="max_blocks_per_request=0"):  # pages hold keys of a prompt as they were
        attend("flash_attention_2", None, module, x, x[:, :2], x[:, :2], None, **pages)


def test_an_output_that_reads_its_own_values_takes_no_static_cache():
    class Own(Output):
        causal = cached = True
        reads = ("unseen",)

        def change(self, out, v, x):
            return out - v[:, :, v.shape[2] - out.shape[2] :].repeat_interleave(out.shape[1] // v.shape[1], 1)

    with temporary():
        register("own", source="")(Own)
        model = build("llama", attention="own").eval()
        torch.testing.assert_close(feed(model, cache_of("dynamic", model), 9, 1, 2), whole(model))
        with pytest.raises(UnsupportedError, match="'own' reads the values .* use a dynamic cache"):
            feed(model, cache_of("static", model), LENGTH)
