"""Decoding step by step equals running all tokens at once, whatever the mechanism, also when beams are reordered."""

from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch
from conftest import DECODER, ENCODER, build, dictionary, options
from fairseq.models import build_model
from fairseq.modules.multihead_attention import MultiheadAttention

import quest_core
from quest_core.mechanisms.elliptical import Elliptical
from quest_core.registry import mechanisms
from quest_fairseq.attention import Attention

LM = [*DECODER, "--decoder-layers", "3", "--dropout", "0"]
MT = [*LM, *ENCODER]


def spec(part):
    return f"{part.name}(kv_heads=2)" if any(o.name == "kv_heads" for o in part.options) else part.name


CAUSAL = [spec(part) for part in mechanisms().values() if part.causal and part.name not in ("softmax", "mha")]
CAUSAL += ["quest+sigmoid+dgqa(kv_heads=2)"]
CROSS = ["standard", "quest", "qknorm-hs", "quest+sigmoid", "elliptical-quest+gqa(kv_heads=2)", "linear", "aft-simple"]


def trained(arch, attention, *arguments):
    """A model in evaluation whose parameters have all moved, so that no bias or bound is at a neutral start."""
    torch.manual_seed(0)
    model = build(arch, "--attention", attention, *arguments)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval().double()


@pytest.mark.parametrize("attention", CAUSAL)
def test_steps_equal_all_tokens_at_once(attention):
    model = trained("quest_transformer_lm", attention, *LM)
    tokens = torch.randint(4, 20, (4, 11))
    state = {}
    steps = []
    with torch.no_grad():
        for end in range(1, tokens.shape[1] + 1):
            steps.append(model(tokens[:, :end], incremental_state=state)[0][:, -1])
            if end in (3, 4, 8):  # the hypotheses that survive, as a beam search chooses them
                order = torch.tensor([[2, 2, 0, 1], [3, 0, 1, 1], [1, 3, 3, 0]][(3, 4, 8).index(end)])
                model.decoder.reorder_incremental_state_scripting(state, order)
                tokens, steps = tokens[order], [step[order] for step in steps]
        want = model(tokens)[0]
    torch.testing.assert_close(torch.stack(steps, 1), want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("attention", "beams"), [("quest", 1), *((attention, 3) for attention in CROSS)])
def test_translation_by_steps_equals_all_tokens_at_once(attention, beams):
    model = trained("quest_transformer", attention, *MT)
    source = torch.randint(4, 20, (2, 9))
    source[0, :3] = 1  # fairseq pads sources on the left
    tokens = torch.randint(4, 20, (2 * beams, 7))
    rows = torch.arange(2).repeat_interleave(beams)
    with torch.no_grad():
        encoded = model.encoder(source, torch.tensor([6, 9]))
        repeated = model.encoder.reorder_encoder_out(encoded, rows)
        model.decoder.set_beam_size(beams)  # as SequenceGenerator does; keys are then kept once a sentence
        state, got = {}, []
        for end in range(1, 8):
            got.append(model.decoder(tokens[:, :end], repeated, state)[0][:, -1])
            if end == 4:  # the beams of each sentence change places
                order = torch.arange(len(tokens)).view(2, beams).flip(1).flatten()
                model.decoder.reorder_incremental_state_scripting(state, order)
                tokens, got = tokens[order], [step[order] for step in got]
        want = model.decoder(tokens, repeated)[0]
    torch.testing.assert_close(torch.stack(got, 1), want, rtol=1e-9, atol=1e-9)
    kept = [value for name, value in state.items() if "prev_key" in value]
    assert len(kept) == 3
    assert all(value["prev_key"].shape[0] == 2 for value in kept)
    if attention == "quest":  # keys are normalized once
        norms = torch.stack([value["prev_key"].norm(dim=-1) for value in kept])
        torch.testing.assert_close(norms, torch.ones(3, 2, 4, 9, dtype=torch.float64))


@pytest.mark.parametrize("attention", ["standard", "quest", "qknorm-hs+gqa(kv_heads=2)", "linear"])
def test_two_channels_of_speech_by_steps_equal_all_tokens_at_once(attention):
    """A channel's steps also attend to those of the other, which are not the queries."""
    args = options("quest_speech_dlm", *LM, "--attention", attention)
    more = {"decoder_cross_layers": 2, "duration_prediction": "false", "main_and_cross_weights": "1,0"}
    vars(args).update(more, no_token_positional_embeddings=False)
    words = dict.fromkeys("ab", dictionary())
    speech = SimpleNamespace(channels=["a", "b"], source_dictionaries=words, target_dictionaries=words)
    vars(speech).update(source_dictionary=words["a"], target_dictionary=words["a"])
    torch.manual_seed(0)
    model = build_model(args, speech).double().eval()
    tokens = {channel: torch.randint(4, 20, (2, 7)) for channel in words}
    states = [{}, {}]
    with torch.no_grad():
        want = model(tokens)[0]["a"]["a"]
        parts = ({channel: x[:, : end + 1] for channel, x in tokens.items()} for end in range(7))
        got = [model.decoder(part, incremental_state=states)[0]["a"]["a"][:, -1] for part in parts]
    torch.testing.assert_close(torch.stack(got, 1), want, rtol=1e-9, atol=1e-9)
    with pytest.raises(quest_core.UnsupportedError, match="cannot be causal"):
        build_model(Namespace(**{**vars(args), "attention": "sinkhorn"}), speech)


def test_heads_are_not_pruned():
    module = trained("quest_transformer_lm", "quest", *LM).decoder.layers[0].self_attn
    with pytest.raises(quest_core.UnsupportedError, match="prune the stock model"):
        module._adaptive_prune_heads(module._get_reserve_head_index(2))


@torch.no_grad()
def test_fewer_key_heads_make_a_smaller_cache_and_sums_do_not_grow():
    def size(attention, tokens=16):
        model, state = trained("quest_transformer_lm", attention, *LM).float(), {}
        text = torch.randint(4, 20, (2, tokens))
        for end in range(1, tokens + 1):
            model(text[:, :end], incremental_state=state)
        return sum(value["cache"].nbytes for value in state.values())

    assert size("quest") == size("standard") == 3 * 2 * 2 * 16 * 16 * 4  # layers, k and v, batch, tokens, width, bytes
    assert size("quest+gqa(kv_heads=2)") * 2 == size("quest")
    assert size("quest+mqa") * 4 == size("quest")
    for attention in ("linear", "cosine", "aft-simple"):
        assert size(attention, 8) == size(attention, 16)


@pytest.mark.parametrize("attention", [*CROSS, "aft-local"])
def test_padded_steps_are_not_attended_to(attention):
    """Without position embeddings, which fairseq numbers differently while decoding."""
    model = trained("quest_transformer_lm", attention, *LM, "--no-token-positional-embeddings")
    tokens = torch.randint(4, 20, (3, 7))
    tokens[0, 2] = tokens[1, 4:6] = 1
    state = {}
    with torch.no_grad():
        got = [model(tokens[:, : end + 1], incremental_state=state)[0][:, -1] for end in range(7)]
        want = model(tokens)[0]
        tokens[0, 2] = 5
        assert not torch.allclose(model(tokens)[0][0, 3:], want[0, 3:], atol=1e-3)
    torch.testing.assert_close(torch.stack(got, 1), want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("attention", ["quest", "linear"])
def test_a_padded_step_that_raised_can_be_taken_again(attention):
    model = trained("quest_transformer_lm", attention, *LM, "--no-token-positional-embeddings")
    mechanism = model.decoder.layers[0].self_attn.mechanism
    tokens = torch.randint(4, 20, (2, 5))
    tokens[0, 2] = 1
    state = {}

    def stop(*_):
        raise KeyboardInterrupt

    with torch.no_grad():
        for end in range(5):
            hook = (mechanism.family or mechanism.normalizer).register_forward_hook(stop)
            with pytest.raises(KeyboardInterrupt):
                model(tokens[:, : end + 1], incremental_state=state)
            hook.remove()
            got = model(tokens[:, : end + 1], incremental_state=state)[0][:, -1]
            torch.testing.assert_close(got, model(tokens[:, : end + 1])[0][:, -1], rtol=1e-9, atol=1e-9)


def test_elliptical_layers_follow_each_other_within_their_stack():
    model = build("quest_transformer", "--attention", "elliptical", *MT)
    first = [name for name, m in model.named_modules() if isinstance(m, Elliptical) and m._previous == (None,)]
    stacks = ("encoder.layers.0.self_attn", "decoder.layers.0.self_attn", "decoder.layers.0.encoder_attn")
    assert sorted(first) == sorted(f"{stack}.mechanism.score" for stack in stacks)


# --- the module by itself -------------------------------------------------------------------------------------------


def adopted(stock, attention):
    sizes = {"num_heads": stock.num_heads, "head_dim": stock.head_dim}
    return Attention.adopt(stock, quest_core.AttentionConfig.parse(attention), **sizes).train(stock.training)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("heads", [True, False])
def test_weights_are_those_of_stock_fairseq(training, heads):
    torch.manual_seed(0)
    stock = MultiheadAttention(16, 4, kdim=12, vdim=12, dropout=0.3, encoder_decoder_attention=True).train(training)
    ours = adopted(stock, "standard")
    query, key = torch.randn(5, 2, 16), torch.randn(7, 2, 12)
    hidden = torch.zeros(2, 7, dtype=torch.bool)
    hidden[1, 4:] = True
    found = []
    for module in (stock, ours):
        torch.manual_seed(3)
        found.append(module(query, key, key, hidden, static_kv=True, need_weights=True, need_head_weights=heads))
    for mine, theirs in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore")  # of fairseq
def test_other_masks_are_added_and_families_refuse_them():
    torch.manual_seed(0)
    stock = MultiheadAttention(16, 4, self_attention=True).eval()
    x, bias = torch.randn(6, 2, 16), torch.randn(6, 6)
    want = stock(x, x, x, attn_mask=bias)[0]
    torch.testing.assert_close(adopted(stock, "standard")(x, x, x, attn_mask=bias)[0], want)
    with pytest.raises(quest_core.UnsupportedError, match="takes only masks of keys"):
        adopted(stock, "linear")(x, x, x, attn_mask=bias)


@pytest.mark.parametrize("kind", ["self_attention", "encoder_decoder_attention"])
def test_keys_and_values_of_their_own_are_read_as_in_stock_fairseq(kind):
    torch.manual_seed(0)
    stock = MultiheadAttention(16, 4, **{kind: True}).eval()
    ours = adopted(stock, "standard")
    query, key, value = torch.randn(3, 5, 2, 16)
    torch.testing.assert_close(ours(query, key, value)[0], stock(query, key, value)[0])
    torch.testing.assert_close(ours(query, None, None)[0], stock(query, query, query)[0])


@pytest.mark.parametrize("attention", ["sinkhorn", "aft-full(max_length=8)"])
def test_cross_attention_of_other_decoders_is_refused_as_that_of_transformer(attention):
    """LightConv's decoder has no self-attention, and its steps of decoding bring queries one by one too."""
    cross = torch.nn.ModuleList([MultiheadAttention(16, 4, encoder_decoder_attention=True)])
    with pytest.raises(quest_core.UnsupportedError, match=r"cannot be causal|one by one"):
        quest_core.inject(cross, attention, adapter="fairseq")


def test_raw_scores_and_foreign_states_are_refused():
    model = build("quest_transformer_lm", *LM).eval()
    module = model.decoder.layers[0].self_attn
    x = torch.randn(1, 2, 16)
    with pytest.raises(quest_core.InputError, match="before_softmax"):
        module(x, x, x, before_softmax=True)
    state = {}
    module._set_input_buffer(state, {"prev_key": x, "prev_value": x})
    with pytest.raises(KeyError, match="cache"):
        module(x, x, x, incremental_state=state)
