"""The suites transformers/bytes-lm and text/classification, shortened."""

import math
from zipfile import ZipFile

import pytest
from models import CONFIGS

from devtools.cells import HostSuites, check_resume, smoke_cell
from quest_core.errors import ConfigError
from quest_suites.transformers import classification
from quest_suites.transformers.suites import SUITES
from quest_suites.transformers.tasks import run_bytes_lm


@pytest.mark.parametrize("task", SUITES["transformers/bytes-lm"]["tasks"])
def test_a_stopped_cell_continues(task, tmp_path, monkeypatch):
    monkeypatch.setattr("quest_suites.contract.SAVE_STEPS", 1)
    cell = smoke_cell(SUITES, tmp_path, "transformers/bytes-lm", task=task, width=16)
    found = check_resume(run_bytes_lm, cell, tmp_path, 0.3)
    assert math.isfinite(found.metrics["perplexity"])
    assert found.details["injected"].startswith("attention=quest in 4 modules")


def test_a_rate_that_is_far_too_high_diverges_and_does_not_fail(tmp_path):
    found = run_bytes_lm(smoke_cell(SUITES, tmp_path, "transformers/bytes-lm", width=16, lr=1000.0), lambda *_: None)
    assert found.metrics["perplexity"] == math.inf


@pytest.fixture
def corpora(tmp_path):
    """Three archives as in nltk_data; the second sentence of MR differs from the first in a mark only."""
    texts = {
        "qc/train.txt": "".join(f"{'LOC' if i % 2 else 'NUM'}:x Is caf\xe9 {i} near ?\n" for i in range(40)),
        "qc/test.txt": "LOC:city Where is Aspen ?\nNUM:dist How far ?\n",
        "subjectivity/plot.tok.gt9.5000": "".join(f"she meets {i} men \n" for i in range(40)),
        "subjectivity/quote.tok.gt9.5000": "".join(f"a gem of {i} \n" for i in range(40)),
        "sentence_polarity/rt-polarity.neg": "so dull\nso , dull\n" + "".join(f"dull {i}\n" for i in range(28)),
        "sentence_polarity/rt-polarity.pos": "".join(f"fine {i}\n" for i in range(30)),
    }
    for name, text in texts.items():
        with ZipFile(tmp_path / f"{name.split('/')[0]}.zip", "a") as file:
            file.writestr(name, text.encode("latin-1"))
    return tmp_path


def test_folds_share_no_sentence_and_a_tenth_of_the_others_validates(corpora):
    found = [classification.splits(corpora, "MR", seed) for seed in range(10)]
    tested = [" ".join(words) for *_, test in found for words, _ in test]
    assert sorted(tested) == sorted(" ".join(words) for part in classification.read(corpora, "MR") for words, _ in part)
    dull = {("so", "dull"), ("so", ",", "dull")}
    for parts in found:
        assert [len(dull & {tuple(words) for words, _ in part}) for part in parts].count(0) == 2
        assert len(parts[1]) in (5, 6, 7)
    with pytest.raises(ConfigError, match="seed is 10; .* 0 to 9"):
        classification.splits(corpora, "MR", 10)


def test_the_archives_are_checked_before_a_cell_starts(corpora):
    found = classification.tasks(corpora)
    assert [one["problem"] for one in found.values()] == [None] * 3
    train, _, test = classification.splits(corpora, "TREC", 0)
    assert (test[1], len(train)) == ((["how", "far", "?"], "NUM"), 36)
    (corpora / "qc.zip").write_text("a part of a download")
    (corpora / "subjectivity.zip").unlink()
    found = {task: one["problem"] for task, one in classification.tasks(corpora).items()}
    assert "found: File is not a zip file; fix: git clone" in found["TREC"]
    assert "expected subjectivity.zip of nltk_data; found: [Errno 2]" in found["SUBJ"]


def test_words_that_occur_once_in_training_are_unknown(corpora):
    (train, _, test), words, classes = classification.encode(classification.splits(corpora, "TREC", 0))
    assert (words, classes) == (7, 2)  # padding, unknown, start, and: ? café is near
    assert train[0]["input_ids"][2:5] == [4, 1, 6]
    assert test[1] == {"input_ids": [2, 1, 1, 3], "labels": 1}


def test_a_cell_of_sentences(corpora):
    cell = smoke_cell(SUITES, corpora, "text/classification", task="SUBJ", seed=4, data=corpora)
    found = check_resume(classification.run, cell, cell.workdir, 0.6)
    assert 0 <= found.metrics["best accuracy"] <= 100
    assert found.details["injected"].startswith("attention=quest in 1 module")


class TestSuites(HostSuites):
    committed = ("transformers/bytes-lm", *(["time/transformers"] if "t5" in CONFIGS else []))  # which times T5
    places = ("plugins/quest-transformers", "research/results")
