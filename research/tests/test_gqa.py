"""gqa/*: pooling equals averaging by hand, groups equal the paper's formula, and what a cell measures."""

import pytest
import torch
from cells import cell, run

from quest_core import AttentionConfig
from quest_research.suites import gqa

SIZES = {"layers": 2, "width": 32, "heads": 4}
SMALL = cell("gqa/fashion-mnist", "half").options | SIZES


@pytest.mark.parametrize("name", ["gqa", "kdgqa", "dgqa", "pgqa", "quest+gqa"])
def test_loading_averages_the_heads_of_a_group(name):
    config = AttentionConfig.parse(name)
    base = gqa.regrouped(config, "mha")
    trained = gqa.build(base, 1, SMALL)
    for parameter in trained.parameters():
        torch.nn.init.normal_(parameter)
    pooled = gqa.convert(trained, base, gqa.with_heads(config, 2), 2, SMALL)
    for old, new in zip(trained.blocks, pooled.blocks, strict=True):
        assert torch.equal(old.attention.q_proj.weight, new.attention.q_proj.weight)
        for role in ("k_proj", "v_proj"):
            by_head = getattr(old.attention, role).weight.reshape(4, 8, 32)
            wanted = torch.stack([(by_head[0] + by_head[1]) / 2, (by_head[2] + by_head[3]) / 2])
            torch.testing.assert_close(getattr(new.attention, role).weight, wanted.reshape(16, 32))
    assert torch.equal(trained.classifier.weight, pooled.classifier.weight)


def test_the_score_stays_when_the_grouping_changes():
    config = AttentionConfig.parse("quest+dgqa(window=7, evolution=difference)")
    assert str(gqa.regrouped(config, "mha")) == "quest"
    assert str(gqa.with_heads(gqa.regrouped(config, "gqa"), 2)) == "quest+gqa(kv_heads=2)"
    assert gqa.with_heads(AttentionConfig.parse("standard"), 2) == AttentionConfig.parse("standard")


def test_group_sizes_follow_the_key_norms():
    wide = SMALL | {"layers": 1, "heads": 8}
    model = gqa.build(AttentionConfig.parse("kdgqa(kv_heads=4)"), 0, wide).eval()
    with torch.no_grad():
        for head, factor in enumerate((1.0, 3.0, 1.5, 2.2)):
            model.blocks[0].attention.k_proj.weight[4 * head : 4 * head + 4] *= factor
    images = torch.randn(5, 28, 28)
    keys = []
    model.blocks[0].attention.k_proj.register_forward_hook(lambda module, args, out: keys.append(out))
    sizes = gqa.group_sizes(model, images)
    norms = keys[0].reshape(5, 16, 4, 4).square().sum((1, 3)).sqrt().mean(0)  # Frobenius, averaged over the batch
    scaled = (norms - norms.min()) / (norms.max() - norms.min())
    share = 8 * scaled / scaled.sum()
    wanted = share.int().tolist()
    for group in (share - share.floor()).argsort(descending=True)[: 8 - sum(wanted)].tolist():
        wanted[group] += 1
    assert sizes == [wanted]
    assert wanted[0] == 0 < wanted[2] < wanted[1]
    assert gqa.non_uniform(model, images) == 100
    plain = gqa.build(AttentionConfig.parse("gqa(kv_heads=2)"), 0, SMALL | {"layers": 1}).eval()
    assert gqa.group_sizes(plain, images) == [[2, 2]]
    assert gqa.non_uniform(plain, images) == 0


def test_halves_share_no_class_and_no_image(data):
    given = cell(
        "gqa/fashion-mnist", "half", "gqa", data, smoke=False, train=100, downstream=80, validation=50, test=60
    )
    early, late = gqa.halves(given, given.options)
    assert [len(early.train[1]), len(late.train[1]), len(early.test[1])] == [100, 80, 60]
    for half, classes in ((early, set(range(5))), (late, set(range(5, 10)))):
        for _, labels in (half.train, half.validation, half.test):
            assert set(labels.tolist()) <= classes
        kept = {image.numpy().tobytes() for image in half.train[0]}
        assert not kept & {image.numpy().tobytes() for image in half.validation[0]}
    assert early.train[0].mean().abs() < 1e-5
    assert early.train[0].std() == pytest.approx(1, abs=1e-4)


def test_cells_of_one_seed_share_their_pretraining(data):
    plain, grouped, dynamic = (
        run(cell("gqa/fashion-mnist", "half", name, data, **SIZES)).metrics
        for name in ("standard", "gqa", "dgqa(window=1)")
    )
    assert plain["pretrained"] == grouped["pretrained"] == dynamic["pretrained"]
    assert grouped["pooled/kv_heads=2"] == dynamic["pooled/kv_heads=2"]  # no step has changed its groups yet
    assert plain["accuracy/kv_heads=1"] == plain["accuracy/kv_heads=2"] == plain["accuracy"]
    assert grouped["accuracy/kv_heads=2"] == grouped["accuracy"]
    for metrics in (plain, grouped):
        assert metrics["fine-tuned"] == metrics["fine-tuned from gqa"]
        assert metrics["non-uniform groups"] == 0
    assert dynamic["time of gqa"] > 0
