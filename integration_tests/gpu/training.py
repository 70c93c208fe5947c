"""What every framework's training is held to on a GPU: inherit :class:`HostTraining` in ``test_<host>.py``.

On the CPU the same tests run at toy sizes, where the framework's own mixed precision allows it.
"""

import json
import math
import random
import statistics
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from .measure import against, back_ends, peak_bytes, versions

RESULTS = Path("runs/gpu")
"""Where step times go, for `python -m integration_tests.gpu.table`; under the folder that pytest runs in."""


@dataclass(frozen=True)
class Run:
    """One training: the loss of every step, and the seconds that each took on the device."""

    losses: list[float]
    seconds: list[float]


class Clock:
    """Keeps the loss and the time of every step; a callback of a framework inherits it or is made of it."""

    def __init__(self, device: str) -> None:
        self.on, self.seen = device, Run([], [])

    def begin(self, *_: object, **__: object) -> None:
        self.started = now(self.on)

    def end(self, loss: torch.Tensor) -> None:
        self.seen.seconds.append(now(self.on) - self.started)
        self.seen.losses.append(loss.item())


class HostTraining:
    """Trainings by a framework's own trainer.

    Attributes:
        host: the framework's name, and `distribution` that of its package.
        model: the architecture in words; the table shows it.
        steps: training steps of a run, on the CPU and on a GPU.
        rounds: rounds of the step times on a GPU.
        compiles: whether the framework's model can go through torch.compile.
        fused: implementations of scaled_dot_product_attention that a mixed-precision step on a GPU may use, and must
            use one of.
        half_on_cpu: what "bf16" and "fp16" are without a GPU: the type that attention gets, or a pattern of
            the error.
    """

    host: str
    distribution: str
    model: str
    steps: ClassVar[dict[str, int]] = {"cpu": 8, "cuda": 40}
    rounds = 5
    compiles = True
    fused = frozenset({"flash", "cudnn"})

    half_on_cpu: ClassVar[dict[str, torch.dtype | str]]

    def train(self, attention: str | None, *, device: str, precision: str, steps: int, compiled: bool = False) -> Run:
        """Train from one seed for `steps` steps of the same data.

        Args:
            attention: what the framework's config says under `attention`; None leaves the framework as it is.
            device: "cpu" (small enough for seconds) or "cuda" (large enough that the GPU is the limit).
            precision: "fp32", or "bf16" or "fp16" by the framework's own mixed precision.
            compiled: send the model through torch.compile, with the back-end `compiler(device)`.
        """
        raise NotImplementedError

    def test_standard_trains_as_the_framework_does(self, device):
        """The first steps: a GPU adds in any order, and training enlarges the difference."""
        stock, own = (
            self.train(attention, device=device, precision="fp32", steps=self.steps["cpu"]).losses
            for attention in (None, "standard")
        )
        assert own == pytest.approx(stock, rel=1e-4 if device == "cpu" else 5e-3)

    @pytest.mark.parametrize("attention", ["quest", "qknorm-hs", "quest+gqa(kv_heads=2)"])
    @pytest.mark.parametrize(
        ("device", "precision"),
        [("cpu", "fp32"), *(pytest.param("cuda", p, marks=pytest.mark.gpu) for p in ("fp32", "bf16", "fp16"))],
    )
    def test_training_converges(self, attention, device, precision):
        steps = self.steps[device]
        losses = self.train(attention, device=device, precision=precision, steps=steps).losses
        assert len(losses) == steps
        assert all(map(math.isfinite, losses))
        quarter = max(1, steps // 4)
        assert statistics.mean(losses[-quarter:]) < statistics.mean(losses[:quarter])

    @pytest.mark.parametrize("precision", ["bf16", "fp16"])
    def test_half_precision_on_a_cpu(self, precision, monkeypatch):
        """docs/gpu.md says what each framework does there."""
        given, dtypes = torch.nn.functional.scaled_dot_product_attention, set()

        def watched(q, *arguments, **named):
            dtypes.add(q.dtype)
            return given(q, *arguments, **named)

        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
        steps, expected = self.steps["cpu"], self.half_on_cpu[precision]
        full = self.train("quest", device="cpu", precision="fp32", steps=steps).losses
        dtypes.clear()
        if isinstance(expected, str):
            with pytest.raises(Exception, match=expected):
                self.train("quest", device="cpu", precision=precision, steps=steps)
            return
        torch.manual_seed(0)
        half = self.train("quest", device="cpu", precision=precision, steps=steps).losses
        assert dtypes == {expected}
        assert half == pytest.approx(full, rel=0.02)

    @pytest.mark.parametrize(
        ("device", "precision"), [("cpu", "fp32"), pytest.param("cuda", "bf16", marks=pytest.mark.gpu)]
    )
    def test_quest_reaches_a_fused_kernel(self, device, precision):
        used = back_ends(lambda: self.train("quest", device=device, precision=precision, steps=1))
        assert used
        assert used <= self.fused

    @pytest.mark.slow
    def test_compiled_training_equals_eager(self, device):
        if not self.compiles:
            with pytest.raises(Exception):  # noqa: B017, PT011  # whatever the framework says; if it works, say compiles
                self.train("quest", device=device, precision="fp32", steps=2, compiled=True)
            return
        eager, compiled = (
            self.train("quest", device=device, precision="fp32", steps=2, compiled=c).losses for c in (False, True)
        )
        assert compiled == pytest.approx(eager, rel=1e-3 if device == "cpu" else 1e-2)

    @pytest.mark.gpu
    def test_peak_memory(self):
        """QUEST keeps unit keys in addition to the tensors of standard attention."""
        peaks = {
            attention: peak_bytes(lambda a=attention: self.train(a, device="cuda", precision="bf16", steps=2), "cuda")
            for attention in ("standard", "quest")
        }
        assert peaks["quest"] <= 1.15 * peaks["standard"]

    @pytest.mark.parametrize(
        ("device", "precisions"), [("cpu", ("fp32",)), pytest.param("cuda", ("bf16", "fp32"), marks=pytest.mark.gpu)]
    )
    def test_step_time(self, device, precisions, tmp_path):
        """Stock, standard and quest train in turns; on a GPU the times go to the table."""
        rounds, steps = (self.rounds, 24) if device == "cuda" else (2, self.steps[device])
        rows = []
        order = random.Random(0)
        for precision in precisions:
            times = {"stock": [], "standard": [], "quest": []}
            for _ in range(rounds):
                names = list(times)
                order.shuffle(names)
                for name in names:
                    attention = None if name == "stock" else name
                    run = self.train(attention, device=device, precision=precision, steps=steps)
                    assert len(run.seconds) == steps
                    warm = run.seconds[len(run.seconds) // 4 :]  # the first steps compile and allocate
                    times[name].append(statistics.median(warm))
            for name, own in times.items():
                row = {"attention": name, "precision": precision, "timing": asdict(against(own, times["stock"]))}
                rows.append(row)
        found = {
            "host": self.host,
            "version": version(self.distribution),
            "model": self.model,
            "versions": versions(device),
            "rows": rows,
        }
        folder = RESULTS if device == "cuda" else tmp_path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{self.host}.json").write_text(json.dumps(found, indent=1))
        assert all(row["timing"]["milliseconds"] > 0 for row in rows)
        assert {row["timing"]["ratio"] for row in rows if row["attention"] == "stock"} == {1.0}


def compiler(device: str) -> str:
    """The torch.compile back-end to use: on the CPU one that needs no C++ compiler."""
    return "inductor" if device == "cuda" else "aot_eager"


def now(device: str) -> float:
    """Seconds, after all that the device was given is done."""
    import time

    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()
