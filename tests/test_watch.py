"""quest_core.Watch and `quest watch` measure a training and leave it as it was."""

import atexit
import contextlib
import copy
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from models import encoder
from torch import nn

import quest_core
from quest_core.cli import main
from quest_core.hosts.launch import LOOK
from quest_core.tools.curves import PANELS, RECORD, draw
from quest_core.tools.script import Script, is_first
from quest_core.tools.watch import remarks, summary

ROOT = Path(__file__).resolve().parents[1]


def train(model, steps, after=lambda: None):
    """Return the losses of some steps on fixed data."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    torch.manual_seed(1)
    x = torch.randn(3, 5, 16)  # [B, N, E]
    losses = []
    for _ in range(steps):
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        after()
    return losses


def test_a_stock_model_trains_as_before_and_is_given_back():
    stock = encoder()
    watched = copy.deepcopy(stock)
    kinds = [type(module) for module in watched.modules()]
    losses = train(stock, 5)
    seen = []
    with quest_core.Watch(watched, every=2) as watch:
        assert train(watched, 5, lambda: seen.append(watch.step())) == losses
    assert [bool(values) for values in seen] == [True, True, False, True, False]
    assert [step for step, _ in watch.history] == [1, 2, 4]
    assert [type(module) for module in watched.modules()] == kinds
    torch.testing.assert_close([*watched.parameters()], [*stock.parameters()], rtol=0, atol=0)


@pytest.mark.parametrize("attention", [None, "quest", "quest+gqa(kv_heads=1)", "linear"])
def test_values_are_those_of_a_monitor(attention):
    model, x = encoder(), torch.randn(3, 5, 16)
    if attention:
        quest_core.inject(model, attention)
    with quest_core.Watch(model) as watch:
        model.train()(x)
        values = watch.step()
        assert {*values} == {*watch.names()}
    assert watch.latest == values
    assert any(isinstance(m, quest_core.Mechanism) for m in model.modules()) == bool(attention)
    if not attention:
        quest_core.inject(model, "standard")
    with quest_core.Monitor(model) as monitor:
        model(x)
        assert summary(monitor.collect()) == pytest.approx(values)


def test_validation_between_two_steps_does_not_count():
    model, x = encoder(), torch.randn(3, 5, 16)
    with quest_core.Watch(model, every=1) as watch:
        model.eval()(100 * x)
        model.train()(x)
        values = watch.step()
        assert watch.step() == {}  # nothing ran
        model(x)
        assert watch.step()["attention/max_logit"] == values["attention/max_logit"]


def test_tools_share_a_model_and_the_last_gives_it_back():
    model, x = encoder(), torch.randn(3, 5, 16)
    kinds = [type(module) for module in model.modules()]
    watch, clip = quest_core.Watch(model), quest_core.QKClip(model, threshold=1e-3)
    model.train()(x)
    assert {*quest_core.attention_maps(model, x)} == {*clip.step()} == {"layers.0.self_attn", "layers.1.self_attn"}
    assert watch.step()
    watch.close()
    watch.close()
    model(10 * x)
    assert clip.step()
    clip.close()
    assert [type(module) for module in model.modules()] == kinds


def test_an_attention_that_the_user_injects_meanwhile_stays():
    model = encoder()
    first = quest_core.Watch(model)
    first.step()  # no Monitor watches until the step before the next measurement
    quest_core.inject(model, "quest")
    second = quest_core.Watch(model)
    first.close()
    second.close()
    assert model.attention_report.attention == "quest"


def test_clip_bounds_the_logits_of_every_step():
    model, x = encoder(), torch.randn(2, 5, 16)
    with quest_core.Watch(model, every=1, clip=1e-3) as watch:
        model(x)
        assert watch.step()["attention/layers.0.self_attn/max_logit/max"] > 1e-3
        model(x)
        assert watch.step()["attention/layers.0.self_attn/max_logit/max"] == pytest.approx(1e-3)
    assert not any(isinstance(m, quest_core.Mechanism) for m in model.modules())
    with pytest.raises(quest_core.ConfigError, match="threshold is 0"):
        quest_core.Watch(model, clip=0)
    assert not any(isinstance(m, quest_core.Mechanism) for m in model.modules())


def test_a_model_that_cannot_be_measured_stays_as_it_was():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with pytest.raises(quest_core.InjectionError):
        quest_core.Watch(model)
    with pytest.raises(quest_core.ConfigError, match="every is 0"):
        quest_core.Watch(encoder(), every=0)
    with pytest.raises(quest_core.ConfigError, match="steps is -5"):
        quest_core.Watch(encoder(), steps=-5)


def test_summary_shows_that_a_head_is_nan():
    """A log without them would show a training that diverges as one whose other heads are well."""
    found = summary({"a": {"entropy": [1.0, 2.0, 3.0], "max_logit": [5.0, math.nan, 3.0]}})
    ways = {"min": 1, "mean": 2, "max": 3}
    assert {name: value for name, value in found.items() if "entropy" in name} == {
        "attention/entropy": 2,
        **{f"attention/a/entropy/{way}": value for way, value in ways.items()},
    }
    lost = {name for name, value in found.items() if math.isnan(value)}
    assert lost == {"attention/max_logit", *(f"attention/a/max_logit/{way}" for way in ways)}


def test_remarks_say_what_grows_and_what_unit_keys_bound():
    quiet = {"max_logit": [3.0, 4.0], "entropy": [1.0, 1.2], "query_norm_max": [2.0, 2.0]}
    before = {"a": {**quiet, "max_logit": [100.0, 50.0]}, "b": quiet}
    now = {"a": {"max_logit": [121.0, 50.0], "entropy": [0.01, 1.0], "query_norm_max": [7.0, 2.0]}, "b": quiet}
    words = (
        "a, head 0: the largest logit is 121 (+10.00% per step); at this rate float16 overflows in 66 steps; with unit "
        "keys (quest) it would be at most 7; the softmax is saturated in 1 of 2 heads (entropy 0.01 nats)"
    )
    assert remarks(now, before, 2)[:-1] == [words]
    assert remarks(now, before, 2)[-1].startswith("what people do about it: https://")
    # Without alarm, only the layer with the largest logit; 100 is the limit itself.
    assert "per step" not in " ".join(remarks(now, before, 0))  # of another training with the same folder
    assert remarks(before, {}, 1) == [
        "a, head 0: the largest logit is 100; with unit keys (quest) it would be at most 2"
    ]


@pytest.mark.parametrize(
    ("top", "said"), [(math.inf, "the largest logit is inf"), (math.nan, "2 of 2 heads a logit is NaN")]
)
def test_logits_that_are_not_finite_are_remarked(top, said):
    now = {"a": {"max_logit": [top, top], "entropy": [math.nan] * 2, "query_norm_max": [top] * 2}}
    assert said in remarks(now, {}, 1)[0]
    remarks(quiet := {"a": {**now["a"], "max_logit": [1.0, 1.0]}}, now, 1), remarks(now, quiet, 1)
    assert remarks({"a": {"query_norm_max": [1.0]}}, {}, 1) == []  # a mechanism without logits


SCRIPT = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)
        self.head = nn.Linear(16, 1)

    def forward(self, x, *, scale):
        return self.head(self.body(x)) * scale

torch.manual_seed(0)
model, critic = Model(), nn.Linear(1, 1)
one, other = torch.optim.SGD(model.parameters(), 0.1), torch.optim.SGD(critic.parameters(), 0.1)
for _ in range(12):
    loss = critic(model(torch.randn(2, 5, 16), scale=2.0)).square().mean()
    loss.backward()
    one.step(), other.step(), one.zero_grad(), other.zero_grad()
print("loss", loss.item())
"""


def test_a_script_is_measured_and_computes_what_it_did(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    exec(SCRIPT, {})
    alone = capsys.readouterr().out
    with contextlib.closing(Script(5, tmp_path / "seen")):
        exec(SCRIPT, {})
    out, said = capsys.readouterr()
    assert out == alone
    shown = re.findall(r"step (\d+): body.layers.\d.self_attn, head \d: the largest logit", said)
    assert shown == ["1", "10"]  # at most one in ten seconds, and the last
    lines = [json.loads(line) for line in (tmp_path / "seen" / "watch.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 5, 10]
    assert {*lines[0]["layers"]} == {"body.layers.0.self_attn", "body.layers.1.self_attn"}
    page = (tmp_path / "seen" / "watch.html").read_text()
    assert "<svg" in page
    assert "with unit keys (quest) it would be at most" in page


def test_one_rank_of_torchrun_writes_also_without_a_group(monkeypatch):
    assert is_first()
    monkeypatch.setenv("RANK", "1")
    assert not is_first()


def test_a_script_without_attention_runs_as_it_is(tmp_path, capsys):
    with contextlib.closing(Script(1, tmp_path / "seen")):
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            model(torch.randn(2, 2)).sum().backward()
            optimizer.step()
    assert "Linear is not watched" in capsys.readouterr().err
    assert not (tmp_path / "seen").exists()


def test_a_script_ends_where_no_layer_can_be_measured(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("quest_core.tools.monitor.Layer._count", lambda layer, call: layer.miss("only a kernel knows"))
    script, model = Script(1, tmp_path), quest_core.Attention(16, 2)
    model(torch.randn(2, 3, 16)).sum().backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    script.close()
    assert re.findall(r"not measured|nothing was", capsys.readouterr().err) == ["not measured"]


@pytest.mark.parametrize("trains", [False, True])
def test_a_script_that_trains_in_evaluation_mode_is_told(capsys, trains):
    with contextlib.closing(Script(1, "seen")) as script:
        model = nn.Linear(2, 1).train(trains)
        model(torch.randn(2, 2)).sum().backward()
        torch.optim.SGD(model.parameters(), 0.1).step()
        del model
    atexit.unregister(script.say_nothing_trained)
    script.say_nothing_trained()
    assert ("call model.train()" in capsys.readouterr().err) is not trains


def quest(folder, *words):
    """Run the quest command in a folder."""
    code = "import sys; from quest_core.cli import main; sys.exit(main())"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, *words]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_killed_run_of_the_command_can_be_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "train.py").write_text(f"{SCRIPT}\nimport os\nos.kill(os.getpid(), 9)")
    assert quest(tmp_path, "watch", "--out", "seen", "--", "python", "train.py").returncode == -9
    assert quest(tmp_path, "watch", "--draw", "seen").returncode == 0
    assert (tmp_path / "seen" / "watch.html").exists()
    again = quest(tmp_path, "watch", "--out", "seen", "train.py")
    assert again.returncode == 2
    assert "not empty" in again.stderr


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["--draw", "."], "holds no measurement"),
        ([], "nothing to run"),
        (["--every", "0", "train.py"], "--every is 0"),
        (["--out", "file/seen", "train.py"], "file is not a writable folder"),
    ],
)
def test_the_command_says_what_is_wrong(tmp_path, monkeypatch, capsys, words, found):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    with contextlib.suppress(SystemExit):  # argparse's, after its own message
        main(["watch", *words])
    assert found in capsys.readouterr().err


def test_a_command_that_is_looked_into_cannot_look_into_another(monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.setenv(LOOK, "{}")
    assert main(["maps", "--", "python", "predict.py"]) == 2
    assert "run one at a time" in capsys.readouterr().err


def test_the_page_draws_every_layer_that_was_ever_measured(tmp_path):
    pytest.importorskip("matplotlib")
    one, two = (dict.fromkeys(PANELS, heads) for heads in ([math.nan, 3.0], [2.0, 4.0]))
    records = [{"step": 1, "layers": {"first": one, "second": two}}, {"step": 2, "layers": {"second": two}}]
    (tmp_path / RECORD).write_text("".join(json.dumps(record) + "\n" for record in records))
    page = draw(tmp_path).read_text()
    assert "first" in page
    assert "second" in page
