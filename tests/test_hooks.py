"""Sub-modules are called as modules: hooks, offloading, threads, the number of calls and the memory of a call."""

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from allocations import allocated

import quest_core
from quest_core import Cache, Mechanism, Monitor

B, H, N, D = 2, 4, 5, 8
OWNERS = ("qknorm-hs", "qknorm-ds", "qknorm", "quest+dgqa(kv_heads=2)", "cosine", "aft-full(max_length=16)")
OWNERS += ("aft-local(max_length=16, window=3)", "aft-conv(window=3, dims=1)")


def build(attention):
    return Mechanism(attention, num_heads=H, head_dim=D).eval()


def inputs(made):
    groups = made.dims.kv_heads if made.dims else H
    return torch.randn(B, H, N, D), torch.randn(B, groups, N, made._key_features or D), torch.randn(B, groups, N, D)


def decode(made, q, k, v):
    cache = Cache()
    steps = zip(*(x.split([3, 2], 2) for x in (q, k, v)), strict=True)
    return torch.cat([made.decode(*step, cache) for step in steps], 2)


def ways(made):
    """The public ways to run a mechanism, of those that it has."""
    found = {"forward": made}
    if not made._no_cache:
        found["decode"] = lambda *x: decode(made, *x)
    if made.family is None:
        found["forward_with_weights"] = lambda *x: made.forward_with_weights(*x)[0]
    return found


def owners(made):
    """The sub-modules that own a tensor."""
    return [part for part in made.children() if [*part.parameters(False), *part.buffers(False)]]


@pytest.mark.parametrize("attention", OWNERS)
def test_hooks_fire_on_every_sub_module_that_owns_a_tensor(attention):
    made = build(attention)
    assert owners(made)
    for name, run in ways(made).items():
        seen = set()
        hooks = [part.register_forward_hook(lambda module, *_, seen=seen: seen.add(module)) for part in owners(made)]
        run(*inputs(made))
        assert seen == set(owners(made)), name
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize("attention", OWNERS)
def test_tensors_that_are_here_only_during_a_call_are_enough(attention):
    """As accelerate's offloading does it, and ZeRO-3."""
    made = build(attention)
    tensors, kept = inputs(made), {part: {k: x.clone() for k, x in part.state_dict().items()} for part in owners(made)}

    def load(module, *_):
        module.load_state_dict(kept[module])

    def unload(module, *_):
        module.load_state_dict({name: torch.full_like(x, torch.nan) for name, x in kept[module].items()})

    want = {name: run(*tensors) for name, run in ways(made).items()}
    for part in owners(made):
        part.register_forward_pre_hook(load)
        part.register_forward_hook(unload)
        unload(part)
    for name, run in ways(made).items():
        torch.testing.assert_close(run(*tensors), want[name])


@pytest.mark.parametrize("attention", ["quest", "quest+gqa(kv_heads=2)", "linear"])
def test_eight_threads_share_a_mechanism(attention):
    made = build(attention)
    calls = [inputs(made) for _ in range(64)]
    starts = torch.tensor([0, 2, N], dtype=torch.int32)

    def packed(q, k, v):
        return quest_core.attention_packed(*(x[0].transpose(0, 1) for x in (q, k, v)), made, cu_seqlens=starts)

    def work(call):
        with torch.no_grad():
            return made(*call), decode(made, *call), packed(*call)

    with Monitor(made) as monitor:
        want = [work(call) for call in calls]
        single = monitor.collect(flat=True)
        with ThreadPoolExecutor(8) as pool:
            got = list(pool.map(work, calls))
        together = monitor.collect(flat=True)
    torch.testing.assert_close(got, want)
    assert together == pytest.approx(single, rel=1e-6)
    assert made.monitor is None
    Monitor(made).remove()


def test_functions_are_in_evaluation_and_bounded():
    q, k = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8)
    noiseless = quest_core.attention(q, k, k, "pgqa(kv_heads=2, noise_in_eval=false)")
    torch.testing.assert_close(noiseless, quest_core.attention(q, k, k, "gqa(kv_heads=2)"))
    for i in range(200):
        quest_core.attention(q, k, k, {"name": "quest+gqa", "kv_heads": 2, "scale": 1 + i / 7})
    assert len(vars(quest_core.mechanism._SHARED)) <= quest_core.mechanism.MOST_SHARED


@pytest.mark.needs_torch("2.7", "a function of torch that says whether it exports")
def test_few_calls_lead_to_the_kernel():
    q, k, v = torch.randn(3, 1, 4, 1, 16)
    quest_core.attention(q, k, v)
    names = []

    def note(frame, event, given):
        if event == "c_call" and getattr(given, "__name__", "") == "scaled_dot_product_attention":
            sys.setprofile(None)
        elif event == "call" and frame.f_globals.get("__name__", "").startswith("quest_core."):
            names.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        quest_core.attention(q, k, v)
    finally:
        sys.setprofile(None)
    assert len(names) <= 12, names


# Bytes allocated per byte of q, k, v and the output; twice what is measured, which leaves room for another PyTorch.
MEMORY = {"quest": 2, "qknorm": 3, "quest+gqa(kv_heads=2)": 2, "quest+dgqa(kv_heads=2)": 3, "linear": 10, "cosine": 10}
MEMORY |= {"aft-simple": 12, "aft-full(max_length=512)": 40}


@pytest.mark.parametrize("attention", MEMORY)
def test_memory_of_a_call_is_a_small_multiple_of_its_tensors(attention):
    made = Mechanism(attention, num_heads=4, head_dim=32).eval()
    groups = made.dims.kv_heads if made.dims else 4
    q, k, v = torch.randn(1, 4, 512, 32), *torch.randn(2, 1, groups, 512, 32)
    with torch.no_grad():
        used = allocated(lambda: made(q, k, v)) / (2 * q.nbytes + k.nbytes + v.nbytes)
    assert used <= MEMORY[attention]
