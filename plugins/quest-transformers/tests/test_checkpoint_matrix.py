"""Load checkpoints of another attention by every loader of transformers; the table is in docs/checkpoints.md."""

import functools

import peft
import pytest
import torch
import transformers as hf
from models import BERT, build, inputs
from safetensors.torch import load_file

from devtools import matrix
from quest_core import CheckpointError
from quest_core.checkpoints import set_attention_from

WEIGHT = "model.layers.0.self_attn.q_proj.weight"
GQA = "quest+gqa(kv_heads=1)"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("checkpoints")
    for i, name in enumerate(("stock", "quest")):
        model = build("llama", seed=i, attention=None if name == "stock" else name)
        model.save_pretrained(made / name)
        torch.save(model.state_dict(), made / name / "state.pt")
    return made


# Each loader: (folder, checkpoint, model, attention_from) -> the loaded model.


def from_pretrained(folder, checkpoint, model, attention_from=None):
    options = {"attn_implementation": "sdpa" if model == "stock" else model, "attention_from": attention_from}
    return hf.AutoModelForCausalLM.from_pretrained(folder / checkpoint, **options)


def in_parts(folder, checkpoint, model, attention_from=None):
    parts = folder / f"{checkpoint}-parts"
    if not parts.exists():
        hf.AutoModelForCausalLM.from_pretrained(folder / checkpoint).save_pretrained(parts, max_shard_size="20KB")
        assert len(list(parts.glob("*.safetensors"))) > 1
    return from_pretrained(folder, parts.name, model, attention_from)


def with_a_config(folder, checkpoint, model, attention_from=None):
    config = hf.AutoConfig.from_pretrained(folder / "stock")
    config.attention = None if model == "stock" else model
    return hf.LlamaForCausalLM.from_pretrained(folder / checkpoint, config=config, attention_from=attention_from)


def from_a_state_dict(folder, checkpoint, model, attention_from=None):
    config = hf.AutoConfig.from_pretrained(folder / "stock")
    state = torch.load(folder / checkpoint / "state.pt", weights_only=True)
    options = {"attn_implementation": "sdpa" if model == "stock" else model, "attention_from": attention_from}
    return hf.LlamaForCausalLM.from_pretrained(None, config=config, state_dict=state, **options)


def built(model, attention_from):
    made = build("llama", seed=9, attention=None if model == "stock" else model)
    if attention_from is not None:
        set_attention_from(made, attention_from)
    return made


def plain(folder, checkpoint, model, attention_from=None, strict=True):
    made = built(model, attention_from)
    made.load_state_dict(torch.load(folder / checkpoint / "state.pt", weights_only=True), strict=strict)
    return made


def trainer(folder, checkpoint, model, attention_from=None):
    made = built(model, attention_from)
    arguments = hf.TrainingArguments(folder / "trainer", use_cpu=True, report_to=[])
    hf.Trainer(made, arguments)._load_from_checkpoint(str(folder / checkpoint))
    return made


LOADERS = {
    "`from_pretrained(attn_implementation=)`": from_pretrained,
    "`from_pretrained` of several files": in_parts,
    "`from_pretrained(config=)`": with_a_config,
    "`from_pretrained(state_dict=)`": from_a_state_dict,
    "`Trainer.train(resume_from_checkpoint=)`": trainer,
    "`load_state_dict`": plain,
    "`load_state_dict(strict=False)`": functools.partial(plain, strict=False),
}


@pytest.mark.parametrize("loader", LOADERS)
def test_a_checkpoint_of_another_attention(loader, folder):
    def load(checkpoint, model, attention_from=None):
        made = LOADERS[loader](folder, checkpoint, model, attention_from)
        return made.state_dict()[WEIGHT], load_file(folder / checkpoint / "model.safetensors")[WEIGHT]

    matrix.check_loader(load, "transformers", loader, among=LOADERS)


@pytest.mark.parametrize("loader", LOADERS)
def test_key_heads_of_the_host_are_pooled(loader, folder):
    made = LOADERS[loader](folder, "stock", GQA, "standard")
    for name in ("k_proj", "v_proj"):
        key = WEIGHT.replace("q_proj", name)
        stored = load_file(folder / "stock" / "model.safetensors")[key]
        torch.testing.assert_close(made.state_dict()[key], stored.view(2, 8, 32).mean(0))


@pytest.mark.filterwarnings("error::quest_core.AttentionMismatchWarning")
@pytest.mark.parametrize("attention", ["quest", "qknorm"])
def test_a_layer_that_the_checkpoint_lacks_starts_fresh(attention, tmp_path):
    build("llama", attention=attention).save_pretrained(tmp_path)
    config = hf.AutoConfig.from_pretrained(tmp_path)
    config.num_hidden_layers, config.layer_types = 3, None
    larger = hf.AutoModelForCausalLM.from_pretrained(tmp_path, config=config)
    mechanisms = [layer.self_attn.mechanism for layer in larger.model.layers]
    torch.testing.assert_close(mechanisms[2].state_dict(), mechanisms[0].state_dict())
    larger.load_state_dict(build("llama", attention=attention).state_dict(), strict=False)


def test_cross_attention_of_a_warm_start_is_fresh(tmp_path):
    hf.BertModel._from_config(hf.BertConfig(**BERT), attn_implementation="quest").save_pretrained(tmp_path)
    both = hf.EncoderDecoderModel.from_encoder_decoder_pretrained(tmp_path, tmp_path)
    crossed = both.decoder.bert.encoder.layer[0].crossattention.self
    assert str(crossed.mechanism.config) == "quest"
    crossed.mechanism.load_state_dict(both.encoder.encoder.layer[0].attention.self.mechanism.state_dict())


@pytest.mark.filterwarnings("error::quest_core.AttentionMismatchWarning")
@pytest.mark.parametrize("saved", [["self_attn"], ["mechanism"], ["lm_head"], None])
def test_an_adapter_of_peft_loads_what_it_saved(saved, tmp_path):
    def base():
        return build("llama", attention="qknorm").eval()

    lora = peft.LoraConfig(target_modules=["up_proj"], modules_to_save=saved, init_lora_weights=False)
    tuned = peft.get_peft_model(base(), lora)
    with torch.no_grad():
        for parameter in (p for p in tuned.parameters() if p.requires_grad):
            parameter.add_(0.1)
    tuned.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(base(), tmp_path)
    resumed = peft.get_peft_model(base(), peft.LoraConfig.from_pretrained(tmp_path))
    resumed.load_adapter(tmp_path, "default")  # Trainer resumes so
    arguments = inputs("llama")
    for one in (again, resumed):
        torch.testing.assert_close(one.eval()(**arguments).logits, tuned.eval()(**arguments).logits)


def test_a_saved_module_of_another_attention_is_an_error(tmp_path):
    config = peft.LoraConfig(target_modules=["up_proj"], modules_to_save=["self_attn"])
    peft.get_peft_model(build("llama", attention="quest"), config).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="trained with attention 'quest', and the model has 'sigmoid'"):
        peft.PeftModel.from_pretrained(build("llama", attention="sigmoid"), tmp_path)


def test_transformers_loads_an_adapter(tmp_path):
    lora = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    tuned = peft.get_peft_model(build("llama", attention="quest").eval(), lora)
    tuned.save_pretrained(tmp_path)
    made = build("llama", attention="quest").eval()
    made.load_adapter(str(tmp_path))
    arguments = inputs("llama")
    torch.testing.assert_close(made(**arguments).logits, tuned.eval()(**arguments).logits)
