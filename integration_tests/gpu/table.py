"""Writes docs/results/gpu.md: attention against the best back-end of scaled_dot_product_attention, and step times.

  python -m integration_tests.gpu.table --out docs/results/gpu.md

`./dev gpu --table` runs the CUDA tests and then this. It needs PyTorch and nothing else. From --steps it reads what the
tests have left there: step times of the frameworks (integration_tests/gpu/test_<host>.py), and which tests passed.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import json
import statistics
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import quest_core
from quest_core.errors import QuestError

from .measure import Inside, Timing, against, in_turns, seconds, versions

LENGTHS = (25, 64, 197, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
TOKENS = 2**16
"""Tokens a call, as many sequences as that takes."""

BACK_ENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
MATH_UNTIL = 2048  # tokens; it keeps all weights
DIRECTIONS = ("forward", "forward and backward")

FULL = ("standard", "quest", "qnorm", "qknorm-hs", "qknorm-ds", "qknorm", "aft-simple", "aft-local", "aft-full")
FLEX = "quest by FlexAttention"  # no unit keys: its score_mod divides each logit by ‖k‖
GROUPED = ("standard+gqa", "quest+gqa")


@dataclass(frozen=True)
class Row:
    """One contender at one length in one direction, against the peer with as many key heads."""

    tokens: int
    batch: int
    direction: str
    contender: str
    peer: str
    timing: Timing


def quest_by_flex(flex_attention: Callable) -> Callable:
    """QUEST with `flex_attention`, compiled or not: q, k, v [B, H, N, D] -> [B, H, N, D]."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        inverse = torch.linalg.vector_norm(k, dim=-1, dtype=torch.float32).reciprocal()  # [B, H, N]

        def divide(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return score * inverse[batch, head, key]

        return flex_attention(q, k, v, score_mod=divide, scale=1.0)

    return attend


def contender(name: str, tokens: int, heads: int, groups: int, dim: int, device: str, dtype: torch.dtype) -> Callable:
    """(q, k, v) -> output, through quest_core or FlexAttention."""
    if name == FLEX:
        from torch.nn.attention.flex_attention import flex_attention

        return quest_by_flex(torch.compile(flex_attention, dynamic=False))
    spec = name
    if spec.endswith("+gqa"):
        spec += f"(kv_heads={groups})"
    if spec in ("aft-full", "aft-local"):
        spec += f"(max_length={tokens})"
    return quest_core.Mechanism(spec, num_heads=heads, head_dim=dim).to(device, dtype)


def peers(tokens: int, device: str) -> list[str]:
    """The back-ends of scaled_dot_product_attention to try."""
    names = [n for n in BACK_ENDS if n != "math" or tokens <= MATH_UNTIL]
    if not device.startswith("cuda"):
        names = [n for n in names if n in ("flash", "math")]
    return [f"sdpa {name}" for name in names]


def surroundings(name: str) -> contextlib.AbstractContextManager[object]:
    """The back-end of scaled_dot_product_attention that a contender names, or nothing."""
    return sdpa_kernel(BACK_ENDS[name.removeprefix("sdpa ")]) if name.startswith("sdpa ") else contextlib.nullcontext()


def call(attend: Callable, tensors: list[Tensor], backward: bool) -> Callable[[], None]:
    def forward_alone() -> None:
        with torch.no_grad():
            attend(*tensors)

    def both() -> None:
        out = attend(*tensors)
        out.backward(out.detach())
        for x in tensors:
            x.grad = None

    return both if backward else forward_alone


def fits(attempt: Callable[[], None], device: str, budget: float, why: dict[str, str], name: str) -> bool:
    """Whether a call works and takes at most `budget` seconds; if not, `why` says what happened."""
    try:
        seconds(attempt, device)
        took = seconds(attempt, device)
    except (RuntimeError, QuestError) as error:
        what = "out of memory" if isinstance(error, torch.cuda.OutOfMemoryError) else "does not take these inputs"
        why[name] = what
        if device.startswith("cuda"):
            torch.cuda.empty_cache()
        return False
    if took > budget:
        why[name] = f"{took:.1f} s a call"
        return False
    return True


def measure(
    lengths: tuple[int, ...],
    *,
    device: str,
    dtype: torch.dtype,
    heads: int = 16,
    groups: int = 4,
    dim: int = 64,
    tokens_a_call: int = TOKENS,
    rounds: int = 21,
    slice_seconds: float = 0.02,
    budget: float = 1.0,
    say: Callable[[str], None] = lambda text: None,
) -> tuple[list[Row], dict[str, dict[str, str]]]:
    """Every contender at every length; and for those left out, {length and direction: {contender: why}}.

    Args:
        budget: a contender whose call takes more seconds is left out there and at longer lengths.
    """
    rows: list[Row] = []
    left_out: dict[str, dict[str, str]] = {}
    slow: set[tuple[str, str]] = set()
    for tokens in lengths:
        batch = max(1, tokens_a_call // tokens)
        for direction in DIRECTIONS:
            backward = direction != "forward"
            why = left_out.setdefault(f"N = {tokens}, {direction}", {})
            for grouped in (False, True):
                torch.manual_seed(0)
                # As projections leave them: [B, N, H, D] in memory.
                tensors = [
                    torch.randn(batch, tokens, h, dim, device=device, dtype=dtype).transpose(1, 2).requires_grad_()
                    for h in (heads, groups if grouped else heads, groups if grouped else heads)
                ]
                sdpa = functools.partial(F.scaled_dot_product_attention, enable_gqa=grouped)
                calls = {name: call(sdpa, tensors, backward) for name in peers(tokens, device)}
                wanted = GROUPED if grouped else (*FULL, FLEX)
                for name in wanted:
                    if name == FLEX and not device.startswith("cuda"):
                        why[name] = "measured on a GPU only"
                        continue
                    if (name, direction) in slow:
                        why[name] = "too slow at a shorter length"
                        continue
                    attend = contender(name, tokens, heads, groups if grouped else heads, dim, device, dtype)
                    calls[name] = call(attend, tensors, backward)
                labels = {n: f"{n} gqa" if grouped and n.startswith("sdpa ") else n for n in calls}
                inside: Inside = {name: functools.partial(surroundings, name) for name in calls}
                working = {}
                for name, attempt in calls.items():
                    with surroundings(name):
                        if fits(attempt, device, budget, why, labels[name]):
                            working[name] = attempt
                slow |= {(n, direction) for n in wanted if why.get(n, "").endswith(" s a call")}
                times = in_turns(working, device, rounds=rounds, slice_seconds=slice_seconds, inside=inside)
                names = [n for n in times if n.startswith("sdpa ")]
                if not names:
                    raise SystemExit(f"no back-end of scaled_dot_product_attention runs N = {tokens} on {device}")
                best = min(names, key=lambda n: statistics.median(times[n]))
                rows += [
                    Row(tokens, batch, direction, n, f"{best}{' gqa' * grouped}", against(own, times[best]))
                    for n, own in times.items()
                    if n == best or not n.startswith("sdpa ")
                ]
            say(f"N = {tokens}, {direction}")
    return rows, {where: found for where, found in left_out.items() if found}


def markdown(rows: list[Row], left_out: dict[str, dict[str, str]]) -> str:
    """A table for each direction and number of key heads; lengths down, contenders across."""
    lines = []
    for direction in DIRECTIONS:
        for grouped in (False, True):
            own = [r for r in rows if r.direction == direction and r.peer.endswith(" gqa") == grouped]
            names = [n for n in (*FULL, FLEX, *GROUPED) if any(r.contender == n for r in own)]
            title = f"{direction}, fewer key heads" if grouped else direction
            lines += [f"### {title.capitalize()}", "", "| N | B | best back-end | " + " | ".join(names) + " |"]
            lines.append("|---:|---:|---|" + "---|" * len(names))
            for tokens in dict.fromkeys(r.tokens for r in own):
                here = {r.contender: r for r in own if r.tokens == tokens}
                peer = next(r for r in here.values() if r.contender.startswith("sdpa "))
                cells = [_cell(here[n].timing) if n in here else "–" for n in names]
                first = f"{peer.contender.removeprefix('sdpa ')}, {peer.timing.milliseconds:.3g} ms"
                lines.append(f"| {tokens} | {peer.batch} | {first} | " + " | ".join(cells) + " |")
            lines.append("")
    if left_out:
        lines += ["Left out:", ""]
        for where, found in left_out.items():
            lines.append(f"- {where}: " + ", ".join(f"{name} ({why})" for name, why in found.items()))
        lines.append("")
    return "\n".join(lines)


def _cell(timing: Timing) -> str:
    return f"{timing.ratio:.2f} ({timing.low:.2f}–{timing.high:.2f})"


def read_steps(folder: Path) -> list[dict[str, Any]]:
    """Return the results of the frameworks' tests, by framework."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def steps_markdown(found: list[dict[str, Any]]) -> str:
    """A row for each framework, precision and attention."""
    if not found:
        return "Not yet measured: no framework's test has left its times.\n"
    lines = ["| framework | model | precision | attention | ms a step | of stock (middle half of the rounds) |"]
    lines.append("|---|---|---|---|---:|---|")
    for host in found:
        name = f"{host['host']} {host['version']}, torch {host['versions']['torch']}, {host['versions']['device']}"
        for row in host["rows"]:
            timing = Timing(**row["timing"])
            cells = (name, host["model"], row["precision"], row["attention"], f"{timing.milliseconds:.2f}")
            lines.append("| " + " | ".join((*cells, _cell(timing))) + " |")
    return "\n".join(lines) + "\n"


# --- what there is to measure: read from the tests, without importing the frameworks ----------------------------------

HERE = Path(__file__).parent
COMMAND = "path/to/python dev gpu --wheels wheels --table"


@dataclass(frozen=True)
class File:
    """A file of tests: what its first line says, the tests that want a GPU, and whose framework's model they train."""

    name: str
    about: str
    tests: tuple[str, ...]
    host: str | None = None
    model: str | None = None


def _cuda_tests(body: list[ast.stmt]) -> Iterator[str]:
    """Names of the test functions that take a `device` or are marked gpu, alone or with their whole file."""
    all_marked = any(isinstance(n, ast.Assign) and "mark.gpu" in ast.unparse(n.value) for n in body)
    for node in body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            marks = " ".join(map(ast.unparse, node.decorator_list))
            if all_marked or "mark.gpu" in marks or any(argument.arg == "device" for argument in node.args.args):
                yield node.name.removeprefix("test_").replace("_", " ")


@functools.cache
def suite() -> tuple[File, ...]:
    """The tests that run on a GPU."""
    base = next(
        node
        for node in ast.parse((HERE / "training.py").read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == "HostTraining"
    )
    files = []
    for path in sorted(HERE.glob("test_*.py")):
        tree = ast.parse(path.read_text())
        about = (ast.get_docstring(tree) or "").partition("\n")[0].rstrip(".:")
        hosts = [
            node
            for node in tree.body
            if isinstance(node, ast.ClassDef) and any(ast.unparse(b) == "HostTraining" for b in node.bases)
        ]
        if not hosts:
            files.append(File(path.name, about, tuple(_cuda_tests(tree.body))))
        for host in hosts:
            said = {
                target.id: node.value.value
                for node in host.body
                if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
                for target in node.targets
                if isinstance(target, ast.Name)
            }
            tests = tuple(_cuda_tests(base.body))
            files.append(File(path.name, about, tests, str(said["host"]), str(said["model"])))
    return tuple(file for file in files if file.tests)


def read_tests(folder: Path) -> dict[str, Counter[str]]:
    """What became of the CUDA tests, from the reports that ./dev gpu leaves: file -> passed, failed, skipped."""
    found: dict[str, Counter[str]] = {}
    for path in sorted(folder.glob("*.xml")):
        for case in ElementTree.parse(path).getroot().iter("testcase"):
            parts = [part for part in case.get("classname", "").split(".") if part.startswith("test_")]
            if parts:
                worst = [w for w in ("failure", "error", "skipped") if case.find(w) is not None]
                what = {"failure": "failed", "error": "failed", "skipped": "skipped"}[worst[0]] if worst else "passed"
                found.setdefault(f"{parts[0]}.py", Counter())[what] += 1
    return found


def tests_markdown(found: dict[str, Counter[str]]) -> str:
    lines = ["| file | what it holds to | passed | failed | skipped |", "|---|---|---:|---:|---:|"]
    for file in suite():
        counts = found.get(file.name)
        cells = ["not run", "", ""] if counts is None else [str(counts[w]) for w in ("passed", "failed", "skipped")]
        lines.append("| " + " | ".join((f"`{file.name}`", file.about, *cells)) + " |")
    return "\n".join(lines) + "\n"


def not_measured() -> str:
    """Return the page without measurements: a list of those to make."""
    hosts = [file for file in suite() if file.host is not None]
    lengths = ", ".join(map(str, LENGTHS))
    lines = [
        "# Results on a GPU",
        "",
        "**Not yet measured: there was no GPU at hand.** Nothing on this page or elsewhere in the repository was timed "
        "on one, and none of the tests below has run on one. With one, a single command runs them and writes this "
        "page, with the device, versions, ratios and their spread:",
        "",
        "```bash",
        COMMAND,
        "```",
        "",
        "[How it is done](../gpu.md), also without a network. This page is what the command writes where there is no "
        "GPU: all that is still to be measured.",
        "",
        "## Attention",
        "",
        f"Against the fastest back-end of scaled_dot_product_attention, {' and '.join(DIRECTIONS)}, bfloat16, at N = "
        f"{lengths}:",
        "",
        *(f"- {name}" for name in (*FULL, FLEX, *GROUPED)),
        "",
        "## Training steps of the frameworks",
        "",
        "Standard and quest against the framework as it is, in bf16, fp16 and fp32:",
        "",
        *(f"- {file.host}: {file.model}" for file in hosts),
        "",
        "## CUDA tests",
        "",
        "| file | what it holds to | tests |",
        "|---|---|---|",
        *(f"| `{file.name}` | {file.about} | {'; '.join(file.tests)} |" for file in suite() if file.host is None),
        *(f"| `{file.name}` | {file.about} | those of every framework |" for file in hosts),
        "",
        f"Those of every framework: {'; '.join(hosts[0].tests)}.",
        "",
    ]
    return "\n".join(lines)


# --- the page ---------------------------------------------------------------------------------------------------------


def page(
    rows: list[Row],
    left_out: dict[str, dict[str, str]],
    steps: list[dict[str, Any]],
    tests: dict[str, Counter[str]],
    *,
    command: str,
    where: dict[str, str],
    shape: str,
    rounds: int,
) -> str:
    missing = [file.host for file in suite() if file.host and file.host not in {found["host"] for found in steps}]
    return "\n".join(
        [
            "# Results on a GPU",
            "",
            f"Command: `{command}`",
            "",
            f"Machine: {', '.join(f'{key} {value}' for key, value in where.items())}.",
            "",
            "## Attention",
            "",
            f"{shape}. Each cell is the time as a multiple of the fastest back-end of scaled_dot_product_attention in "
            f"the same round: the median of {rounds} rounds and, in brackets, the middle half of them. Contenders take "
            "turns in shuffled order; times are those of CUDA events.",
            "",
            markdown(rows, left_out),
            "## Training steps of the frameworks",
            "",
            steps_markdown(steps),
            *([f"Not yet measured: {', '.join(missing)}.\n"] if missing and steps else []),
            "## CUDA tests",
            "",
            tests_markdown(tests),
        ]
    )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m integration_tests.gpu.table",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path("docs/results/gpu.md"), help="the page; its data go to .json")
    parser.add_argument("--steps", type=Path, default=Path("runs/gpu"), help="folder of what the tests have left")
    parser.add_argument("--not-measured", action="store_true", help="write what is to be measured, and measure nothing")
    parser.add_argument("--device", default="cuda", help="cuda or cuda:N; cpu to try the command out")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)), help="comma-separated numbers of tokens")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="tokens a call: as many sequences as that takes")
    parser.add_argument("--heads", type=int, default=16, help="query heads; a quarter as many key heads for gqa")
    parser.add_argument("--dim", type=int, default=64, help="features of a head")
    parser.add_argument("--rounds", type=int, default=21, help="how often each contender takes its turn")
    parser.add_argument("--slice", type=float, default=0.02, help="seconds that a turn lasts")
    parser.add_argument("--budget", type=float, default=1.0, help="seconds a call; slower contenders are left out")
    options = parser.parse_args(arguments)
    if options.not_measured:
        if options.out.with_suffix(".json").exists():
            parser.error(
                f"{options.out} holds measurements, which --not-measured would take away; delete them, or --out"
            )
        options.out.write_text(not_measured())
        return 0
    if options.device.startswith("cuda"):
        if not torch.cuda.is_available():
            parser.error(
                f"--device is {options.device!r}, but this torch ({torch.__version__}) sees no GPU; --not-measured "
                "writes what is to be measured"
            )
        torch.cuda.set_device(torch.device(options.device).index or 0)  # events and memory are those of this one
    if options.heads % 4:
        parser.error(f"--heads is {options.heads}; it must be a multiple of 4, for gqa has a quarter as many key heads")
    rows, left_out = measure(
        tuple(int(n) for n in options.lengths.split(",")),
        device=options.device,
        dtype=getattr(torch, options.dtype),
        heads=options.heads,
        groups=options.heads // 4,
        dim=options.dim,
        tokens_a_call=options.tokens,
        rounds=options.rounds,
        slice_seconds=options.slice,
        budget=options.budget,
        say=lambda text: print(text, file=sys.stderr, flush=True),
    )
    command = " ".join(["python -m integration_tests.gpu.table", *arguments])
    where = versions(options.device)
    steps = read_steps(options.steps)
    shape = (
        f"{options.heads} heads of {options.dim} features, {options.dtype}, B·N = {options.tokens} (one sequence where "
        f"N is larger), {options.heads // 4} key heads where there are fewer"
    )
    tests = read_tests(options.steps)
    text = page(rows, left_out, steps, tests, command=command, where=where, shape=shape, rounds=options.rounds)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(text)
    data = {"command": command, "machine": where, "rows": [asdict(row) for row in rows], "left out": left_out}
    options.out.with_suffix(".json").write_text(json.dumps({**data, "steps": steps, "tests": tests}, indent=1))
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
