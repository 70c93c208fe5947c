"""Pointcept's own trainer as a suite; a stand-in for tools/train.py writes what Pointcept writes."""

import json

import pytest

from quest_core.errors import PluginError
from quest_suites.contract import Cell
from quest_suites.pointcept import own
from quest_suites.pointcept.own import config_lines, read_log, run_own

TRAIN = """
import json, pathlib, runpy, sys
runpy.run_path(sys.argv[2])  # the config
given = dict(word.split("=", 1) for word in sys.argv[sys.argv.index("--options") + 1:])
folder = pathlib.Path(given["save_path"])
(folder / "model").mkdir(parents=True, exist_ok=True)
epochs = [(1, "2.4000", "0.5000"), (2, "1.9000", "0.4000")]
lines = ["[..] attention=quest in 22 modules (SerializedAttention; 1 parameters as before)"]
for epoch, loss, miou in epochs[1:] if "resume" in given else epochs:
    for step in (1, 2):
        time = "Data 0.1 (0.1) Batch 0.1 (0.1) Remain 0:01"
        lines += [f"[..] Train: [{epoch}/2][{step}/2] {time} loss: 2.5000 Lr: 0.002"]
    lines += [f"[..] Train result: loss: {loss} ", f"[..] Val result: mIoU/mAcc/allAcc {miou}/0.6/0.7."]
lines += ["[..] Val result: mIoU/mAcc/allAcc 0.7000/0.8/0.9"]
with (folder / "train.log").open("a") as log:
    log.writelines(line + "\\n" for line in lines)
print(*lines, sep="\\n")
(folder / "words.json").write_text(json.dumps(given))
"""
CONFIGS = {
    "semseg.py": 'model = dict(backbone=dict(type="PT-v3m1"))',
    "cls.py": '"PT-v3m2"\nhooks = [dict(type="ClsEvaluator"), dict(type="PreciseEvaluator")]',
    "part.py": 'model = dict(backbone=dict(type="PT-v3m2"))\nhooks = [dict(type="ShapeNetPartSegEvaluator")]',
    "pretrain.py": 'model = dict(backbone=dict(type="PT-v3m2"))\nevaluate = False',
    "other.py": 'model = dict(backbone=dict(type="SpUNet"))',
}


@pytest.fixture
def repo(tmp_path):
    folder = tmp_path / "Pointcept"
    files = {"tools/train.py": TRAIN, "configs/_base_/default_runtime.py": "", "pointcept/__init__.py": ""}
    for name, text in (files | {f"configs/{name}": text for name, text in CONFIGS.items()}).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def cell(repo, tmp_path, attention="quest", smoke=False, **options):
    work = tmp_path / "work"
    work.mkdir(exist_ok=True)
    return Cell("pointcept", "configs/semseg.py", attention, 7, smoke, repo, {"set": "", "gpus": 1} | options, work)


def test_the_configs_of_a_checkout_are_listed_and_checked(repo):
    found = own.tasks(repo)
    assert len(found) == len(CONFIGS)
    assert (found["configs/semseg.py"]["metric"], found["configs/semseg.py"]["problem"]) == ("mIoU", None)
    assert found["configs/cls.py"]["metric"] == "allAcc"
    assert str(repo / "tools/train.py") in found["configs/cls.py"]["files"]
    assert "this suite reads SemSegEvaluator" in found["configs/part.py"]["problem"]
    assert "a metric to compare is missing" in found["configs/pretrain.py"]["problem"]
    assert "no Point Transformer V3" in found["configs/other.py"]["problem"]


def test_the_log_of_the_trainer_is_read(repo, tmp_path):
    reported = []
    result = run_own(cell(repo, tmp_path, set="batch_size=2"), lambda *what: reported.append(what))
    metrics = {"mIoU": 40, "mAcc": 60, "allAcc": 70, "best mIoU": 50, "precise mIoU": 70, "epochs": 2}
    assert {name: result.metrics[name] for name in metrics} == pytest.approx(metrics)
    assert result.series["train_loss"] == [2.4, 1.9]
    assert result.series["mIoU"] == pytest.approx([50.0, 40.0])
    assert result.details["injected"].startswith("attention=quest in 22 modules")
    assert reported[0] == (0.25, "epoch 1 loss 2.5000")
    given = json.loads((tmp_path / "work/exp/words.json").read_text())
    assert given == {"save_path": str(tmp_path / "work/exp"), "batch_size": "2"}


@pytest.mark.parametrize("loss", ["nan", "inf"])
def test_a_loss_that_is_not_finite_ends_the_series(loss, tmp_path):
    """quest bench counts such a cell as diverged."""
    lines = [
        line
        for epoch, found in ((1, "2.4000"), (2, loss))
        for line in (
            f"Train: [{epoch}/2][1/1] loss: {found}",
            f"Train result: loss: {found} ",
            "[..] Val result: mIoU/mAcc/allAcc 0.1/0.2/0.3.",
        )
    ]
    (tmp_path / "train.log").write_text("\n".join(lines))
    assert str(read_log(tmp_path / "train.log").series["train_loss"]) == f"[2.4, {loss}]"


def test_a_killed_cell_continues_at_the_checkpoint_of_pointcept(repo, tmp_path):
    run_own(cell(repo, tmp_path), lambda *_: None)
    checkpoint = tmp_path / "work/exp/model/model_last.pth"
    checkpoint.touch()
    result = run_own(cell(repo, tmp_path), lambda *_: None)
    assert json.loads((tmp_path / "work/exp/words.json").read_text())["weight"] == str(checkpoint)
    assert result.metrics["epochs"] == 2  # the second epoch was trained again, and counts once
    assert result.series["mIoU"] == pytest.approx([50.0, 40.0])


def test_a_log_without_evaluation_is_an_error(tmp_path):
    with pytest.raises(PluginError, match="wrote no evaluation into"):
        read_log(tmp_path / "nothing.log")


def test_the_configuration_is_pointcepts_own(repo, tmp_path):
    base = repo / "configs/semseg.py"
    scope = {}
    exec("\n".join(config_lines(cell(repo, tmp_path, "quest+gqa(kv_heads=2)"), base, tmp_path / "exp")), scope)
    assert scope["_base_"] == [str(base)]
    assert scope["model"] == {"backbone": {"attention": {"name": "quest+gqa", "kv_heads": 2}}}
    assert scope["seed"] == 7
    assert not {"hooks", "epoch"} & scope.keys()  # a real run keeps Pointcept's, with its precise evaluation
    exec("\n".join(config_lines(cell(repo, tmp_path, smoke=True), base, tmp_path / "exp")), scope)
    assert scope["epoch"] == 1
    assert "quest_suites.pointcept.short" in scope["custom_imports"]["imports"]
    assert {"type": "SemSegEvaluator"} in scope["hooks"]
