"""The language-modelling suites: text, byte pairs, the attack, and a shortened cell of each."""

import gzip
import itertools
import math
from collections import Counter

import pytest
import torch

from devtools.cells import HostSuites, smoke_cell
from quest_suites.fairseq import tasks, translation
from quest_suites.fairseq.corpus import SWAPPED, BytePairs, pydocs, swap_words
from quest_suites.fairseq.suites import SUITES
from quest_suites.fairseq.tasks import RATES, run_pydocs, run_wikitext103


def test_documentation_is_split_without_overlap():
    train, valid, test = pydocs()
    assert not set(train) & set(valid)
    assert not set(train) & set(test)
    assert len(" ".join(train)) > 200_000
    assert min(len(valid), len(test)) > 100


def test_the_attack_swaps_a_share_of_the_words():
    lines = [f"word{i} , other{i} . 7" for i in range(200)]
    for rate in (0.015, 0.05):
        attacked = swap_words(lines, rate)
        assert attacked == swap_words(lines, rate)
        assert attacked != swap_words(lines, rate, seed=1)
        changed = [
            (old, new)
            for before, after in zip(lines, attacked, strict=True)
            for old, new in zip(before.split(), after.split(), strict=True)
            if old != new
        ]
        assert len(changed) == round(rate * 600)  # three words a line; marks are none
        assert {new for _, new in changed} == {SWAPPED}
        assert not {old for old, _ in changed} & {",", "."}


def test_byte_pairs_are_learned_by_frequency_and_lose_nothing():
    assert "@@" not in BytePairs(["low low low lower"], 6).encode("low")
    train, _, test = pydocs()
    pairs = BytePairs(train[:300], 100)
    encoded = [pairs.encode(line) for line in test]
    assert [line.replace("@@ ", "") for line in encoded] == test
    assert pairs.merges == BytePairs(train[:300], 100).merges


def slow_merges(lines, merges):
    """Sennrich's definition, counting all pairs again each time."""
    words = [list(word) for line in lines for word in line.split()]
    made = []
    while len(made) < merges:
        counts = Counter(pair for word in words for pair in itertools.pairwise(word))
        best = max(counts, key=lambda pair: (counts[pair], pair))
        made.append(best)
        for word in words:
            i = 0
            while i < len(word) - 1:
                if (word[i], word[i + 1]) == best:
                    word[i : i + 2] = ["".join(best)]
                i += 1
    return made


def test_byte_pairs_are_those_of_the_definition():
    lines = [*pydocs()[0][:40], "aaaa aaa ababab"]
    assert BytePairs(lines, 60).merges == slow_merges(lines, 60)


def test_a_cell_of_the_documentation_that_was_stopped_while_it_was_evaluated(tmp_path, monkeypatch):
    """It is not trained further, and fairseq-preprocess meets a dictionary that is there already."""

    def stop(*args, **options):
        raise KeyboardInterrupt

    given, heard = smoke_cell(SUITES, tmp_path, "lm/pydocs"), []
    with monkeypatch.context() as patch:
        patch.setattr(tasks, "perplexity", stop)
        with pytest.raises(KeyboardInterrupt):
            run_pydocs(given, lambda fraction, text: heard.append(fraction))
    result = run_pydocs(given, lambda fraction, text: heard.append(fraction))
    metrics = {entry["metric"] for entry in SUITES["lm/pydocs"]["also"]} | {SUITES["lm/pydocs"]["metric"]}
    assert metrics <= result.metrics.keys()
    assert set(RATES) < metrics
    assert all(value > 1 for name, value in result.metrics.items() if "perplexity" in name)
    assert len(result.series["train_loss"]) == 4
    assert result.details["updates"] == 4
    assert heard == sorted(heard)


def test_a_cell_of_wikitext(tmp_path, monkeypatch):
    monkeypatch.setattr(tasks, "RATES", {})  # the documentation's cell has attacks
    for split in ("train", "valid", "test"):
        lines = pydocs()[0][:60] if split == "train" else pydocs()[1][:8]
        (tmp_path / f"wiki.{split}.tokens").write_text("".join(f" {line} \n" for line in lines))
    given = smoke_cell(SUITES, tmp_path, "lm/wikitext103", "gqa(kv_heads=2)", task="small", data=tmp_path)
    result = run_wikitext103(given, lambda fraction, text: None)
    assert result.details["window"] == {"tokens": 256, "context": 255}
    assert result.metrics["perplexity"] > 1


def test_a_cell_of_translation(tmp_path):
    """Each of a number of sentences that no size of batch divides is translated, with `attention` across only."""
    for name, language in itertools.product(translation.SPLITS.values(), ("en", "de")):
        lines = pydocs()[0][:45] if name == "train" else pydocs()[1][:11]
        (tmp_path / f"{name}.{language}.gz").write_bytes(gzip.compress("\n".join(line[:40] for line in lines).encode()))
    given = smoke_cell(SUITES, tmp_path, "translation/multi30k", data=tmp_path, parts="cross", merges=100)
    result = translation.run_multi30k(given, lambda fraction, text: None)
    assert {"BLEU", "validation loss", "largest logit", "entropy"} == result.metrics.keys()
    assert all(math.isfinite(value) for value in result.metrics.values())
    model = torch.load(given.workdir / "checkpoints/checkpoint_best.pt", weights_only=False)["model"]
    assert [name.split(".")[-3] for name in model if name.endswith("attention_is_not_standard")] == ["encoder_attn"]


class TestSuites(HostSuites):
    committed = ("lm/pydocs", "time/fairseq")
