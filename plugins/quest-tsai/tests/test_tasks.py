"""The suite ts/uea, shortened."""

import math
import wave

import numpy as np
import pandas as pd
import pytest
import torch
from tsai.basics import TSClassification, get_ts_dls

from devtools.cells import HostSuites, check_resume, smoke_cell
from quest_core.errors import ConfigError, PluginError
from quest_suites.tsai import forecasting, spoken
from quest_suites.tsai.data import read, tasks
from quest_suites.tsai.suites import SUITES
from quest_suites.tsai.tasks import ClassTokenTransformer, evaluation_batch, hold_out, last_best, load, run_uea

TINY = {"d_model": 16, "layers": 1, "heads": 2}


def cell(tmp_path, task="BasicMotions", attention="quest", **options):
    return smoke_cell(SUITES, tmp_path, "ts/uea", attention, task=task, **TINY | options)


@pytest.mark.parametrize("architecture", ["paper", "TSTPlus"])
def test_a_run_says_what_it_did(tmp_path, architecture, capfd):
    reported = []
    given = cell(tmp_path, "JapaneseVowels", architecture=architecture)
    one = run_uea(given, lambda done, text: reported.append((done, text)))
    assert capfd.readouterr().out == ""
    assert [done for done, _ in reported] == [0.5, 1.0]
    chosen_epoch = last_best(one.series["validation"])
    assert one.details["reported_epoch"] == chosen_epoch + 1
    assert one.metrics["accuracy"] == one.series["accuracy"][chosen_epoch]
    assert all(math.isfinite(v) for values in one.series.values() for v in values)
    assert one.details["injected"].startswith("attention=quest in 1 module")
    standard = run_uea(cell(tmp_path, "JapaneseVowels", "standard", architecture=architecture), print)
    assert standard.series != one.series
    assert standard.details["parameters"] == one.details["parameters"]


def test_patience(tmp_path):
    done = run_uea(cell(tmp_path, smoke=False, lr=0.0, epochs=9, patience=3), lambda *_: None)
    # With a learning rate of 0 every epoch is as good as the last, and as in Time-Series-Library a tie resets the wait.
    assert done.metrics["epochs"] == 9
    assert last_best([1.0, 3.0, 3.0, 2.0]) == 2


def test_padding_and_scaling(tmp_path):
    zeros, labels, splits = load(cell(tmp_path, "JapaneseVowels"), 0.0)
    train, test = splits["train"], splits["test"]
    nans = load(cell(tmp_path, "JapaneseVowels"), math.nan)[0]
    real = ~torch.as_tensor(nans).isnan()
    assert zeros.shape[1] == 12
    assert set(train).isdisjoint(test)
    assert len(labels) == len(zeros)
    assert (torch.as_tensor(zeros)[~real] == 0).all()
    of_training = torch.as_tensor(zeros)[train][real[train]]
    assert abs(of_training.mean()) < 1e-4
    assert abs(of_training.std() - 1) < 1e-2


@pytest.mark.parametrize("series", [40, 127, 250])
def test_the_whole_test_split_is_evaluated(series):
    """tsai's own slices wrap around for some sizes; see evaluation_batch."""
    x, y = np.zeros((10 + series, 1, 2), np.float32), np.arange(10 + series) % 2
    splits = (list(range(10)), list(range(10, 10 + series)))
    dls = get_ts_dls(x, y, splits=splits, tfms=[None, TSClassification()], bs=[5, evaluation_batch(series)])
    assert sum(len(batch[0]) for batch in dls.valid) == series


def test_the_class_token_alone_decides():
    torch.manual_seed(0)
    model = ClassTokenTransformer(3, 4, 9, d_model=8, layers=1, heads=2, dropout=0.0).eval()
    kept = {}
    model.head.register_forward_hook(lambda module, given, out: kept.update(shape=given[0].shape))
    model(torch.randn(2, 3, 9))
    assert kept["shape"] == (2, 8)


def test_data_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="not a folder"):
        run_uea(cell(tmp_path, data=tmp_path / "none"), print)
    with pytest.raises(ConfigError, match="no Heartbeat_TRAIN.ts and Heartbeat_TEST.ts"):
        run_uea(cell(tmp_path, "Heartbeat", data=tmp_path), print)
    with pytest.raises(ConfigError, match="heads is 3"):
        run_uea(cell(tmp_path, heads=3), print)


def write_ts(path, labels="ab", declared="a b", count=10):
    """Write series of four steps and two features."""
    lines = ["@problemName Mine", "@timeStamps false", "@missing false", "@univariate false", "@dimensions 2"]
    lines += ["@equalLength true", "@seriesLength 4", f"@classLabel true {declared}", "@data"]
    lines += [f"{i},{i + 1},2,3:1,0,{i},1:{labels[i % len(labels)]}" for i in range(count)]
    path.write_text("\n".join(lines) + "\n")


def write_parquet(path, **columns):
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    table = {"x": [[float(i), 1.0, 2.0] for i in range(10)], "label": list("ab" * 5), **columns}
    pd.DataFrame(table).to_parquet(path)


def test_a_smoke_run_of_many_classes(tmp_path):
    """As Handwriting: a shortened training lacks some classes of the test split."""
    names, folder = [f"c{i}" for i in range(90)], tmp_path / "Many"
    folder.mkdir()
    write_ts(folder / "Many_TRAIN.ts", names, " ".join(names), 270)
    write_ts(folder / "Many_TEST.ts", names, " ".join(names), 720)
    assert set(tasks(tmp_path)) == {"Many"}
    result = run_uea(cell(tmp_path, "Many", data=tmp_path), lambda *_: None)
    assert 0 < result.details["series_test"] < 64


def test_the_datasets_of_a_folder_are_listed_and_checked(tmp_path):
    for split in ("TRAIN", "TEST"):
        write_ts(tmp_path / f"Good_{split}.ts")
        (tmp_path / "Nested").mkdir(exist_ok=True)
        write_ts(tmp_path / "Nested" / f"Nested_{split}.ts")
        write_ts(tmp_path / f"Undeclared_{split}.ts", labels="abc")
        (tmp_path / f"Cut_{split}.ts").write_text("@classLabel true a b\n@data\n")
    write_ts(tmp_path / "Half_TRAIN.ts")
    found = tasks(tmp_path)
    assert [name for name in found if found[name]["problem"] is None] == ["Good", "Nested"]
    assert found["Good"]["files"] == [str(tmp_path / f"Good_{split}.ts") for split in ("TRAIN", "TEST")]
    assert "label 'c', which @classLabel does not declare" in found["Undeclared"]["problem"]
    assert "no series after @data" in found["Cut"]["problem"]
    assert "no Half_TRAIN.ts and Half_TEST.ts" in found["Half"]["problem"]


def speak(path, hertz, seconds, rate=8000):
    """Write a tone as a recording of 16 bits."""
    samples = (np.sin(2 * np.pi * hertz * np.arange(int(seconds * rate)) / rate) * 20000).astype("<i2")
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, rate, 0, "NONE", ""))
        file.writeframes(samples.tobytes())


def test_spoken_digits_become_series_of_bands(tmp_path, capsys):
    recordings = tmp_path / "recordings"
    recordings.mkdir()
    for index, seconds in ((4, 0.5), (5, 1.5)):
        speak(recordings / f"7_theo_{index}.wav", 1062.5, seconds)
    spoken.main([str(recordings), str(tmp_path / "made")])
    for split, windows in (("TRAIN", 63), ("TEST", 32)):  # the first second, every 16 ms
        [series], labels = read(tmp_path / "made" / f"SpokenDigits_{split}.parquet")
        assert (series.shape, labels) == ((32, windows), ["7"])
        assert (series[:, 2:-2].argmax(0) == 8).all()  # 1000 to 1125 Hz
    speak(recordings / "7_theo_6.wav", 1000, 0.5, rate=16000)
    with pytest.raises(SystemExit):
        spoken.main([str(recordings), str(tmp_path)])
    said = " ".join(capsys.readouterr().err.split())
    assert "7_theo_6.wav cannot be read as a recording: expected 8000 Hz, 2 bytes per sample" in said
    assert "found 16000, 2, 1" in said
    with pytest.raises(SystemExit):
        spoken.main([str(tmp_path / "made"), str(tmp_path)])
    assert "0 recordings to train and 0 to test; fix: git clone" in " ".join(capsys.readouterr().err.split())


def test_parquet(tmp_path):
    for split in ("TRAIN", "TEST"):
        write_parquet(tmp_path / f"Mine_{split}.parquet")
        write_parquet(tmp_path / f"Ragged_{split}.parquet", y=[[1.0] * (1 + i) for i in range(10)])
        write_parquet(tmp_path / f"Unlabelled_{split}.parquet", label=[1.0] * 10)
    found = tasks(tmp_path)
    assert found["Mine"]["problem"] is None
    assert "lists of numbers of one length" in found["Ragged"]["problem"]
    assert "fewer than two classes" in found["Unlabelled"]["problem"]
    assert run_uea(cell(tmp_path, "Mine", data=tmp_path), lambda *_: None).details["series_test"] == 10


def test_a_validation_split_is_held_out_of_training():
    labels = [*list("aaaaabbbbbbbbbbc"), "a", "b"]
    train, held = hold_out(list(range(16)), labels, seed=3)
    assert sorted(train + held) == list(range(16))
    assert [labels[i] for i in held] == ["a", "b", "b"]
    assert hold_out(list(range(16)), labels, seed=3)[1] == held
    with pytest.raises(ConfigError, match="--set select=last"):
        hold_out([0, 1], ["a", "b"], seed=0)


@pytest.mark.parametrize("select", ["last", "paper"])
def test_without_validation_every_training_series_trains(tmp_path, select):
    done = run_uea(cell(tmp_path, select=select), lambda *_: None)
    accuracies = done.series["accuracy"]
    assert done.metrics["accuracy"] == (accuracies[-1] if select == "last" else max(accuracies))
    assert done.details["series_validation"] == 0
    assert "validation" not in done.series


def test_validation_chooses_among_rates(tmp_path):
    done = run_uea(cell(tmp_path, lr=1e-6, rates=3, smoke=False, epochs=2), lambda *_: None)
    names = ["lr=1e-06", "lr=3.2e-06", "lr=1e-05"]
    best = {name: max(done.series[f"validation/{name}"]) for name in names}
    assert done.details["chosen"] == max(best, key=best.get)
    assert done.metrics["accuracy"] == done.metrics[f"accuracy/{done.details['chosen']}"]
    single = run_uea(cell(tmp_path, lr=1e-5, smoke=False, epochs=2), lambda *_: None)
    assert single.series["train_loss"] == done.series["train_loss/lr=1e-05"]
    with pytest.raises(ConfigError, match="rates need select=validation"):
        run_uea(cell(tmp_path, rates=2, select="last"), print)


@pytest.mark.parametrize(("options", "share"), [({}, 0.5), ({"select": "last"}, 0.5), ({"rates": 2}, 0.75)])
def test_a_stopped_cell_continues_at_its_last_epoch(tmp_path, options, share):
    check_resume(run_uea, cell(tmp_path, **options), tmp_path, share=share)


def test_the_clones_of_forecast_ett_are_checked(tmp_path, monkeypatch):
    library, series = tmp_path / "Time-Series-Library", tmp_path / "ETDataset" / "ETT-small"
    for folder in (library, series):
        with pytest.raises(
            ConfigError, match=rf"{folder}.*; git -C {tmp_path} clone --depth 1 https://github.com/\w+/"
        ):
            forecasting.tasks(tmp_path)
        folder.mkdir(parents=True)
        (library / "run.py").touch()
    monkeypatch.setattr(forecasting, "PACKAGES", {"no_such_module": "its-distribution"})
    with pytest.raises(PluginError, match="-m pip install its-distribution"):
        forecasting.tasks(tmp_path)
    monkeypatch.setattr(forecasting, "PACKAGES", {})
    for name, rows in (("ETTh1", 14400), ("ETTh2", 9)):
        (series / f"{name}.csv").write_text("date,OT\n" + "2016-07-01 00:00:00,1\n" * rows)
    found = forecasting.tasks(tmp_path)
    assert found["ETTh1"] == {"files": [str(series / "ETTh1.csv"), str(library / "run.py")], "problem": None}
    assert "expected 14400 hours in" in found["ETTh2"]["problem"]
    assert "found 9; git -C" in found["ETTh2"]["problem"]


@pytest.mark.parametrize(("changed", "message"), [({"width": 63}, "multiple of 2"), ({"horizon": 721}, "at most 720")])
def test_a_forecast_that_the_library_would_not_refuse(tmp_path, changed, message):
    given = smoke_cell(SUITES, tmp_path, "forecast/ett", smoke=False, data=tmp_path, **changed)
    with pytest.raises(ConfigError, match=message):
        forecasting.command(given, tmp_path)


class TestSuites(HostSuites):
    committed = ("time/tsai", "ts/uea")
