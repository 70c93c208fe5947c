"""What every framework's training is held to on a GPU: inherit :class:`HostTraining` in ``test_<host>.py``.

On the CPU the same tests run at toy sizes, where the framework's own mixed precision allows it.
"""

from __future__ import annotations

import math
import statistics
from typing import Any, ClassVar

import pytest
import torch

from .measure import back_ends, peak_bytes


class HostTraining:
    """Trainings by a framework's own trainer.

    Attributes:
        steps: training steps of a run, on the CPU and on a GPU.
        compiles: whether the framework's model can go through torch.compile.
        fused: implementations of scaled_dot_product_attention that a mixed-precision step on a GPU may use, and must
            use one of.
        half_on_cpu: what "bf16" and "fp16" are without a GPU: the type that attention gets, or a pattern of
            the error.
    """

    steps: ClassVar[dict[str, int]] = {"cpu": 8, "cuda": 40}
    compiles = True
    fused = frozenset({"flash", "cudnn"})

    half_on_cpu: ClassVar[dict[str, torch.dtype | str]]

    def train(
        self, attention: str | None, *, device: str, precision: str, steps: int, compiled: bool = False
    ) -> list[float]:
        """Train from one seed for `steps` steps of the same data, and return the loss of each.

        Args:
            attention: what the framework's config says under `attention`; None leaves the framework as it is.
            device: "cpu" (small enough for seconds) or "cuda" (large enough that the GPU is the limit).
            precision: "fp32", or "bf16" or "fp16" by the framework's own mixed precision.
            compiled: send the model through torch.compile, with the back-end `compiler(device)`.
        """
        raise NotImplementedError

    def test_standard_trains_as_the_framework_does(self, device: str) -> None:
        stock, own = (
            self.train(attention, device=device, precision="fp32", steps=self.steps[device])
            for attention in (None, "standard")
        )
        assert own == pytest.approx(stock, rel=1e-4 if device == "cpu" else 5e-3)

    @pytest.mark.parametrize("attention", ["quest", "qknorm-hs", "quest+gqa(kv_heads=2)"])
    @pytest.mark.parametrize(
        ("device", "precision"),
        [("cpu", "fp32"), *(pytest.param("cuda", p, marks=pytest.mark.gpu) for p in ("fp32", "bf16", "fp16"))],
    )
    def test_training_converges(self, attention: str, device: str, precision: str) -> None:
        steps = self.steps[device]
        losses = self.train(attention, device=device, precision=precision, steps=steps)
        assert len(losses) == steps
        assert all(map(math.isfinite, losses))
        quarter = max(1, steps // 4)
        assert statistics.mean(losses[-quarter:]) < statistics.mean(losses[:quarter])

    @pytest.mark.parametrize("precision", ["bf16", "fp16"])
    def test_half_precision_on_a_cpu(self, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """docs/gpu.md says what each framework does there."""
        given, dtypes = torch.nn.functional.scaled_dot_product_attention, set()

        def watched(q: torch.Tensor, *arguments: Any, **named: Any) -> torch.Tensor:
            dtypes.add(q.dtype)
            return given(q, *arguments, **named)

        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
        steps, expected = self.steps["cpu"], self.half_on_cpu[precision]
        full = self.train("quest", device="cpu", precision="fp32", steps=steps)
        dtypes.clear()
        if isinstance(expected, str):
            with pytest.raises(Exception, match=expected):
                self.train("quest", device="cpu", precision=precision, steps=steps)
            return
        torch.manual_seed(0)
        half = self.train("quest", device="cpu", precision=precision, steps=steps)
        assert dtypes == {expected}
        assert half == pytest.approx(full, rel=0.02)

    @pytest.mark.parametrize(
        ("device", "precision"), [("cpu", "fp32"), pytest.param("cuda", "bf16", marks=pytest.mark.gpu)]
    )
    def test_quest_reaches_a_fused_kernel(self, device: str, precision: str) -> None:
        used = back_ends(lambda: self.train("quest", device=device, precision=precision, steps=1))
        assert used
        assert used <= self.fused

    @pytest.mark.slow
    def test_compiled_training_equals_eager(self, device: str) -> None:
        if not self.compiles:
            with pytest.raises(Exception):  # noqa: B017, PT011  # whatever the framework says; if it works, say compiles
                self.train("quest", device=device, precision="fp32", steps=2, compiled=True)
            return
        eager, compiled = (
            self.train("quest", device=device, precision="fp32", steps=2, compiled=c) for c in (False, True)
        )
        assert compiled == pytest.approx(eager, rel=1e-3 if device == "cpu" else 1e-2)

    @pytest.mark.gpu
    def test_peak_memory(self) -> None:
        """QUEST keeps unit keys in addition to the tensors of standard attention."""
        peaks = {
            attention: peak_bytes(lambda a=attention: self.train(a, device="cuda", precision="bf16", steps=2), "cuda")
            for attention in ("standard", "quest")
        }
        assert peaks["quest"] <= 1.15 * peaks["standard"]


def compiler(device: str) -> str:
    """The torch.compile back-end to use: on the CPU one that needs no C++ compiler."""
    return "inductor" if device == "cuda" else "aot_eager"
