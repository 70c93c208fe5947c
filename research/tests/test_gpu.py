"""gpu/attention on the CPU at toy sizes, and its refusal without CUDA."""

import pytest
import torch

import quest_core
from quest_bench.cli import app_main
from quest_bench.groups import read_groups
from quest_core.errors import PluginError
from quest_research.speed import gpu
from quest_suites.contract import Cell

without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has the GPU whose absence is tested")


@without_cuda
def test_it_is_refused_without_cuda(tmp_path):
    with pytest.raises(PluginError, match="needs CUDA, and torch .* sees no GPU"):
        gpu.run(Cell("gpu/attention", "N=25", "quest", 0, False, None, {}, tmp_path), lambda *_: None)


@pytest.mark.slow
def test_a_report_compares_attentions_at_each_length(tmp_path):
    attentions = "standard,quest+gqa(kv_heads=2),aft-full"
    command = ["run", "gpu/attention/N=197,N=25", "--attention", attentions, "--seeds", "0-1", "--smoke"]
    assert app_main([*command, "--jobs", "1", "--out", str(tmp_path)]) == 0
    groups = read_groups(tmp_path, "standard")
    assert [group.task for group in groups] == ["N=197", "N=197", "N=25", "N=25"]
    assert [item.name for item in groups[0].items] == ["flash", "math"]
    for group in groups:
        assert [row.finished for row in group.rows] == [2, 2, 2]
        assert all(value > 0 for row in group.rows for value in row.values.values())
    (cell, *_) = [cell for cell in groups[0].cells if "gqa" in cell.spec["attention"]]
    assert cell.result["details"]["key heads"] == 2
    assert cell.result["details"]["fastest"] in gpu.ON_CPU
    assert cell.result["metrics"]["ms"] > 0


def test_a_machine_that_slows_down_does_not_change_a_ratio(monkeypatch, tmp_path):
    """Each turn takes longer than the one before, and the attention always takes twice a back-end's time."""
    turns = iter(range(10_000))

    def timer(attend, *_):
        own = isinstance(attend, quest_core.Mechanism)
        return lambda repeats: (1 + next(turns) / 1e4) * (2.0 if own else 1.0)

    monkeypatch.setattr(gpu, "timer", timer)
    cell = Cell("gpu/attention", "N=25", "quest", 0, True, None, {}, tmp_path)
    result = gpu.run(cell, lambda *_: None)
    assert result.metrics["time of sdpa"] == pytest.approx(2, rel=0.01)
    assert result.metrics["forward time of sdpa/math"] == pytest.approx(2, rel=0.01)


def test_a_back_end_that_refuses_is_left_out_by_name(monkeypatch, tmp_path):
    cell = Cell("gpu/attention", "N=25", "standard", 0, True, None, {}, tmp_path)
    whole = gpu.peers

    def refuse(*_):
        raise RuntimeError("no kernel")

    monkeypatch.setattr(gpu, "peers", lambda *given: {**whole(*given), "flash": (refuse, gpu.contextlib.nullcontext)})
    result = gpu.run(cell, lambda *_: None)
    assert result.details["left out"] == dict.fromkeys(["flash", "forward flash"], "RuntimeError: no kernel")
    assert result.details["fastest"] == "math"
    monkeypatch.setattr(gpu, "peers", lambda *given: {"flash": (refuse, gpu.contextlib.nullcontext)})
    with pytest.raises(PluginError, match="no back-end of scaled_dot_product_attention takes N=25: .*no kernel"):
        gpu.run(cell, lambda *_: None)


def test_contenders_compute_what_their_names_say():
    from torch.nn.attention.flex_attention import flex_attention

    q, k, v = torch.randn(3, 1, 4, 6, 8)
    expected = quest_core.attention(q, k, v, "quest")
    torch.testing.assert_close(gpu.quest_by_flex(flex_attention)(q, k, v), expected)
    names = {"flash", "cudnn", "efficient", "math"}
    assert set(gpu.peers(6, False, True)) == names
    assert set(gpu.peers(4096, False, True)) == names - {"math"}
    for attend, context in gpu.peers(6, False, False).values():
        with context():
            torch.testing.assert_close(attend(q, k, v), quest_core.attention(q, k, v, "standard"))
