"""fairseq's own command-line tools, end to end on a tiny text."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import USER_DIR, build, dictionary
from fairseq import checkpoint_utils
from fairseq.models import build_model
from fairseq.models.transformer import TransformerModel
from fairseq.models.transformer_lm import TransformerLanguageModel

from devtools.configs import with_start
from quest_core.checkpoints import ENTRY, decode
from quest_fairseq.config import parse
from quest_suites.fairseq import tasks

ATTENTIONS = ["quest", "aft-local(window=4)", "quest+gqa(kv_heads=2)"]


def losses(log):
    """What fairseq-train printed of every update and validation."""
    return re.findall(r"\bloss[= ][\d.]+|\bppl[= ][\d.]+|gnorm=[\d.]+", log)


def hypotheses(log):
    return [line for line in log.splitlines() if re.match(r"[HDP]-\d+\t", line)]


def words_and_scores(lines):
    """The words of hypotheses, and all scores: fairseq prints the sum of a hypothesis with every digit of a float."""
    fields = [line.split("\t") for line in lines]
    words = [f"{kind}\t{rest[-1]}" if kind[0] != "P" else kind for kind, *rest in fields]
    scores = [float(x) for kind, *rest in fields for x in (rest[0].split() if kind[0] == "P" else rest[:1])]
    return words, scores


def assert_same(ours, stock):
    assert len(stock) == 36
    (words, scores), (stock_words, stock_scores) = words_and_scores(ours), words_and_scores(stock)
    assert words == stock_words
    assert scores == pytest.approx(stock_scores, abs=1.5e-4)  # four digits are printed, and the last may differ by one


def generate(tools, data, checkpoint, *arguments):
    given = ["--path", checkpoint, "--cpu", "--user-dir", USER_DIR, "--batch-size", "6", "--num-workers", "0"]
    given += ["--required-batch-size-multiple", "1", "--beam", "3"]
    return tools("generate", data, *given, *arguments)


def perplexity(log):
    found = re.search(r"Perplexity: ([\d.]+)", log)
    assert found, log[-2000:]
    return float(found[1])


# --- standard is stock ----------------------------------------------------------------------------------------------


def test_standard_trains_evaluates_and_generates_as_stock(tools, lm_data, tmp_path):
    """16 seeded updates with dropout, to the printed digits; then the same hypotheses with the same scores."""
    drop = ["--dropout", "0.1", "--attention-dropout", "0.1"]
    stock = tools.train(lm_data, *drop, "--save-dir", tmp_path / "stock", arch="transformer_lm", updates=16)
    ours = tools.train(lm_data, *drop, "--save-dir", tmp_path / "ours", "--attention", "standard", updates=16)
    assert len(losses(stock)) > 48
    assert losses(ours) == losses(stock)
    task = ["--task", "language_modeling", "--sample-break-mode", "eos", "--prefix-size", "2", "--max-len-b", "12"]
    found = [
        (
            perplexity(tools.evaluate(lm_data, tmp_path / name / "checkpoint_best.pt")),
            hypotheses(generate(tools, lm_data, tmp_path / name / "checkpoint_best.pt", *task)),
        )
        for name in ("stock", "ours")
    ]
    assert found[1][0] == found[0][0]
    assert_same(found[1][1], found[0][1])


@pytest.mark.slow
def test_translation_trains_and_generates_as_stock(tools, mt_data, tmp_path):
    shape = "--encoder-layers 2 --decoder-layers 2 --encoder-embed-dim 16 --encoder-ffn-embed-dim 32 "
    shape += "--encoder-attention-heads 2 --decoder-attention-heads 2 --optimizer adam --lr 0.003 --max-tokens 200 "
    shape += "--encoder-normalize-before --decoder-normalize-before "
    shape += "--share-all-embeddings --dropout 0.1 --attention-dropout 0.1 --num-workers 0 --max-update 12 --seed 2 "
    shape += "--cpu --log-format simple --log-interval 1 --criterion label_smoothed_cross_entropy --label-smoothing 0.1"
    logs, outputs = [], []
    for arch, extra in (("transformer", []), ("quest_transformer", ["--attention", "standard"])):
        given = [mt_data, "--arch", arch, "--user-dir", USER_DIR, "--save-dir", tmp_path / arch, *extra]
        logs.append(losses(tools("train", *given, *shape.split())))
        outputs.append(hypotheses(generate(tools, mt_data, tmp_path / arch / "checkpoint_best.pt")))
    assert len(logs[0]) > 30
    assert logs[1] == logs[0]
    assert_same(outputs[1], outputs[0])


# --- every tool with other mechanisms -------------------------------------------------------------------------------


def test_train_resume_evaluate_generate(tools, lm_data, tmp_path):
    given = ["--attention", "quest+gqa(kv_heads=2)", "--save-dir", tmp_path]
    first = tools.train(lm_data, *given, updates=4)
    rest = tools.train(lm_data, *given, updates=8)
    assert "Loaded checkpoint" in rest
    assert re.findall(r"num_updates=(\d)", first) + re.findall(r"num_updates=(\d)", rest) == list("12345678")
    before, after = ([float(x) for x in re.findall(r"loss=([\d.]+)", log)] for log in (first, rest))
    assert after[0] < before[0] - 0.5  # it went on, and did not begin again
    assert 1 < perplexity(tools.evaluate(lm_data, tmp_path / "checkpoint_best.pt")) < 40
    task = ["--task", "language_modeling", "--sample-break-mode", "eos", "--prefix-size", "2", "--max-len-b", "12"]
    assert len(hypotheses(generate(tools, lm_data, tmp_path / "checkpoint_last.pt", *task))) == 36


@pytest.mark.slow
@pytest.mark.parametrize("attention", [*ATTENTIONS, {"name": "quest", "kv_heads": 2}], ids=str)
def test_hydra_train(attention, tools, lm_data, tmp_path):
    """A yaml that says `attention` as a name or as a mapping."""
    model, short = {"attention": attention, "decoder_layers": 2}, {"max_update": 3}
    tools.hydra(tmp_path, lm_data, model=model, optimization=short, task={"tokens_per_sample": 24})
    state = checkpoint_utils.load_checkpoint_to_cpu(str(tmp_path / "out" / "checkpoint_last.pt"))
    assert state["optimizer_history"][-1]["num_updates"] == 3
    (spelled,) = {decode(value) for name, value in state["model"].items() if name.endswith(ENTRY)}
    assert parse(spelled).name == parse(attention).name
    assert set(parse(spelled).options) >= set(parse(attention).options)  # aft-local also learns positions
    assert perplexity(tools.evaluate(lm_data, tmp_path / "out" / "checkpoint_last.pt")) > 1


@pytest.mark.slow
def test_interactive_score_and_hub(tools, mt_data, tmp_path):
    given = [mt_data, "--arch", "quest_transformer_tiny", "--user-dir", USER_DIR, "--attention", "quest+mqa", "--cpu"]
    given += ["--save-dir", tmp_path, "--optimizer", "adam", "--max-tokens", "300", "--max-update", "3"]
    tools("train", *given, "--num-workers", "0", "--share-all-embeddings")
    output = generate(tools, mt_data, tmp_path / "checkpoint_best.pt")
    for kind in "HT":
        lines = sorted(line.split("\t") for line in output.splitlines() if re.match(rf"{kind}-\d+\t", line))
        (tmp_path / kind).write_text("".join(f"{line[-1]}\n" for line in lines))
    assert "BLEU" in tools("score", "--sys", tmp_path / "H", "--ref", tmp_path / "T")
    (tmp_path / "input").write_text("w1 w6 w11 w16\nw3 w8\n")
    talk = ["--path", tmp_path / "checkpoint_best.pt", "--cpu", "--user-dir", USER_DIR, "--input", tmp_path / "input"]
    assert len(hypotheses(tools("interactive", mt_data, *talk, "--beam", "2"))) == 6
    hub = TransformerModel.from_pretrained(str(tmp_path), "checkpoint_best.pt", str(mt_data))
    assert isinstance(hub.translate("w1 w6 w11", beam=2), str)


def test_hub_samples_from_a_language_model(tools, lm_data, tmp_path):
    tools.train(lm_data, "--save-dir", tmp_path, updates=2)
    hub = TransformerLanguageModel.from_pretrained(str(tmp_path), "checkpoint_best.pt", str(lm_data))
    assert hub.sample("w1 w6", beam=2, max_len_b=8).startswith("w1 w6")
    assert hub.score("w1 w6 w11")["positional_scores"].shape == (3,)


@pytest.mark.slow
def test_console_script_with_user_dir_from_the_module(lm_data, tmp_path):
    """As a user types it: a new process, --user-dir from `python -m quest_fairseq`, a mapping as the attention."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    shown = subprocess.run([sys.executable, "-m", "quest_fairseq"], capture_output=True, text=True, env=environment)
    assert shown.stdout.strip() == USER_DIR
    command = [Path(sys.executable).with_name("fairseq-train"), lm_data, "--user-dir", USER_DIR, "--cpu"]
    command += ["--task", "language_modeling", "--arch", "quest_transformer_lm_gpt2_tiny", "--attention-dropout", "0"]
    command += ["--attention", '{"name": "aft-local", "window": 3}', "--optimizer", "adam", "--max-update", "2"]
    command += ["--tokens-per-sample", "24", "--batch-size", "8", "--save-dir", tmp_path, "--num-workers", "0"]
    command += ["--required-batch-size-multiple", "1"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "attention=aft-local(max_length=24, window=3) in 2 modules" in done.stdout  # fairseq logs there


# --- models ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "parameters"), [("small", 43_759_616), ("medium", 89_583_616)])
def test_the_papers_models_have_the_papers_size(size, parameters):
    cfg = tasks.configuration(f"wikitext103-{size}")
    symbols = dictionary(0)
    symbols.symbols += [f"{i}" for i in range(267_744 - len(symbols))]
    symbols.count += [1] * (len(symbols.symbols) - len(symbols.count))
    assert len(symbols) == 267_744
    cfg.task.data, cfg.model.max_target_positions = ".", cfg.task.tokens_per_sample
    with torch.device("meta"):
        model = build_model(cfg.model, SimpleNamespace(source_dictionary=symbols, target_dictionary=symbols))
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


SHIPPED = [("pydocs", 8), ("wikitext103-small", 96), ("wikitext103-medium", 56), ("wikitext103-transformer-xl", 60)]


@pytest.mark.parametrize(("name", "total"), SHIPPED)
def test_shipped_yamls_keep_the_sequences_an_update(name, total, monkeypatch):
    cfg = tasks.configuration(name)
    for processes in (1, 2, 4, 8):
        cfg.distributed_training.distributed_world_size, cfg.optimization.update_freq = processes, [1]
        if total % processes:
            refused = f"{total} sequences an update cannot be divided among {processes} processes"
            with pytest.raises(Exception, match=refused):
                _ = cfg.dataset.batch_size
            continue
        assert cfg.dataset.batch_size * processes == total
        cfg.optimization.update_freq = [2]
        if total % (2 * processes) == 0:
            assert cfg.dataset.batch_size * processes * 2 == total
        cfg.optimization.update_freq = [2, 1]
        with pytest.raises(Exception, match="which must be one number"):
            _ = cfg.dataset.batch_size
    monkeypatch.setenv("WORLD_SIZE", "4")  # of torchrun, which comes first
    assert tasks.configuration(name).dataset.batch_size * 4 == total


OFFERED = sorted((Path(USER_DIR) / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", OFFERED, ids=lambda path: path.stem)
def test_the_start_that_a_yaml_offers_in_a_comment_is_one_that_fairseq_takes(path, tmp_path, monkeypatch):
    (tmp_path / path.name).write_text(with_start(path))
    monkeypatch.setattr(tasks, "CONFIGS", tmp_path)
    words = dictionary()
    task = SimpleNamespace(source_dictionary=words, target_dictionary=words, dictionary=words, output_dictionary=words)
    report = build_model(tasks.configuration(path.stem).model, task).attention_report
    assert report.attention == "quest(init=12.0)"
    for replacement in report.replacements:
        assert replacement.query_norms == pytest.approx([12] * len(replacement.query_norms), rel=1e-4)


def test_learned_positions_are_as_many_as_the_model_has():
    model = build("quest_transformer_lm", "--attention", "aft-full")
    assert model.decoder.layers[0].self_attn.config.option("max_length") == 32
    model = build("quest_transformer_lm", "--attention", "aft-full(max_length=48)")
    assert model.decoder.layers[0].self_attn.config.option("max_length") == 48
