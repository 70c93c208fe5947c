"""WatchCallback adds to the logs of a Trainer."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import quest_core
from devtools.logits import check, clipped, recorded, scalars
from quest_transformers.watching import WatchCallback

pytest.importorskip("accelerate")


@pytest.fixture(autouse=True)
def _folder_of_tensorboard(tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))


def train(tmp_path, callbacks, **options):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = LlamaConfig(vocab_size=11, num_hidden_layers=2, max_position_embeddings=16, **sizes)
    model = LlamaForCausalLM._from_config(config, **options)
    data = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 11, (16, 8))]
    arguments = TrainingArguments(
        str(tmp_path),
        max_steps=4,
        logging_steps=2,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        report_to=["tensorboard"],
        use_cpu=True,
        disable_tqdm=True,
        learning_rate=0.01,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=data, callbacks=callbacks)
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
