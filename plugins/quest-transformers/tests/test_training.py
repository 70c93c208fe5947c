"""Trainer, gradient checkpointing, PEFT, torch.compile, and what a call asks for."""

import pytest
import torch
import transformers as hf
from models import CONFIGS, build, inputs, sharp

import quest_core
from quest_core import CheckpointError, InjectionError
from quest_core.errors import InputError

TEXTS = [torch.arange(start, start + 8) % 47 + 3 for start in range(24)]
DATA = [{"input_ids": ids, "labels": ids} for ids in TEXTS]


def trainer(model, folder, **options):
    options |= {"report_to": [], "use_cpu": True, "disable_tqdm": True, "save_steps": 2, "logging_steps": 1}
    arguments = hf.TrainingArguments(folder, per_device_train_batch_size=4, num_train_epochs=1, **options)
    return hf.Trainer(model, arguments, train_dataset=DATA)


def losses(made):
    return [entry["loss"] for entry in made.state.log_history if "loss" in entry]


@pytest.mark.parametrize("attention", ["qknorm", "elliptical-quest"])
def test_trainer_with_gradient_checkpointing_and_resume(attention, tmp_path):
    plain = trainer(build("gpt2", attention=attention), tmp_path / "plain", seed=3)
    plain.train()
    made = trainer(build("gpt2", attention=attention), tmp_path / "checked", seed=3, gradient_checkpointing=True)
    made.train()
    assert losses(made) == pytest.approx(losses(plain), rel=1e-5)
    again = trainer(build("gpt2", seed=1, attention=attention), tmp_path / "checked", seed=3)
    again.train(resume_from_checkpoint=str(tmp_path / "checked" / "checkpoint-2"))
    assert losses(again) == pytest.approx(losses(made), rel=1e-4)
    if attention == "qknorm":
        other = trainer(build("gpt2", attention="sigmoid"), tmp_path / "other", seed=3)
        with pytest.raises(CheckpointError, match="trained with attention 'qknorm'"):
            other.train(resume_from_checkpoint=str(tmp_path / "checked" / "checkpoint-2"))


@pytest.mark.parametrize("attention", ["qknorm", "qknorm-hs"])
def test_what_a_mechanism_learns_has_no_weight_decay(attention, tmp_path):
    """As the scales of Qwen3's norms of queries and keys have none."""
    made = trainer(build("qwen3", attention=attention), tmp_path, weight_decay=0.1)
    made.create_optimizer()
    free = {id(p) for group in made.optimizer.param_groups if group["weight_decay"] == 0 for p in group["params"]}
    kept = [name for name, p in made.model.named_parameters() if id(p) in free]
    assert any(".mechanism." in name for name in kept)
    assert {name for name, _ in made.model.named_parameters() if "norm" in name or ".mechanism." in name} == {*kept}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "llama", "mistral", "bart"])
def test_compiles_with_gradients(name):
    model = build(name, attention="quest").eval()
    arguments = inputs(name, padded=True)
    want = model(**arguments).logits
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    got = compiled(**arguments).logits
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    got.square().mean().backward()
    assert all(p.grad is not None for n, p in model.named_parameters() if "q_proj" in n or "query" in n)
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_a_compiled_model_follows_a_change_of_its_attention(name):
    model, arguments = build(name).eval(), inputs(name)
    compiled = torch.compile(model, backend="eager")
    compiled(**arguments)
    for change in (lambda: model.set_attn_implementation("quest"), lambda: quest_core.uninject(model)):
        change()
        torch.testing.assert_close(compiled(**arguments).logits, model(**arguments).logits)
    torch._dynamo.reset()


@pytest.mark.parametrize("name", CONFIGS)
def test_weights_are_returned_on_request(name):
    model, host = build(name, attention="standard").eval(), build(name, attn_implementation="eager").eval()
    arguments = inputs(name)
    kind = "decoder_attentions" if name in ("bart", "t5") else "attentions"
    got, want = (m(**arguments, output_attentions=True)[kind] for m in (model, host))
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


# --- refusals ---------------------------------------------------------------------------------------------------


def test_two_models_of_one_config():
    config = CONFIGS["bert"]()
    stock = hf.BertModel(config).eval()
    other, _ = quest_core.inject(hf.BertModel(config).eval(), "quest")
    assert config.attention is None
    assert other.config.attention == "quest"
    arguments = inputs("bert")
    stock(**arguments)
    config.attention = "quest"
    with pytest.raises(InjectionError, match="the config was changed after the model was built"):
        stock(**arguments)


def test_the_implementation_cannot_be_changed_behind_the_mechanisms():
    model = build("bert", attention="quest").eval()
    arguments = inputs("bert", padded=True)
    want = model(**arguments).logits
    for implementation in ("eager", "sdpa"):
        model.config._attn_implementation = implementation
        torch.testing.assert_close(model(**arguments).logits, want)


def test_flash_masks_are_refused():
    model = build("bert", attention="quest+sigmoid").eval()
    model.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(InputError, match="a mask of another implementation"):
        model(**inputs("bert", padded=True))


def test_a_model_without_attention_is_refused():
    config = hf.ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1])
    with pytest.raises(InjectionError, match="no softmax of q·k"):
        hf.AutoModel.from_config(config, attn_implementation="quest")


@pytest.mark.parametrize("attention", ["cosine", "aft-full(max_length=32)"])
def test_families_decode_with_a_dynamic_cache(attention):
    config = hf.GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=4, n_positions=64, attn_pdrop=0.0)
    torch.manual_seed(0)
    model = sharp(hf.AutoModelForCausalLM.from_config(config, attn_implementation=attention))
    ids = inputs("gpt2")["input_ids"]
    common = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    assert torch.equal(model.generate(ids, **common), model.generate(ids, **common, use_cache=False))
