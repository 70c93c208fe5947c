"""Every way to load weights: which attention a checkpoint was trained with against which the model has."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import peft
import pytest
import torch
import transformers as hf
from models import build
from peft.utils.hotswap import hotswap_adapter
from safetensors.torch import load_file

from quest_core import AttentionMismatchWarning, CheckpointError
from quest_core.checkpoints import ENTRY, decode, set_attention_from
from quest_core.testing import matrix
from quest_transformers import TransformersAdapter

PAGE = Path(__file__).parents[3] / "docs" / "checkpoints.md"
SPECS = {
    "stock": None,
    "standard": "standard",
    "quest": "quest",
    "gqa": "quest+gqa(kv_heads=1)",
    "sigmoid": "sigmoid",
}
WEIGHT = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("checkpoints")
    for i, (name, attention) in enumerate(SPECS.items()):
        model = build("llama", seed=i, attention=attention)
        model.save_pretrained(made / name)
        torch.save(model.state_dict(), made / name / "state.pt")
        peft.get_peft_model(model, low_rank()).save_pretrained(made / name / "adapter")
    return made


def from_pretrained(folder, checkpoint, model, attention_from=None):
    return hf.AutoModelForCausalLM.from_pretrained(
        folder / checkpoint, attn_implementation=SPECS[model] or "sdpa", attention_from=attention_from
    )


def in_parts(folder, checkpoint, model, attention_from=None):
    parts = folder / f"{checkpoint}-parts"
    if not parts.exists():
        hf.AutoModelForCausalLM.from_pretrained(folder / checkpoint).save_pretrained(parts, max_shard_size="20KB")
        assert len(list(parts.glob("*.safetensors"))) > 1
    return from_pretrained(folder, parts.name, model, attention_from)


def with_a_config(folder, checkpoint, model, attention_from=None):
    config = hf.AutoConfig.from_pretrained(folder / "stock")
    config.attention = SPECS[model]
    return hf.LlamaForCausalLM.from_pretrained(folder / checkpoint, config=config, attention_from=attention_from)


def from_a_state_dict(folder, checkpoint, model, attention_from=None):
    config = hf.AutoConfig.from_pretrained(folder / "stock")
    state = torch.load(folder / checkpoint / "state.pt", weights_only=True)
    return hf.LlamaForCausalLM.from_pretrained(
        None,
        config=config,
        state_dict=state,
        attn_implementation=SPECS[model] or "sdpa",
        attention_from=attention_from,
    )


def plain(folder, checkpoint, model, attention_from=None, strict=True):
    made = build("llama", seed=9, attention=SPECS[model])
    if attention_from is not None:
        set_attention_from(made, attention_from)
    made.load_state_dict(torch.load(folder / checkpoint / "state.pt", weights_only=True), strict=strict)
    return made


def resume(folder, checkpoint, model, attention_from=None):
    return plain(folder, checkpoint, model, attention_from, strict=False)


def trainer(folder, checkpoint, model, attention_from=None):
    made = build("llama", seed=9, attention=SPECS[model])
    if attention_from is not None:
        set_attention_from(made, attention_from)
    arguments = hf.TrainingArguments(folder / "trainer", use_cpu=True, report_to=[])
    hf.Trainer(made, arguments)._load_from_checkpoint(str(folder / checkpoint))
    return made


DOORS = {
    "`from_pretrained(attn_implementation=)`": from_pretrained,
    "`from_pretrained`, several files": in_parts,
    "`from_pretrained(config=)`": with_a_config,
    "`from_pretrained(state_dict=)`": from_a_state_dict,
    "`Trainer.train(resume_from_checkpoint=)`": trainer,
    "`load_state_dict`": plain,
    "`load_state_dict(strict=False)`": resume,
}


def low_rank():
    return peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)


def peft_model(base, folder):
    return peft.PeftModel.from_pretrained(base, folder)


def with_its_config(base, folder):
    return peft.PeftModel.from_pretrained(base, folder, config=low_rank())


def same_name(base, folder):
    tuned = peft.get_peft_model(base, low_rank())
    tuned.load_adapter(folder, "default")  # Trainer resumes so
    return tuned


def swapped(base, folder):
    tuned = peft.get_peft_model(base, low_rank())
    hotswap_adapter(tuned, str(folder), "default")
    return tuned


def load_adapter(base, folder):
    base.load_adapter(str(folder))
    return base


def tensors(base, folder):
    stored = load_file(folder / "adapter_model.safetensors")
    base.load_adapter(adapter_state_dict=stored, peft_config=low_rank())
    return base


ADAPTERS = {
    "`PeftModel.from_pretrained`": peft_model,
    "`PeftModel.from_pretrained(config=)`": with_its_config,
    "`PeftModel.load_adapter`, Trainer's resume": same_name,
    "`hotswap_adapter` of peft": swapped,
    "`load_adapter` of transformers": load_adapter,
    "`load_adapter(adapter_state_dict=)`": tensors,
}
"""For the adapters of peft on a model that exists."""


def outcome_of_adapter(door, folder, checkpoint, model, attention_from=None):
    base = build("llama", seed=9, attention=SPECS[model])
    if attention_from is not None:
        set_attention_from(base, attention_from)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            made = door(base, folder / checkpoint / "adapter")
        except CheckpointError:
            return "refused"
    stored = load_file(folder / checkpoint / "adapter" / "adapter_model.safetensors")
    given = {key.split("layers.")[-1]: x for key, x in stored.items() if "lora" in key}
    found = {key.split("layers.")[-1].replace(".default", ""): x for key, x in made.state_dict().items()}
    torch.testing.assert_close({key: found[key] for key in given}, given)
    if model not in ("stock", "standard"):  # it goes on spelling its own
        assert decode(base.model.layers[0].self_attn.mechanism.attention_is_not_standard) == SPECS[model]
    return "warns" if [w for w in caught if issubclass(w.category, AttentionMismatchWarning)] else "loads"


def outcome(door, folder, checkpoint, *arguments):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            made = door(folder, checkpoint, *arguments)
        except CheckpointError:
            return "refused"
        except RuntimeError as error:
            if "Unexpected key" in str(error) and ENTRY in str(error):
                return "unexpected"
            raise
    stored = load_file(folder / checkpoint / "model.safetensors")[WEIGHT]
    torch.testing.assert_close(made.state_dict()[WEIGHT], stored)
    said = [w for w in caught if issubclass(w.category, AttentionMismatchWarning)]
    assert len(said) <= 1  # and not one a layer
    return "warns" if said else "loads"


def test_no_door_lets_another_attention_in_silently(folder):
    found = {
        (name, checkpoint, model): outcome(door, folder, checkpoint, model)
        for name, door in DOORS.items()
        for checkpoint in SPECS
        for model in SPECS
    } | {
        (name, checkpoint, model): outcome_of_adapter(door, folder, checkpoint, model)
        for name, door in ADAPTERS.items()
        for checkpoint in SPECS
        for model in SPECS
    }
    for (_, checkpoint, model), result in found.items():
        plain_pair = {checkpoint, model} <= {"stock", "standard"}
        assert (result == "loads") == (checkpoint == model or plain_pair)
    written = matrix.table(found)
    assert matrix.committed(PAGE, "checkpoints-transformers") == written, f"write into {PAGE.name}:\n{written}"


@pytest.mark.parametrize(
    ("checkpoint", "model"), [("quest", "sigmoid"), ("quest", "standard"), ("stock", "quest"), ("stock", "gqa")]
)
@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
def test_attention_from_opens_every_door(folder, door, checkpoint, model):
    assert outcome(door, folder, checkpoint, model, SPECS[checkpoint] or "standard") == "loads"
    assert outcome(door, folder, checkpoint, model, "qknorm") == "refused"


@pytest.mark.parametrize(("checkpoint", "model"), [("quest", "sigmoid"), ("quest", "standard"), ("stock", "quest")])
@pytest.mark.parametrize("door", ADAPTERS.values(), ids=ADAPTERS)
def test_an_adapter_of_another_attention_can_be_meant(folder, door, checkpoint, model):
    assert outcome_of_adapter(door, folder, checkpoint, model, SPECS[checkpoint] or "standard") == "loads"
    if checkpoint != "stock":
        assert outcome_of_adapter(door, folder, checkpoint, model, "qknorm") == "refused"


def test_an_adapter_s_attention_belongs_to_a_part(tmp_path):
    both = hf.BartConfig(
        **{"vocab_size": 20, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "max_position_embeddings": 16},
        **{
            f"{part}_{name}": n
            for part in ("encoder", "decoder")
            for name, n in (("attention_heads", 2), ("ffn_dim", 8))
        },
    )

    def bart(**attention):
        return hf.BartModel._from_config(
            both, attn_implementation=dict.fromkeys(["encoder", "decoder", "cross"], "standard") | attention
        )

    peft.get_peft_model(bart(encoder="quest"), low_rank()).save_pretrained(tmp_path)
    peft.PeftModel.from_pretrained(bart(encoder="quest"), tmp_path)
    with pytest.raises(CheckpointError, match=r"'encoder.layers.0.self_attn.mechanism'.*'quest'.*'standard'"):
        peft.PeftModel.from_pretrained(bart(decoder="quest"), tmp_path)


def test_a_model_s_own_peft_config_is_no_obstacle(tmp_path):
    model = build("llama", attention="quest")
    model.peft_config = {"r": 8}
    model.save_pretrained(tmp_path)


def test_peft_alone_names_the_key_of_an_adapter_s_attention(folder):
    adapter = TransformersAdapter()
    adapter.uninstall()
    try:
        with pytest.warns(UserWarning, match=r"Unexpected keyword arguments \['attn_implementation'\]"):
            peft.PeftModel.from_pretrained(build("llama"), folder / "quest" / "adapter")
    finally:
        adapter.install()


@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
def test_heads_are_pooled_by_every_door(folder, door):
    made = door(folder, "stock", "gqa", "standard")
    for name in ("k_proj", "v_proj"):
        key = WEIGHT.replace("q_proj", name)
        stored = load_file(folder / "stock" / "model.safetensors")[key]
        torch.testing.assert_close(made.state_dict()[key], stored.view(2, 8, 32).mean(0))


@pytest.mark.parametrize("name", [name for name in SPECS if name != "stock"])
def test_a_checkpoint_is_loaded_as_it_was_saved(folder, name):
    made = hf.AutoModelForCausalLM.from_pretrained(folder / name)
    assert made.config.attention == SPECS[name]
    assert json.loads((folder / name / "config.json").read_text())["attn_implementation"] == SPECS[name]
