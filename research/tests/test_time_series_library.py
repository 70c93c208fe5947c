"""Time-Series-Library's own trainer as a suite; a stand-in has its names and writes what it writes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from quest_core.benchmarks import Cell
from quest_core.errors import PluginError
from quest_research.suites.time_series_library import commands, read_metrics, run, tasks
from quest_research.suites.time_series_library_attention import LibraryAttention

SCRIPT = """
export CUDA_VISIBLE_DEVICES=4
model_name=Transformer
python -u run.py \\
  --task_name classification \\
  --root_path ./dataset/One/ \\
  --model_id One \\
  --model $model_name \\
  --des 'Exp' --train_epochs 2
python -u run.py --task_name classification --root_path ./dataset/Two/ --model_id Two --model ${model_name}
"""
LAYERS = """
from torch import nn


class FullAttention(nn.Module):
    def __init__(self, mask_flag=True, scale=None):
        super().__init__()
        self.mask_flag, self.scale, self.output_attention, self.dropout = mask_flag, scale, False, nn.Dropout(0.1)


class ProbAttention(FullAttention):
    pass


class AttentionLayer(nn.Module):
    def __init__(self, attention, d_model, n_heads):
        super().__init__()
        self.inner_attention = attention
        self.query_projection = nn.Linear(d_model, d_model)
"""
BASIC = """
class Exp_Basic:
    def __init__(self, args):
        self.args, self.model = args, self._build_model()
"""
RUN = """
import pathlib, random, sys, types
import numpy as np
import torch
from torch import nn
from exp.exp_basic import Exp_Basic
from layers.SelfAttention_Family import AttentionLayer, FullAttention, ProbAttention

if __name__ == "__main__":
    random.seed(2021)
    torch.manual_seed(2021)
    np.random.seed(2021)
    words = [word for word in sys.argv[1:] if word != "--no_use_gpu"]
    given = dict(zip(words[::2], words[1::2]))

    class Exp(Exp_Basic):
        def _build_model(self):
            kind = {"Transformer": FullAttention, "Informer": ProbAttention}.get(given["--model"])
            return nn.Sequential(*(AttentionLayer(kind(), 8, 2) for _ in range(2 if kind else 0)))

    exp = Exp(types.SimpleNamespace(model=given["--model"]))
    print(exp.model)
    for epoch in range(int(given["--train_epochs"])):
        print(f"Epoch: {epoch + 1}, Steps: 17 | Train Loss: {2 - epoch:.3f} Vali Loss: 1.900 Vali Acc: 0.500 "
              "Test Loss: nan Test Acc: 0.500")
    folder = pathlib.Path("results/setting")
    folder.mkdir(parents=True)
    (folder / "result_classification.txt").write_text(f"setting\\naccuracy:{random.random()}\\n\\n")
"""


@pytest.fixture
def repo(tmp_path):
    folder = tmp_path / "library"
    files = {
        "run.py": RUN,
        "exp/exp_basic.py": BASIC,
        "layers/SelfAttention_Family.py": LAYERS,
        "scripts/classification/Two.sh": SCRIPT,
        "scripts/classification/Loop.sh": "for x in a b\ndo\npython -u run.py --task_name classification\ndone",
        "scripts/m4.sh": "python run.py --task_name short_term_forecast --model_id a --model b --root_path .",
        "dataset/One/One_TRAIN.ts": "1",
        "results/of-an-earlier-run/result_classification.txt": "accuracy:0.1",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def cell(repo, tmp_path, attention="quest", seed=0, words=""):
    work = tmp_path / "work"
    work.mkdir(exist_ok=True)
    return Cell(
        "time-series-library", "scripts/classification/Two.sh#One", attention, seed, False, repo, {"set": words}, work
    )


def test_the_commands_of_a_checkout_are_listed_and_checked(repo):
    found = tasks(repo)
    one, two = found["scripts/classification/Two.sh#One"], found["scripts/classification/Two.sh#Two"]
    assert (one["metric"], one["higher_is_better"], one["selection"], one["problem"]) == (
        "accuracy",
        True,
        "paper",
        None,
    )
    assert str(repo / "dataset/One/One_TRAIN.ts") in one["files"]
    assert "its data is missing" in two["problem"]
    assert "it has a loop" in found["scripts/classification/Loop.sh"]["problem"]
    assert "runs short_term_forecast" in found["scripts/m4.sh"]["problem"]
    assert commands(repo / "scripts/classification/Two.sh")[0]["--model"] == "Transformer"


def test_metrics_are_those_that_the_library_writes(repo, tmp_path):
    reported = []
    first = run(cell(repo, tmp_path), lambda *what: reported.append(what))
    assert first.metrics["epochs"] == 2
    assert first.series["train_loss"] == [2.0, 1.0]
    assert np.isnan(first.series["test_loss"]).all()
    assert first.details["injected"] == "attention=quest in 2 modules (FullAttention)"
    assert [done for done, _ in reported] == [0.5, 1.0]
    assert not (repo / "results/setting").exists()
    again, other = (run(cell(repo, tmp_path, seed=seed), lambda *_: None) for seed in (0, 1))
    assert again.metrics["accuracy"] == first.metrics["accuracy"] != other.metrics["accuracy"]


def test_a_stopped_cell_starts_again(repo, tmp_path):
    def stop(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(cell(repo, tmp_path, "standard"), stop)
    reported = []
    again = run(cell(repo, tmp_path, "standard"), lambda *what: reported.append(what))
    assert [done for done, _ in reported] == [0.5, 1.0]
    (tmp_path / "other").mkdir()
    assert (
        again.metrics["accuracy"]
        == run(cell(repo, tmp_path / "other", "standard"), lambda *_: None).metrics["accuracy"]
    )


@pytest.mark.parametrize(
    ("model", "words"),
    [("Informer", "the model has a ProbAttention; only FullAttention"), ("DLinear", "DLinear has no AttentionLayer")],
)
def test_a_model_without_the_attention_is_refused(repo, tmp_path, model, words):
    with pytest.raises(PluginError, match=f"run.py ended with status 1: .*{words}"):
        run(cell(repo, tmp_path, words=f"--model {model}"), lambda *_: None)


def test_other_metric_files_are_read(tmp_path):
    with pytest.raises(PluginError, match="wrote no metrics below"):
        read_metrics(tmp_path)
    (tmp_path / "result_anomaly_detection.txt").write_text("s\nAccuracy : 0.5, Precision : 0.25, F-score : 0.75 \n")
    assert read_metrics(tmp_path) == {"Accuracy": 0.5, "Precision": 0.25, "F-score": 0.75}
    (tmp_path / "results/a").mkdir(parents=True)
    np.save(tmp_path / "results/a/metrics.npy", np.array([1.0, 2.0, 3.0, 4.0, 5.0]))
    assert read_metrics(tmp_path)["mse"] == 2


class Stock:
    """The attributes of the library's FullAttention that LibraryAttention reads."""

    def __init__(self, mask_flag: bool, output_attention: bool) -> None:
        self.mask_flag, self.output_attention, self.dropout = mask_flag, output_attention, nn.Dropout(0.5)


class Mask:
    """The library's mask: True hides."""

    def __init__(self, mask: torch.Tensor) -> None:
        self.mask = mask


@pytest.mark.parametrize("output", [False, True])
@pytest.mark.parametrize("masked", ["no", "causal", "given"])
def test_standard_is_the_formula_of_the_library(output, masked):
    q, k, v = torch.randn(3, 2, 5, 2, 4).unbind()  # [B, N, H, D]
    ours = LibraryAttention(Stock(masked != "no", output), "standard", 2, 4).eval()
    hidden = torch.ones(5, 5, dtype=torch.bool).triu(1)
    if masked == "given":
        hidden = hidden.T.clone()
    scores = torch.einsum("blhe,bshe->bhls", q, k) / 2
    scores = scores if masked == "no" else scores.masked_fill(hidden, -torch.inf)
    weights = torch.softmax(scores, -1).nan_to_num()
    out, found = ours(q, k, v, Mask(hidden[None, None]) if masked == "given" else None)
    torch.testing.assert_close(out, torch.einsum("bhls,bshd->blhd", weights, v))
    assert out.is_contiguous()
    if output:
        torch.testing.assert_close(found, weights)
    else:
        assert found is None


def test_the_checkout_is_left_alone(repo, tmp_path):
    before = sorted(str(path) for path in Path(repo).rglob("*") if "__pycache__" not in str(path))
    run(cell(repo, tmp_path), lambda *_: None)
    assert sorted(str(path) for path in Path(repo).rglob("*") if "__pycache__" not in str(path)) == before
