"""WatchCallback adds to the logs of a Trainer."""

import pytest
import torch
import transformers as hf
from models import LLAMA
from transformers.masking_utils import eager_mask
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss

import quest_core
from devtools.logits import check, clipped, recorded, scalars
from quest_core.errors import UnsupportedError
from quest_transformers import TransformersAdapter
from quest_transformers.watching import WatchCallback

pytest.importorskip("accelerate")


SMALL = {**LLAMA, "attention_dropout": 0.0}


@pytest.fixture(autouse=True)
def _folder_of_tensorboard(tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))


def train(tmp_path, callbacks, **options):
    torch.manual_seed(0)
    model = hf.LlamaForCausalLM._from_config(hf.LlamaConfig(**SMALL), **options)
    data = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 11, (16, 8))]
    steps = {"max_steps": 4, "logging_steps": 2, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    steps |= {"use_cpu": True, "disable_tqdm": True, "learning_rate": 0.01}
    arguments = hf.TrainingArguments(str(tmp_path), report_to=["tensorboard"], **steps)
    trainer = hf.Trainer(model=model, args=arguments, train_dataset=data, callbacks=callbacks)
    trainer.train()
    return model, [entry for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("options", [{}, {"attn_implementation": "quest"}])
def test_trainer_logs_what_attention_does_and_trains_as_before(tmp_path, options):
    model, plain = train(tmp_path / "plain", [], **options)
    with recorded() as calls:
        watched, logs = train(tmp_path, [WatchCallback(every=2)], **options)
    # The first log is that of step 2: two layers, in the third and the fourth of the forward passes.
    (first, entropy), (other, second) = ([*zip(*layer, strict=True)] for layer in (calls[4:8:2], calls[5:8:2]))
    check(logs[0], [(max(first), sum(entropy) / 2), (max(other), sum(second) / 2)], rel=1e-4)
    board = scalars(tmp_path / "board")
    for entry in logs:
        values = {key: value for key, value in entry.items() if key.startswith("attention/")}
        assert values == pytest.approx({key: board[entry["step"]][f"train/{key}"] for key in values})
    assert [entry["loss"] for entry in logs] == [entry["loss"] for entry in plain]
    assert [type(m) for m in watched.modules()] == [type(m) for m in model.modules()]
    assert any(isinstance(m, quest_core.Mechanism) for m in watched.modules()) == bool(options)


def test_queries_are_clipped_after_every_step(tmp_path):
    with clipped() as factors:
        train(tmp_path, [WatchCallback(clip=1e-6)])
    assert [set(found) for found in factors] == [{f"model.layers.{i}.self_attn" for i in range(2)}] * 4


def of_its_own_softmax(name, attention):
    """A model with caps or sinks, whose weights are far from uniform."""
    torch.manual_seed(0)
    sizes = {**SMALL, "head_dim": 8, "sliding_window": 4, "initializer_range": 0.4}
    if name == "gemma2":
        config = hf.Gemma2Config(**sizes, attn_logit_softcapping=2.0)
    else:
        config = hf.GptOssConfig(**sizes, num_local_experts=2, num_experts_per_tok=1)
    model = hf.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for layer in model.model.layers if name == "gpt_oss" else ():
        torch.nn.init.normal_(layer.self_attn.sinks)
    if attention is not None:
        model.set_attn_implementation(attention)
    return model


@pytest.mark.parametrize("attention", [None, "quest"])
@pytest.mark.parametrize(("name", "code"), [("gemma2", modeling_gemma2), ("gpt_oss", modeling_gpt_oss)])
def test_caps_and_sinks_of_the_host_are_measured(name, code, attention, monkeypatch):
    model, ids = of_its_own_softmax(name, attention), torch.randint(3, 50, (2, 9))
    with torch.no_grad():
        want = model(ids, output_attentions=True)
    tops, eager = [], code.eager_attention_forward

    def recording(module, query, key, value, mask, *, scaling, **options):
        cap, pairs = options.get("softcap") or 1e9, key.repeat_interleave(2, 1)
        z = cap * ((query.double() @ pairs.double().mT) * scaling / cap).tanh()
        tops.append((z + mask.double()).amax((0, 2, 3)))
        return eager(module, query, key, value, mask, scaling=scaling, **options)

    monkeypatch.setattr(code, "eager_attention_forward", recording)
    with quest_core.Watch(model, every=1) as watch:
        got = model(ids, use_cache=False).logits
        watch.step()
    assert torch.equal(got, want.logits)
    ((_, layers),) = watch.history
    for weights, top, (path, seen) in zip(want.attentions, tops, layers.items(), strict=True):
        assert seen["max_logit"] == pytest.approx(top.tolist(), rel=1e-5), path
        p = (weights / weights.sum(-1, keepdim=True)).double()
        assert seen["entropy"] == pytest.approx(torch.special.entr(p).sum(-1).mean((0, 2)).tolist(), rel=1e-4)
    maps = quest_core.attention_maps(model, {"input_ids": ids})
    for weights, found in zip(want.attentions, maps.values(), strict=True):
        torch.testing.assert_close(found, weights)


@pytest.mark.parametrize("kind", ["a window", "a mask of tokens", "all keys"])
def test_a_kernel_that_hides_keys_by_itself_is_not_replaced(kind, monkeypatch):
    """As flash attention does, which gets a window and a mask [B, M] in place of one of pairs."""

    def kernel(module, query, key, value, mask, *, scaling, sliding_window=None, **options):
        i, j = torch.arange(query.shape[2])[:, None], torch.arange(key.shape[2])
        seen = (j <= i) & (i - j < (sliding_window or 99))
        seen = seen if mask is None else seen & mask[:, None, None].bool()
        key, value = (x.repeat_interleave(2, 1) for x in (key, value))
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, seen, scale=scaling)
        return out.transpose(1, 2).contiguous(), None

    def own_mask(*_, attention_mask=None, **__):
        return attention_mask if kind == "a mask of tokens" else None

    monkeypatch.setitem(hf.AttentionInterface._global_mapping, "kernel", kernel)
    monkeypatch.setitem(hf.AttentionMaskInterface._global_mapping, "kernel", own_mask)
    torch.manual_seed(0)
    window = 4 if kind == "a window" else None
    model = hf.MistralForCausalLM(hf.MistralConfig(**SMALL, sliding_window=window))
    model.set_attn_implementation("quest")
    model.set_attn_implementation("kernel")
    given = {"input_ids": torch.randint(3, 50, (2, 9)), "attention_mask": torch.ones(2, 9, dtype=torch.long)}
    given["attention_mask"][1, 7:] = 0
    want = model(**given).logits
    with quest_core.Watch(model, every=1) as watch:
        got = model(**given).logits
        watch.step()
    torch.testing.assert_close(got, want)
    measured = kind == "all keys"
    assert bool(watch.history) == measured
    assert any("only that function knows which keys it hides" in line for line in watch.remarks()) != measured


def test_what_cannot_be_measured_is_named_and_does_not_stop_a_training(monkeypatch, capsys):
    model, ids = of_its_own_softmax("gemma2", None), torch.randint(3, 50, (2, 9))
    monkeypatch.setitem(hf.AttentionInterface._global_mapping, "kernel", modeling_gemma2.eager_attention_forward)
    monkeypatch.setitem(hf.AttentionMaskInterface._global_mapping, "kernel", eager_mask)
    model.set_attn_implementation("kernel")
    want = model(ids).logits
    with quest_core.Watch(model, every=1) as watch:
        for _ in range(2):
            assert torch.equal(model(ids).logits, want)
            assert watch.step() == {}
    said = "not measured: model.layers.0.self_attn, model.layers.1.self_attn: Gemma2Attention calls kernel with softcap"
    assert capsys.readouterr().err.count(said) == 1
    assert watch.remarks()[-1].startswith(said)
    with quest_core.Watch(model, clip=100) as watch:
        model(ids)
        with pytest.raises(UnsupportedError, match="QK-clip does not know"):
            watch.step()
    with pytest.raises(UnsupportedError, match="set_attn_implementation.'eager'. lets it be seen"):
        quest_core.attention_maps(model, {"input_ids": ids})
    model.set_attn_implementation("eager")
    assert len(quest_core.attention_maps(model, {"input_ids": ids})) == 2


def test_queries_of_capped_logits_are_not_clipped():
    model = of_its_own_softmax("gemma2", None).train()
    clip = quest_core.QKClip(model, 1e-3)
    model(torch.randint(3, 50, (2, 9)))
    with pytest.raises(UnsupportedError, match="the host changes them before the softmax"):
        clip.step()


def test_uninstall_gives_trainers_log_back():
    WatchCallback()
    changed = hf.Trainer.log
    TransformersAdapter().uninstall()
    try:
        assert hf.Trainer.log is changed.__wrapped__
    finally:
        TransformersAdapter().install()
