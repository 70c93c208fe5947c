"""quest_core.checkpoints: a state dict names its attention, whatever happens to it on the way."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim.swa_utils import AveragedModel

import quest_core
from quest_core import CheckpointError
from quest_core.checkpoints import ENTRY, accept, read, spell

SPECS = ("standard", "quest", "quest+gqa(kv_heads=2)", "quest+sigmoid(bias=-1.5)", "dgqa(kv_heads=2)", "cosine")
State = dict[str, Tensor]


def model(attention: str | None, layers: int = 2) -> nn.Module:
    made = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 4, 16, 0.0), layers, enable_nested_tensor=False)
    return made if attention is None else quest_core.inject(made, attention)[0]


def through_a_file(state: State) -> State:
    stored = io.BytesIO()
    torch.save(state, stored)
    stored.seek(0)
    read_back: State = torch.load(stored, weights_only=True)
    return read_back


TREATMENTS: dict[str, Callable[[State], State]] = {
    "copied": lambda state: dict(state.items()),
    "through a file": through_a_file,
    "float16": lambda state: {name: x.half() if x.is_floating_point() else x for name, x in state.items()},
    "bfloat16": lambda state: {name: x.bfloat16() if x.is_floating_point() else x for name, x in state.items()},
    "averaged": lambda state: {name: sum([x / 3] * 3) for name, x in state.items()},
    "moving average": lambda state: {name: 0.9999 * x + (1 - 0.9999) * x for name, x in state.items()},
}


@pytest.mark.parametrize("treatment", TREATMENTS)
@pytest.mark.parametrize("trained", SPECS)
def test_what_a_checkpoint_is_loaded_into_decides(trained: str, treatment: str) -> None:
    state = TREATMENTS[treatment](model(trained).state_dict())
    for built in SPECS:
        target = model(built)
        with warnings.catch_warnings():
            warnings.simplefilter("error", quest_core.AttentionMismatchWarning)
            if trained == built:
                target.load_state_dict(state, strict=True)
            elif trained == "standard":
                with pytest.warns(quest_core.AttentionMismatchWarning, match="trained with standard") as said:
                    target.load_state_dict(state, strict=False)
                assert len(said) == 1  # and not one a layer
            else:
                with pytest.raises(quest_core.CheckpointError) as error:
                    target.load_state_dict(state, strict=False)
                for part in (f"attention '{trained}'", f"has '{built}'", f"attention_from='{trained}'"):
                    assert part in str(error.value)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("trained", [None, "standard", "quest", "sigmoid"])
def test_pytorchs_distributed_loader_is_heard(trained: str | None, whole: bool) -> None:
    """It fills in what a whole state dict lacks with the model's own tensors."""
    loader = pytest.importorskip("torch.distributed.checkpoint.state_dict", reason="new in PyTorch 2.2")

    def load() -> None:
        options = loader.StateDictOptions(full_state_dict=whole, strict=False)
        loader.set_model_state_dict(model("quest"), copy.deepcopy(model(trained).state_dict()), options=options)

    if trained == "quest":
        with warnings.catch_warnings():
            warnings.simplefilter("error", quest_core.AttentionMismatchWarning)
            load()
    elif trained == "sigmoid":
        with pytest.raises(CheckpointError, match="trained with attention 'sigmoid'"):
            load()
    else:
        with pytest.warns(quest_core.AttentionMismatchWarning, match="trained with standard"):
            load()


@pytest.mark.parametrize("kept", ["layers.0.norm1.", "layers.0.self_attn.out_proj.lora_A.default."])
def test_a_file_without_the_weights_of_a_layer_says_nothing_of_its_attention(kept: str) -> None:
    state = {f"{kept}weight": torch.ones(8)}
    with warnings.catch_warnings():
        warnings.simplefilter("error", quest_core.AttentionMismatchWarning)
        model("quest").load_state_dict(state, strict=False)
        accepting = quest_core.inject(model(None), "sigmoid", attention_from="quest")[0]
        accepting.load_state_dict(state, strict=False)
    stock = {name: x for name, x in model(None).state_dict().items() if not name.endswith("bias")}
    with pytest.warns(quest_core.AttentionMismatchWarning):
        model("quest").load_state_dict(stock, strict=False)


def test_stock_models_name_the_unexpected_key() -> None:
    with pytest.raises(RuntimeError, match=rf"Unexpected key.*self_attn\.mechanism\.{ENTRY}"):
        model(None).load_state_dict(model("quest").state_dict())
    model(None).load_state_dict(model("standard").state_dict())


def test_attention_from_says_what_is_loaded() -> None:
    target = model("quest+sigmoid")
    accept(target, "quest")
    with warnings.catch_warnings():
        warnings.simplefilter("error", quest_core.AttentionMismatchWarning)
        target.load_state_dict(model("quest").state_dict())
        target.load_state_dict(model("quest+sigmoid").state_dict())
    for other in ("standard", "qnorm"):
        with pytest.raises(quest_core.CheckpointError, match=f"trained with attention '{other}'.*is 'quest'"):
            target.load_state_dict(model(other).state_dict())


@pytest.mark.parametrize("built", ["quest", "qknorm-hs", "qknorm-hs+gqa(kv_heads=2)", "dgqa(kv_heads=2)"])
@pytest.mark.parametrize("trained", [None, "quest", "qknorm-hs"])
def test_what_only_one_attention_learns_is_no_missing_or_unexpected_key(trained: str | None, built: str) -> None:
    source, target = model(trained), model(built)
    accept(target, trained or "standard")
    for layer in source.layers:  # type: ignore[union-attr]
        for name, parameter in layer.self_attn.named_parameters():  # type: ignore[union-attr, operator]
            if "log_scale" in name:
                parameter.data.add_(1)
    before = {name: x.clone() for name, x in target.state_dict().items()}
    target.load_state_dict(source.state_dict(), strict=True)
    for name, x in target.state_dict().items():
        if ".mechanism." in name:
            theirs = source.state_dict().get(name) if name.endswith("log_scale") else None
            torch.testing.assert_close(x, before[name] if theirs is None else theirs)


def test_inject_takes_attention_from() -> None:
    made, _ = quest_core.inject(model(None), "quest", attention_from="standard")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made.load_state_dict(model(None).state_dict())


def test_the_text_survives_what_models_go_through() -> None:
    made = model("quest+gqa(kv_heads=2)")
    key = next(name for name in made.state_dict() if name.endswith(ENTRY))
    averaged = AveragedModel(made, use_buffers=True)
    for _ in range(3):
        averaged.update_parameters(made)
    emptied = model("quest+gqa(kv_heads=2)").to("meta").to_empty(device="cpu")
    wrapped = model("quest+gqa(kv_heads=2)")
    wrapped.layers[0].self_attn = checkpoint_wrapper(wrapped.layers[0].self_attn)
    states = [
        copy.deepcopy(made).state_dict()[key],
        averaged.module.state_dict()[key],
        copy.deepcopy(made).bfloat16().state_dict()[key],
        emptied.state_dict()[key],
        wrapped.state_dict()[key],
    ]
    assert [read(spelled) for spelled in states] == ["quest+gqa(kv_heads=2)"] * len(states)


@pytest.mark.parametrize("trained", ["standard", "quest"])
def test_a_model_on_the_meta_device_is_whole_after_its_weights_are_assigned(trained: str) -> None:
    with torch.device("meta"):
        made, _ = quest_core.inject(model(None), "quest", attention_from=trained)
    made.load_state_dict(model(trained).state_dict(), assign=True)
    assert read(made.to("cpu").state_dict()[f"layers.0.self_attn.mechanism.{ENTRY}"]) == "quest"


def test_a_long_text_is_spelled_whole() -> None:
    config = quest_core.AttentionConfig.parse("aft-conv(grid='" + "1" * 90 + "x1')")
    assert read(spell(config)) == str(config)
    assert spell(config).shape == (128,)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_text_of_nan_is_named(bad: float) -> None:
    made = model("quest")
    state = {name: x * bad if name.endswith(ENTRY) else x for name, x in made.state_dict().items()}
    with pytest.raises(CheckpointError, match=f"'{ENTRY}' holds NaN or infinity"):
        made.load_state_dict(state)


def test_data_parallel_does_not_broadcast_it() -> None:
    made = model("quest")
    names = [name for name, _ in made.named_buffers()]
    assert made._ddp_params_and_buffers_to_ignore == names
    assert all(name.endswith(ENTRY) for name in names)


def test_what_a_checkpoint_lacks_is_missing_on_the_meta_device() -> None:
    def encoder() -> nn.Module:
        return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 1)

    with torch.device("meta"):
        model, _ = quest_core.inject(encoder(), "dgqa(kv_heads=2)", attention_from="standard")
    with pytest.raises(RuntimeError, match=r"Missing key\(s\).*grouping\.norms"):
        model.load_state_dict(encoder().state_dict(), assign=True)
