"""The start that the shipped yamls offer in a comment is one that fairseq takes."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import USER_DIR
from fairseq.data import Dictionary

from devtools.configs import with_start
from quest_suites.fairseq import tasks

OFFERED = sorted((Path(USER_DIR) / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", OFFERED, ids=lambda path: path.stem)
def test_the_commented_start_builds(path, tmp_path, monkeypatch):
    from fairseq import models

    (tmp_path / path.name).write_text(with_start(path))
    monkeypatch.setattr(tasks, "CONFIGS", tmp_path)
    cfg = tasks.configuration(path.stem)
    words = Dictionary()
    words.add_symbol("word")
    task = SimpleNamespace(source_dictionary=words, target_dictionary=words, dictionary=words, output_dictionary=words)
    report = models.build_model(cfg.model, task).attention_report
    assert report.attention == "quest(init=12.0)"
    for replacement in report.replacements:
        assert replacement.query_norms == pytest.approx([12] * len(replacement.query_norms), rel=1e-4)
