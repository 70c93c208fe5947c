"""Parts that fairseq loads while it builds a model: --load-pretrained-encoder-from, and --w2v-path."""

from types import SimpleNamespace

import pytest
import torch
from conftest import DECODER, ENCODER, USER_DIR, dictionary, options
from fairseq import models, tasks
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.options import get_training_parser, parse_args_and_arch
from omegaconf import OmegaConf

import quest_core
from quest_core.hosts.inject import REPORT
from quest_fairseq.adapter import inject_asked
from quest_fairseq.config import read

ONE = [*ENCODER, "--encoder-layers", "1"]
S2T = [*ONE, *DECODER, "--decoder-layers", "1", "--conv-channels", "16"]
SOUND = ["--conv-feature-layers", "[(16, 10, 5)] + [(16, 3, 2)]", "--final-dim", "8", *ONE]
KEY = "encoder.transformer_layers.0.self_attn.k_proj.weight"
WARNING = "trained with standard attention"


def translator(arch, *arguments):
    args = options(arch, *S2T, *arguments)
    vars(args).update(input_feat_per_channel=8, input_channels=1)
    return models.build_model(args, SimpleNamespace(source_dictionary=dictionary(), target_dictionary=dictionary()))


def saved(path, model, cfg=None):
    state = {"cfg": cfg, "args": None if cfg else options("s2t_transformer", *S2T), "extra_state": {}}
    state["optimizer_history"] = [{"num_updates": 1, "criterion_name": "", "best_loss": 1}]
    torch.save({"model": model.state_dict(), **state}, path)
    return str(path)


def listener(path, **given):
    """A wav2vec 2.0 for fine-tuning, with the pretrained one at `path` in it."""
    cfg = OmegaConf.structured(models.MODEL_DATACLASS_REGISTRY["quest_wav2vec_ctc"](w2v_path=path, data="", **given))
    OmegaConf.set_struct(cfg, False)
    cfg._name, cfg.ddp_backend, cfg.normalize = "quest_wav2vec_ctc", "c10d", False
    return models.build_model(cfg, SimpleNamespace(target_dictionary=dictionary()))


def pretrained(path, arch, *arguments):
    given = ["data", "--arch", arch, "--task", "audio_pretraining", "--user-dir", USER_DIR, *SOUND, *arguments]
    cfg = convert_namespace_to_omegaconf(parse_args_and_arch(get_training_parser(), input_args=given))
    return saved(path, tasks.setup_task(cfg.task).build_model(cfg.model), OmegaConf.to_container(cfg))


def attentions(model):
    return {str(module.mechanism.config) for module in model.modules() if hasattr(module, "mechanism")}


@pytest.mark.filterwarnings("error::quest_core.AttentionMismatchWarning")
@pytest.mark.parametrize("attention", ["quest", "qknorm-hs+gqa(kv_heads=2)", "quest(init=12)"])
def test_an_encoder_of_the_same_attention_is_loaded(attention, tmp_path):
    trained = translator("quest_s2t_transformer", "--attention", attention)
    path = saved(tmp_path / "speech.pt", trained)
    model = translator("quest_s2t_transformer", "--attention", attention, "--load-pretrained-encoder-from", path)
    for name, weight in trained.encoder.state_dict().items():
        assert torch.equal(model.encoder.state_dict()[name], weight)
    assert [row.path.partition(".")[0] for row in model.attention_report.replacements] == ["encoder", *["decoder"] * 2]
    assert not model.attention_report.left_alone


def test_an_encoder_of_another_attention_is_refused_or_converted(tmp_path):
    stock = translator("s2t_transformer")
    path = saved(tmp_path / "stock.pt", stock)
    given = ["--load-pretrained-encoder-from", path]
    with pytest.warns(quest_core.AttentionMismatchWarning, match=WARNING):
        translator("quest_s2t_transformer", *given)
    with pytest.raises(quest_core.CheckpointError, match="sets the norms of new projections"):
        translator("quest_s2t_transformer", "--attention", "quest(init=12)", *given)
    given += ["--attention", "quest+gqa(kv_heads=2)", "--attention-from", "standard"]
    pooled = translator("quest_s2t_transformer", *given).state_dict()[KEY]
    torch.testing.assert_close(pooled.view(2, 4, 16), stock.state_dict()[KEY].view(2, 2, 4, 16).mean(1))
    path = saved(tmp_path / "qnorm.pt", translator("quest_s2t_transformer", "--attention", "qnorm"))
    with pytest.raises(quest_core.CheckpointError, match="trained with attention 'qnorm'"):
        translator("quest_s2t_transformer", "--load-pretrained-encoder-from", path)


def test_a_part_without_attention_stays_as_it_is():
    part = torch.nn.LSTM(4, 4)
    inject_asked(read(options("quest_s2t_transformer", *S2T)), part, part=True)
    assert not hasattr(part, REPORT)


@pytest.mark.filterwarnings("error::quest_core.AttentionMismatchWarning")
def test_a_pretrained_wav2vec_keeps_its_attention_or_is_compared(tmp_path):
    path = pretrained(tmp_path / "quest.pt", "quest_wav2vec2")
    assert attentions(listener(path)) == {"quest"}
    path = pretrained(tmp_path / "qnorm.pt", "quest_wav2vec2", "--attention", "qnorm")
    with pytest.raises(quest_core.CheckpointError, match="trained with attention 'qnorm'"):
        listener(path)
    assert attentions(listener(path, attention_from="qnorm")) == {"quest"}
    for arch, *attention in (("quest_wav2vec2", "--attention", "standard"), ("wav2vec2",)):
        path = pretrained(tmp_path / "stock.pt", arch, *attention)
        with pytest.warns(quest_core.AttentionMismatchWarning, match=WARNING):
            assert attentions(listener(path)) == {"quest"}
    with pytest.raises(quest_core.QuestError, match="leave the option out"):
        listener(path, attention="quest(init=12)")
