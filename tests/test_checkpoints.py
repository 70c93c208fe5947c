"""quest_core.checkpoints: a state dict names its attention, and a refused one changes nothing."""

import copy
import io
import warnings

import pytest
import torch
from models import encoder, same_state
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import quest_core
from quest_core import AttentionMismatchWarning, CheckpointError
from quest_core.checkpoints import ENTRY, compare_before_loading, decode, encode, set_attention_from

pytestmark = pytest.mark.filterwarnings("error::quest_core.AttentionMismatchWarning")  # unless a test expects it

SPECS = ("standard", "quest", "quest+gqa(kv_heads=2)", "quest+sigmoid(bias=-1.5)", "dgqa(kv_heads=2)", "cosine")
FLOATS = sorted(
    {
        value
        for value in vars(torch).values()
        if isinstance(value, torch.dtype) and value.is_floating_point and value.itemsize and "_x2" not in str(value)
    },
    key=str,
)


def model(attention, layers=2):
    made = encoder(8, layers=layers)
    return made if attention is None else quest_core.inject(made, attention)[0]


def through_a_file(state):
    stored = io.BytesIO()
    torch.save(state, stored)
    stored.seek(0)
    return torch.load(stored, weights_only=True)


TREATMENTS = {  # of a state dict
    "copied": lambda state: dict(state.items()),
    "torch.save": through_a_file,
    "averaged": lambda state: {name: sum([x / 3] * 3) for name, x in state.items()},
    "moving average": lambda state: {name: 0.9999 * x + (1 - 0.9999) * x for name, x in state.items()},
    "halved and averaged": lambda state: {name: (x.half() + x.half()) / 2 for name, x in state.items()},
    **{str(dtype): lambda state, to=dtype: {name: x.to(to) for name, x in state.items()} for dtype in FLOATS},
    "int8": lambda state: {name: x.to(torch.int8) if name.endswith(ENTRY) else x for name, x in state.items()},
}

LOADERS = {  # of a state dict into a model
    "strict": lambda target, state: target.load_state_dict(state),
    "not strict": lambda target, state: target.load_state_dict(state, strict=False),
    "assign": lambda target, state: target.load_state_dict(copy.deepcopy(state), strict=False, assign=True),
    "in a wrapper": lambda target, state: nn.ModuleDict({"module": target}).load_state_dict(
        {f"module.{name}": x for name, x in state.items()}, strict=False
    ),
    "set_model_state_dict": lambda target, state: set_model_state_dict(
        target, dict(state), options=StateDictOptions(strict=False)
    ),
    "set_model_state_dict(full_state_dict)": lambda target, state: set_model_state_dict(
        target, dict(state), options=StateDictOptions(strict=False, full_state_dict=True)
    ),
}


# --- the entry ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("treatment", TREATMENTS)
@pytest.mark.parametrize("spec", SPECS[1:])
def test_the_entry_survives(spec, treatment):
    state = TREATMENTS[treatment](model(spec).state_dict())
    assert {decode(x) for name, x in state.items() if name.endswith(ENTRY)} == {spec}


def test_the_entry_survives_what_models_go_through():
    made = model("quest+gqa(kv_heads=2)")
    key = next(name for name in made.state_dict() if name.endswith(ENTRY))
    averages = [
        AveragedModel(made, use_buffers=True),
        AveragedModel(made, multi_avg_fn=get_ema_multi_avg_fn(0.999), use_buffers=True),
    ]
    for average in averages:
        for _ in range(3):
            average.update_parameters(made)
    wrapped = model("quest+gqa(kv_heads=2)")
    wrapped.layers[0].self_attn = checkpoint_wrapper(wrapped.layers[0].self_attn)
    models = [
        copy.deepcopy(made),
        *(average.module for average in averages),
        copy.deepcopy(made).bfloat16(),
        copy.deepcopy(made).to(torch.float8_e4m3fn),
        model("quest+gqa(kv_heads=2)").to("meta").to_empty(device="cpu"),
        wrapped,
    ]
    assert [decode(one.state_dict()[key]) for one in models] == ["quest+gqa(kv_heads=2)"] * len(models)


def test_a_long_text_is_encoded_whole():
    config = quest_core.AttentionConfig.parse("aft-conv(grid='" + "1" * 90 + "x1')")
    assert decode(encode(config)) == str(config)
    assert encode(config).shape == (1024,)


def test_a_mechanism_that_keeps_no_entry_reads_that_of_another():
    quest_core.Mechanism("quest").load_state_dict(quest_core.Mechanism("quest", num_heads=2, head_dim=8).state_dict())
    with pytest.raises(CheckpointError, match="trained with attention 'quest', and the model has 'qnorm'"):
        quest_core.Mechanism("qnorm").load_state_dict(model("quest").layers[0].self_attn.mechanism.state_dict())


@pytest.mark.parametrize("change", [float("nan"), float("inf"), 0.0, 1.5, 0.5])
def test_a_changed_entry_is_an_error(change):
    made = model("quest")
    state = {name: x * change if name.endswith(ENTRY) else x + 1 for name, x in made.state_dict().items()}
    said = f"'{ENTRY}' .* ones and twos.*was changed; copy this entry"
    with same_state(made), pytest.raises(CheckpointError, match=said):
        made.load_state_dict(state)


# --- what loads -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("trained", [None, *SPECS])
def test_what_a_checkpoint_is_loaded_into_decides(trained, loader):
    """Equal attention loads, weights of standard attention warn once, and all others change nothing."""
    state = through_a_file(model(trained).state_dict())
    for built in SPECS:
        target = model(built)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", AttentionMismatchWarning)
            if trained in (None, "standard", built):
                LOADERS[loader](target, state)
                after = target.state_dict()
                assert all(
                    torch.equal(after[n], x) for n, x in state.items() if n in after and x.shape == after[n].shape
                )
            else:
                with same_state(target), pytest.raises(CheckpointError) as error:
                    LOADERS[loader](target, state)
                for part in (f"attention '{trained}'", f"has '{built}'", f"attention_from='{trained}'"):
                    assert part in str(error.value)
        warned = [w for w in caught if issubclass(w.category, AttentionMismatchWarning)]
        assert len(warned) == (trained in (None, "standard") and built != "standard")


def built(attention):
    """A model that was built with quest_core's layers."""
    layers = nn.ModuleList(quest_core.Attention(8, 2, attention) for _ in range(2))
    return nn.ModuleDict({"embedding": nn.Embedding(4, 8), "layers": layers})


@pytest.mark.parametrize("kind", [quest_core.Attention, quest_core.MultiheadAttention])
def test_a_layer_compares_before_it_copies(kind):
    made, other = kind(8, 2, attention="quest"), kind(8, 2, attention="sigmoid")
    with same_state(made), pytest.raises(CheckpointError):
        made.load_state_dict(other.state_dict())


def test_a_built_model_compares_all_layers_first_if_asked():
    made = built("quest")
    compare_before_loading(made)
    compare_before_loading(made)
    for one in (made, copy.deepcopy(made)):
        with same_state(one), pytest.raises(CheckpointError):
            one.load_state_dict(built("sigmoid").state_dict())


def test_one_layer_of_another_attention_leaves_all_as_they_were():
    made, state = model("quest", 3), model("quest", 3).state_dict()
    key = f"layers.2.self_attn.mechanism.{ENTRY}"
    with same_state(made), pytest.raises(CheckpointError, match="'layers.2.self_attn.mechanism'"):
        made.load_state_dict({**state, key: model("sigmoid", 3).state_dict()[key]})


@pytest.mark.parametrize("kept", ["layers.0.norm1.", "layers.0.self_attn.out_proj.lora_A.default."])
def test_a_file_without_the_weights_of_a_layer_does_not_name_its_attention(kept):
    state = {f"{kept}weight": torch.ones(8)}
    model("quest").load_state_dict(state, strict=False)
    accepting = quest_core.inject(model(None), "sigmoid", attention_from="quest")[0]
    accepting.load_state_dict(state, strict=False)
    stock = {name: x for name, x in model(None).state_dict().items() if not name.endswith("bias")}
    with pytest.warns(AttentionMismatchWarning):
        model("quest").load_state_dict(stock, strict=False)


def test_each_file_of_several_names_the_attention_of_its_own_layers():
    """As accelerate's load_checkpoint_in_model loads them: PyTorch fills in the model's own tensors."""
    state, target = model("quest").state_dict(), model("quest")
    for layer in ("layers.0.", "layers.1."):
        file = {name: x for name, x in state.items() if name.startswith(layer)}
        LOADERS["set_model_state_dict(full_state_dict)"](target, file)
    torch.testing.assert_close(target.state_dict(), state)


@pytest.mark.parametrize("attention_from", [None, "quest"])
def test_a_new_layer_starts_fresh(attention_from):
    """As in a model with one more layer; PyTorch returns the missing keys."""
    small, large = model("quest", 1), model("quest", 2)
    if attention_from is not None:
        set_attention_from(large, attention_from)
    fresh = large.layers[1].self_attn.in_proj_weight.clone()
    missing = large.load_state_dict(small.state_dict(), strict=False).missing_keys
    assert torch.equal(large.layers[1].self_attn.in_proj_weight, fresh)
    assert torch.equal(large.layers[0].self_attn.in_proj_weight, small.layers[0].self_attn.in_proj_weight)
    assert "layers.1.self_attn.in_proj_weight" in missing


def around(count):
    """Layers with projections around a module that only calls attention."""

    def layer():
        call = nn.ModuleDict({"mechanism": quest_core.Mechanism("quest", num_heads=2, head_dim=4)})
        return nn.ModuleDict({"qkv": nn.Linear(8, 24), "call": call})

    made = nn.ModuleDict({"layers": nn.ModuleList(layer() for _ in range(count)), "head": nn.Linear(8, 2)})
    compare_before_loading(made)
    return made


def test_a_new_layer_around_a_module_without_weights_starts_fresh():
    large = around(2)
    set_attention_from(large, "quest")
    large.load_state_dict(around(1).state_dict(), strict=False)
    stock = {name: x for name, x in around(2).state_dict().items() if not name.endswith(ENTRY)}
    with pytest.raises(CheckpointError, match="trained with attention 'standard'"):
        large.load_state_dict(stock, strict=False)


def test_a_host_that_hides_warnings_of_users_shows_this_one():
    """As fastai does when it is imported."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", category=UserWarning)
        model("quest").load_state_dict(model("standard").state_dict())
    assert [warning.category for warning in caught] == [AttentionMismatchWarning]


def test_attention_from_names_what_is_loaded():
    target = model("quest+sigmoid")
    set_attention_from(target, "quest")
    target.load_state_dict(model("quest").state_dict())
    target.load_state_dict(model("quest+sigmoid").state_dict())
    for other in ("standard", "qnorm"):
        with pytest.raises(CheckpointError, match=f"trained with attention '{other}'.*is 'quest'"):
            target.load_state_dict(model(other).state_dict())


@pytest.mark.parametrize("built", ["quest", "qknorm-hs", "qknorm-hs+gqa(kv_heads=2)", "dgqa(kv_heads=2)"])
@pytest.mark.parametrize("trained", [None, "quest", "qknorm-hs"])
def test_what_only_one_attention_learns_is_no_missing_or_unexpected_key(trained, built):
    source, target = model(trained), model(built)
    set_attention_from(target, trained or "standard")
    for layer in source.layers:
        for name, parameter in layer.self_attn.named_parameters():
            if "log_scale" in name:
                parameter.data.add_(1)
    before = copy.deepcopy(target.state_dict())
    target.load_state_dict(source.state_dict(), strict=True)
    for name, x in target.state_dict().items():
        if ".mechanism." in name:
            theirs = source.state_dict().get(name) if name.endswith("log_scale") else None
            torch.testing.assert_close(x, before[name] if theirs is None else theirs)


@pytest.mark.parametrize("trained", ["standard", "quest"])
def test_a_model_on_the_meta_device_is_whole_after_its_weights_are_assigned(trained):
    with torch.device("meta"):
        made, _ = quest_core.inject(model(None), "quest", attention_from=trained)
    made.load_state_dict(model(trained).state_dict(), assign=True)
    assert decode(made.to("cpu").state_dict()[f"layers.0.self_attn.mechanism.{ENTRY}"]) == "quest"


def test_what_a_checkpoint_lacks_is_missing_on_the_meta_device():
    with torch.device("meta"):
        model, _ = quest_core.inject(encoder(), "dgqa(kv_heads=2)", attention_from="standard")
    with pytest.raises(RuntimeError, match=r"Missing key\(s\).*grouping\.norms"):
        model.load_state_dict(encoder().state_dict(), assign=True)
