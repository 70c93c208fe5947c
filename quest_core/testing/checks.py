"""The checks of `check_mechanism`, in order: each raises `Wrong`, or any other error of the mechanism.

Every public function of this module is a check.
"""

import contextlib
import copy
import io
import itertools
import math
import pickle
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..cache import Cache
from ..checkpoints import ENTRY
from ..errors import CheckpointError
from ..mechanism import Mechanism
from ..mechanisms.base import Dims
from ..mechanisms.naive import is_hidden
from ..registry import READS
from ..tools.packing import attention_packed
from ..tools.parallel import head_axes
from .trial import CLOSE, DIM, HEADS, LONG, SINGLE, TOKENS, Fused, Layers, Trial, Wrong, cause, change, equal, spellings
from .truth import missing, truth

ZEROS = "divide by torch.where(total > 0, total, 1), or hide by a finite number and then multiply by the mask"

# --- what is declared -------------------------------------------------------------------------------------------------


def declarations(t: Trial) -> None:
    """The modules are what the classes declare: parameters, shapes, unit keys, a chain of layers, a grid."""
    made = t.build()
    if t.config.family is None and cast(Any, made.last.grouping).chooses:
        head = cast(Any, made.last.grouping)(t.inputs()[1], HEADS, None)
        if (head.dtype, head.shape) != (torch.int64, (HEADS,)):
            raise Wrong(f"the grouping returns {head.dtype} {list(head.shape)}; expected int64 [H]")
        if not ((head >= 0) & (head < t.groups)).all():
            raise Wrong(f"the grouping returns {head.tolist()}; k has {t.groups} heads, counted from 0")
    for part in t.parts:
        module: Any = getattr(made.last, part.axis)
        names = [name for name, _ in module.named_parameters()]
        if bool(names) != part.learnable:
            raise Wrong(f"'{part.name}' has parameters {names}; declare learnable = {bool(names)}")
        if hasattr(module, "follow") != part.chained:
            raise Wrong(f"'{part.name}': declare chained = True if and only if it has the method `follow`")
        if part.on_grid and not ({"dims", "grid", "prefix"} <= {option.name for option in part.options}):
            raise Wrong(f"'{part.name}' has a grid; give it the options dims, grid and prefix")
        if getattr(part, "rowwise", False) and "queries" in part.reads:
            raise Wrong(f"'{part.name}' reads other queries, and a block holds only some of them; drop rowwise")
    if (t.groups != HEADS or t.parts[0].key_features is not None) and not any(p.reshapes for p in t.parts):
        raise Wrong(f"'{t.config}' has {t.groups} key heads for {HEADS}; declare reshapes = True")
    if not (t.chained or t.stateful or any(part.learnable for part in t.parts)):
        tensors, fix = t.inputs(), t.declare("declare learnable = True, so that it is never built without dims")
        torch.manual_seed(0)
        try:
            got = Mechanism(t.config).eval()(*tensors)
        except Exception as error:
            raise Wrong(f"built with dims=None it raises {cause(error)}. {fix}") from error
        equal(got, made(*tensors), f"built with dims=None it computes something else. {fix}")
    if {id(x) for x in t.build().parameters()} & {id(x) for x in made.parameters()}:
        raise Wrong("two layers have the same parameter; make it in __init__")
    if any(part.unit_keys for part in t.parts):
        k = t.inputs()[1]
        wanted = k / k.norm(dim=-1, keepdim=True)
        equal(made.last.score.key(k), wanted, f"keys are not k/‖k‖. {t.declare('drop unit_keys')}")


def queries_choose_among_keys(t: Trial) -> None:
    """Where a family declares it, the share of a key depends on the query; elsewhere nothing is promised."""
    if not t.can("compares"):
        return
    made, (q, k, v) = t.build(), t.inputs()
    first = torch.zeros_like(v)
    first[:, :, 0] = 1
    one, other = (made(x, k, first) / made(x, k, torch.ones_like(v)) for x in (q, t.inputs(seed=2)[0]))
    if torch.allclose(one, other):
        raise Wrong(f"the share of a key is that of every query. {t.declare('drop compares')}")


def state(t: Trial) -> None:
    """Buffers change in training only where a part says `stateful`, and nothing grows or changes in evaluation."""
    made = t.build()
    for training in (False, True):
        before = {name: x.clone() for name, x in made.named_buffers()}
        made.train(training)
        for seed in range(3):
            made(*t.inputs(seed=seed))
        moved = [name for name, x in made.named_buffers() if not torch.equal(x, before[name])]
        if moved and not (training and t.stateful):
            when = "training" if training else "evaluation"
            raise Wrong(f"{moved[0]} changes in {when}. {t.declare('say stateful=True')}")
    made.eval()
    sizes = []
    with contextlib.suppress(Exception):  # what cannot be pickled fails in copies_and_pickles
        for _ in range(2):
            made(*t.inputs())
            sizes.append(len(pickle.dumps(made)))
    if sizes[1:] > sizes[:1]:
        raise Wrong("it grows with every call; keep nothing of the inputs on the module")


def calls_repeat(t: Trial) -> None:
    """The same call gives the same output after other calls, under another seed, and in training."""
    made, tensors = t.build(), t.inputs()
    out = made(*tensors)
    for n, m in t.lengths():
        made(*t.inputs(n, m, batch=3, seed=9))
    fix = "Keep nothing of the inputs on the module, and draw random numbers from PyTorch's generator only"
    equal(made(*tensors), out, f"the same call gives another output after other calls. {fix}")
    if "random" in t.reads:
        return
    fix = t.reading("random")
    equal(made(*tensors, seed=5), out, f"another seed gives another output. {fix}")
    if not t.stateful:
        equal(made.train()(*tensors), out, f"training gives another output than evaluation. {fix}")
    drawn = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        Layers(t.config, t.chained).double()(*tensors, seed=None)
        drawn.append(torch.rand(()))
    if drawn[0] == drawn[1]:
        raise Wrong("it sets the seed of PyTorch's generator, and so of everything else in a training")


def inputs_are_left_alone(t: Trial) -> None:
    """A call changes none of its tensors, and needs no gradients."""
    made = t.build()
    for name, mask in t.masks(TOKENS, TOKENS):
        outs = []
        for recorded in (True, False):
            given = dict(zip("qkv", t.inputs(), strict=True)) | ({} if mask is None else {"attn_mask": mask})
            before = {key: x.clone() for key, x in given.items()}
            with torch.set_grad_enabled(recorded):
                outs.append(made(**given))
            for key, x in given.items():
                if not torch.equal(x, before[key]):
                    raise Wrong(f"mask {name}: a call changes {key} in place; use mul, not mul_, and no out=")
        equal(outs[1], outs[0], f"mask {name}: the output under torch.no_grad() is another one")


def memory_layout_does_not_matter(t: Trial) -> None:
    """Contiguous tensors, slices of packed ones and expanded ones give the output of those that a layer makes."""
    made, tensors = t.build(), t.inputs()
    fix = "Use reshape, not view, and no strides"
    out = made(*tensors)
    for name, lay in (
        ("contiguous", Tensor.contiguous),
        ("sliced", lambda x: torch.stack([x, x], -1)[..., 0]),
        ("transposed", lambda x: x.mT.contiguous().mT),
    ):
        with t.possible(f"a call with {name} inputs", fix):
            equal(made(*map(lay, tensors)), out, f"{name} inputs give another output. {fix}")
    one = t.inputs(batch=1)
    got, want = made(*(x.expand(2, -1, -1, -1) for x in one)), made(*(x.repeat(2, 1, 1, 1) for x in one))
    equal(got, want, f"an expanded batch gives another output. {fix}")


# --- values -----------------------------------------------------------------------------------------------------------


def shapes(t: Trial) -> None:
    """Any number of queries, keys and samples gives a finite output; values may have other features than keys."""
    for n, m in t.lengths():
        for batch in (1, 3):
            q, k, v = t.inputs(n, m, batch)
            out, given = t.build()(q, k, v), f"q {list(q.shape)}, k {list(k.shape)}"
            if out.shape != q.shape:
                raise Wrong(f"{given}: the output has shape {list(out.shape)}")
            if not out.isfinite().all():
                raise Wrong(f"{given}: the output is not finite")
    if t.config.family is None and not t.chained and "output" not in dict(t.config.parts):
        q, k, v = t.inputs()
        narrow, whole = t.build()(q, k, v[..., :3]), t.build()(q, k, v)
        equal(narrow, whole[..., :3], "values of 3 features give other outputs than the first 3 of 8")


def dtypes(t: Trial) -> None:
    """float32, bfloat16, float16 and autocast give the output of float64, in their dtype."""
    q, k, v = t.inputs()
    exact, close = t.build()(q, k, v), math.inf if t.randomizes else 1.0
    for dtype, error_allowed in ((torch.float32, SINGLE), (torch.bfloat16, 1000 * SINGLE)):
        try:
            out = t.build().to(dtype)(q.to(dtype), k.to(dtype), v.to(dtype))
        except RuntimeError as error:
            raise Wrong(f"inputs of {dtype} fail; cast what you add to the dtype of q: {error}") from error
        if out.dtype != dtype:
            raise Wrong(f"inputs of {dtype} give an output of {out.dtype}; cast what you add to the dtype of q")
        said = f"{dtype} differs from float64; compute sums and norms in float32"
        equal(out, exact, said, close * error_allowed)
    with torch.autocast("cpu", torch.bfloat16):
        out = t.build().float()(q.float(), k.float(), v.float())
    equal(out, exact, "autocast to bfloat16 differs from float64", close * 1000 * SINGLE)
    q, k = q.sign(), k.sign()  # exact in float16, whose largest number is 65504
    q[:, :, 1], k[:, :, 2] = 0, 0
    for name, large, small in (("queries", 96, 0.5), ("keys", 0.5, 96)):
        want = t.build()(large * q, small * k, v)
        got = t.build().half()((large * q).half(), (small * k).half(), v.half())
        said = f"in float16 {name} of norm 272, whose square overflows, or of norm 0 give another output"
        equal(got, want, f"{said}; compute sums and norms in float32", close * 0.02)


def reference(t: Trial) -> None:
    """The output, and the weights if there are any, in float64, under every mask."""
    made = t.build()
    if missing(t.config):
        return  # no formula to compare with
    for n, m in t.lengths():
        qkv = t.inputs(n, m)
        for (name, mask), is_causal in itertools.product(t.masks(n, m), (False, True)[: 1 + t.can("causal")]):
            where = f"N={n}, M={m}, mask {name}, is_causal={is_causal}"
            options: dict[str, Any] = {"attn_mask": mask, "is_causal": is_causal}
            out, found, _ = made.each(truth, *qkv, **options)
            equal(made(*qkv, **options), out, f"{where}: the output is not that of the reference")
            if found is not None:
                _, mine = made.each(Mechanism.forward_with_weights, *qkv, **options)
                equal(mine, found, f"{where}: the weights are not those of the reference")


def shared_key_heads(t: Trial) -> None:
    """Two query heads that share a key/value head compute what they do with a copy of it each."""
    if t.groups != HEADS or t.config.family is not None or {"heads", "group"} & t.reads or t.randomizes:
        return
    shared, made = t.build(groups=2), t.build()
    tensors, wanted = shared.state_dict(), made.state_dict()
    for name, x in tensors.items():
        for axis, size in enumerate(wanted[name].shape):
            if size == 2 * x.shape[axis]:  # of key heads
                tensors[name] = x.repeat_interleave(2, axis)
    made.load_state_dict(tensors)
    q, k, v = (x[:, :heads] for x, heads in zip(t.inputs(), (HEADS, 2, 2), strict=True))
    fix = "k and v have dims.kv_heads heads, and q has dims.num_heads"
    want = made(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))
    with t.possible(f"a call with 2 key heads for {HEADS} query heads", fix):
        equal(shared(q, k, v), want, f"query heads that share a key head differ from those with a copy of it. {fix}")


def weights(t: Trial) -> None:
    """`forward_with_weights` gives the output of `forward`; hidden weights are exactly 0; `fused` is a softmax."""
    made, (q, k, v) = t.build(), t.inputs()
    if t.config.family is not None:
        with t.expect_refusal("forward_with_weights", "weights"):
            made.last.forward_with_weights(q, k, v)
        return
    normalizer, logits = made.last.normalizer, 0.7 * q @ q.mT
    got = normalizer(q, q, q, scale=0.7, mask=None, is_causal=False, dropout_p=0.0, grouped=False)
    found = normalizer.weights(logits, None)
    equal(got, found @ q, "Normalizer.forward with scale=0.7 is not the output of weights()")
    if normalizer.fused:
        equal(found, logits.softmax(-1), f"the weights are not a softmax. {t.declare('drop fused')}")
    for name, mask in t.masks(TOKENS, TOKENS):
        out, found = made.each(Mechanism.forward_with_weights, q, k, v, attn_mask=mask)
        equal(out, made(q, k, v, attn_mask=mask), f"mask {name}: the output with weights differs from that without")
        if mask is not None and found[is_hidden(mask).expand_as(found)].any():
            raise Wrong(f"mask {name}: a hidden key has a weight; give it exactly 0")


def masks(t: Trial) -> None:
    """Hidden keys and values count for nothing; an additive mask of zeros is none, and −inf is False."""
    made, (q, k, v) = t.build(), t.inputs()
    seen = torch.ones(2, 1, 1, TOKENS, dtype=torch.bool)
    seen[..., 2] = seen[0, ..., 5] = False
    out, plain = made(q, k, v, attn_mask=seen), made(q, k, v)
    other = made(q, change(k, 2, 2), change(v, 2, 2), attn_mask=seen)
    rest = [i for i in range(TOKENS) if i != 2 or "unseen" not in t.reads]
    equal(other[:, :, rest], out[:, :, rest], "a key that the mask hides changes the output")
    none, bias = torch.zeros(2, 1, 1, TOKENS).double(), torch.randn(2, 1, 1, TOKENS).double()
    additive = none.masked_fill(~seen, -math.inf)
    equal(made(q, k, v, attn_mask=additive), out, "an additive mask of −inf differs from a boolean one")
    equal(made(q, k, v, attn_mask=none), plain, "an additive mask of zeros changes the output")
    if torch.equal(made(q, k, v, attn_mask=bias), plain):
        raise Wrong("a finite additive mask changes nothing; it is added to the logits")
    if t.config.family is None:
        logits, find = torch.randn(2, HEADS, TOKENS, TOKENS).double(), made.last.normalizer.weights
        said = "weights() with an additive mask are not those of the sum of logits and mask"
        equal(find(logits, bias), find(logits + bias, None), said)


def blind_rows(t: Trial) -> None:
    """A query that sees no key gives zeros, and finite gradients; so do zero vectors."""
    pairs = t.config.family is None
    seen = torch.ones(2, 1, TOKENS if pairs else 1, TOKENS, dtype=torch.bool)
    seen[0] = False
    if pairs:
        seen[1, :, 3] = False
    for mask in (seen, torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -math.inf)):
        kind = "a boolean mask" if mask.dtype == torch.bool else "an additive mask"
        made, (q, k, v) = t.build(), [x.clone() for x in t.inputs()]
        q[0, 0, 1], k[:, :, 2] = 0, 0
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        out = made(q, k, v, attn_mask=mask)
        if out[0].any() or (pairs and out[1, :, 3].any()):
            raise Wrong(f"{kind} hides all keys of a query, whose output is not zero; {ZEROS}")
        out.square().sum().backward()
        for name, x in {"q": q, "k": k, "v": v, **dict(made.named_parameters())}.items():
            if x.grad is not None and not x.grad.isfinite().all():
                raise Wrong(f"the gradient of {name} is not finite: {kind} hides all keys, or a vector is 0; {ZEROS}")
    if t.can("causal") and t.can("cross") and t.build()(*t.inputs(TOKENS, 4), is_causal=True)[:, :, :5].any():
        raise Wrong(f"with is_causal, the first 5 of 9 queries see none of 4 keys and are not zero; {ZEROS}")


def gradients(t: Trial) -> None:
    """Finite, of every input and parameter, and equal to finite differences unless stopped on purpose."""
    made, (q, k, v) = t.build(), [x.detach() for x in t.inputs(4, batch=1)]
    parameters = dict(made.last.named_parameters())
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    made(q, k, v).square().sum().backward()
    for name, x in (*{"q": q, "k": k, "v": v}.items(), *parameters.items()):
        if x.grad is None or not x.grad.isfinite().all():
            raise Wrong(f"the gradient of {name} is {'missing' if x.grad is None else 'not finite'}")
        if name in parameters and not x.grad.any():
            raise Wrong(f"the gradient of the parameter {name} is zero everywhere, so it does not train")
    if any(part.stops_gradient for part in t.parts):
        return

    def run(*tensors: Tensor) -> Tensor:
        values = {f"last.{name}": x for name, x in zip(parameters, tensors[3:], strict=True)}
        return cast(Tensor, torch.func.functional_call(made, values, tensors[:3]))

    try:
        torch.autograd.gradcheck(run, (q, k, v, *parameters.values()), fast_mode=True)
    except RuntimeError as error:
        fix = t.declare("say stops_gradient=True")
        raise Wrong(f"gradients differ from finite differences. {fix}: {error}") from None


def dropout(t: Trial) -> None:
    """Dropout drops, and keeps the mean; or it is refused."""
    made, (q, k, v) = t.build(), t.inputs()
    if not t.can("dropout"):
        with t.expect_refusal("dropout_p=0.5", "dropout"):
            made.last(q, k, v, dropout_p=0.5)
        return
    runs = made(*(x.repeat(400, 1, 1, 1) for x in (q, k, v)), dropout_p=0.2).unflatten(0, (400, -1))
    if torch.equal(runs[0], runs[1]):
        raise Wrong(f"dropout_p=0.2 drops nothing. {t.declare('drop dropout')}")
    error = (runs.mean(0) - made(q, k, v)).abs()
    if not t.randomizes and (error > 6 * runs.std(0) / 20 + CLOSE).any():
        raise Wrong("the mean under dropout is not the output without; scale what is kept by 1 / (1 − p)")


# --- causality and decoding -------------------------------------------------------------------------------------------


def no_query_sees_the_future(t: Trial) -> None:
    """With is_causal, a token changes no output before it, in evaluation and in training.

    A mask that hides the future means the same, or is refused.
    """
    made = t.build()
    if not t.can("causal"):
        past = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
        for name, mask in (("is_causal", None), *spellings(past)):
            with t.expect_refusal(f"hiding the future ({name})", "causal=True"):
                made.last(*t.inputs(), attn_mask=mask, is_causal=mask is None)
        return
    fix = t.declare("drop causal and cached")
    for n, m in {(TOKENS, TOKENS), (t.longest, t.longest), *([(4, TOKENS)] if t.can("cross") else [])}:
        for training in (False, True) if not t.stateful else (False,):
            made.train(training)
            q, k, v = t.inputs(n, m)
            out = made(q, k, v, is_causal=True)
            for token in range(1, n, 1 + n // 10):  # counted among the queries: key m − n + token
                at = m - n + token
                later = made(change(q, 2, token), change(k, 2, at), change(v, 2, at), is_causal=True)
                said = f"with is_causal, {token} of {n} outputs precede a token that changes them: the future leaks"
                equal(later[:, :, :token], out[:, :, :token], f"{said}. {fix}")
            for name, mask in spellings(torch.ones(n, m, dtype=torch.bool).tril(m - n)):
                with t.possible("a mask that hides the future"):
                    masked = made(q, k, v, attn_mask=mask)
                    equal(masked, out, f"is_causal and a mask that hides the future ({name}) differ. {fix}")


def hidden_keys_do_not_matter(t: Trial) -> None:
    """Under masks that show each query other keys, a token changes nothing for those that do not see it."""
    if "unseen" in t.reads:
        return
    made, (q, k, v) = t.build(), t.inputs()
    i, j = torch.arange(TOKENS)[:, None], torch.arange(TOKENS)
    torch.manual_seed(4)
    for shape, seen in (
        ("a sliding window", (i - j).abs() < 3),
        ("a causal window", (i >= j) & (i - j < 3)),
        ("packed sequences", i // 3 == j // 3),
        ("packed causal sequences", (i // 3 == j // 3) & (i >= j)),
        ("a prefix", (j <= i) | (j < 4)),
        ("other pairs in every head", torch.rand(2, HEADS, TOKENS, TOKENS) > 0.4),
    ):
        for name, mask in spellings(seen):
            with t.possible(f"a mask of {shape}"):
                out = made(q, k, v, attn_mask=mask)
                for token in range(0, TOKENS, 4):
                    other = made(q, change(k, 2, token), change(v, 2, token), attn_mask=mask)
                    blind = ~seen[..., token].expand(out.shape[:3])  # [B, H, N]
                    said = f"under {shape} ({name}) key {token} changes outputs of queries that do not see it"
                    equal(other[blind], out[blind], f"{said}. {t.reading('unseen')}")


def decoding_equals_the_forward_pass(t: Trial) -> None:
    """One or several tokens at a time with a Cache, with and without padding."""
    for steps in ([1] * TOKENS, [4, 3, 1, 1], [1, 8], *([[64, 35, 1]] if t.longest == LONG else [])):
        tokens = sum(steps)
        made, (q, k, v) = t.build(), t.inputs(tokens)
        if not t.can("cached"):
            with t.expect_refusal("decode", "cached=True"):
                made.last.decode(q, k, v, Cache())
            return
        seen = torch.ones(2, 1, 1, tokens, dtype=torch.bool)
        seen[1, ..., :2] = False  # padding at the left of the second sample
        said = f"decoding in steps of {steps} tokens differs from the forward pass. {t.declare('drop cached')}"
        with torch.no_grad():
            for mask in (None, seen):
                equal(made.decode(q, k, v, steps, mask), made(q, k, v, attn_mask=mask, is_causal=True), said)


def caches_are_independent(t: Trial) -> None:
    """Two batches decode in turns, each with its cache, and a cache follows its batch when that is reordered."""
    if not t.can("cached") or t.chained or "samples" in t.reads or t.randomizes:
        return
    made, rows = t.build(), torch.tensor([1, 0, 1])
    batches, caches = [t.inputs(seed=1), t.inputs(seed=2)], [Cache(), Cache()]
    fix = "Keep the state in the cache, by names, with the batch first"

    def decode(cache: Cache, *new: Tensor) -> Tensor:
        return cast(Tensor, made.each(lambda layer, *qkv, **x: layer.decode(*qkv, cache, **x), *new))

    with torch.no_grad():
        wanted = [made(*tensors, is_causal=True) for tensors in batches]
        for start, stop in ((0, 4), (4, 6)):
            for tensors, cache, want in zip(batches, caches, wanted, strict=True):
                got = decode(cache, *(x[:, :, start:stop] for x in tensors))
                equal(got, want[:, :, start:stop], f"two batches that decode in turns disturb each other. {fix}")
        with t.possible("decoding a reordered batch", fix):
            caches[0].reorder(rows)
            got = decode(caches[0], *(x[rows, :, 6:] for x in batches[0]))
            equal(got, wanted[0][rows, :, 6:], f"a reordered batch decodes something else. {fix}")


# --- what a result depends on -----------------------------------------------------------------------------------------


def others_do_not_matter(t: Trial) -> None:
    """No output depends on another sample, query, query head or key/value head."""
    made, tensors = t.build(), dict(zip("qkv", t.inputs(), strict=True))
    out = made(**tensors)
    for name, axis, at, which, kept in (
        ("samples", 0, 0, "qkv", [1]),
        ("queries", 2, 3, "q", [0, 1, 2, *range(4, TOKENS)]),
        ("group", 1, 0, "q", [*range(1, HEADS)]),
        ("heads", 1, 0, "kv", [*range(HEADS // t.groups, HEADS)]),
    ):
        if name not in t.reads and not (name == "group" and "heads" in t.reads):
            given = {key: change(x, axis, at) if key in which else x for key, x in tensors.items()}
            rest = torch.tensor(kept, dtype=torch.long)
            said = f"an output depends on {READS[name]}. {t.reading(name)}"
            equal(made(**given).index_select(axis, rest), out.index_select(axis, rest), said)


def padding_does_not_matter(t: Trial) -> None:
    """Hidden tokens at the end change nothing, and neither do numbers in them."""
    if "length" in t.reads or t.randomizes:
        return
    made, tensors = t.build(), t.inputs()
    real = torch.arange(TOKENS).expand(2, TOKENS) < 4
    mask = made.last.padding_mask(real, same_tokens=True)
    short = made(*(x[:, :, :4] for x in tensors))
    for padded in (tensors, [change(x, 2, slice(4, None)) for x in tensors]):
        got = made(*padded, attn_mask=mask)[:, :, :4]
        equal(got, short, f"5 hidden tokens at the end change the others. {t.reading('length')}")


def order_does_not_matter(t: Trial) -> None:
    """Tokens in another order give the same outputs in that order."""
    if "order" in t.reads or t.randomizes:
        return
    made, tensors = t.build(), t.inputs()
    order = torch.randperm(TOKENS)
    moved, out = made(*(x[:, :, order] for x in tensors)), made(*tensors)[:, :, order]
    equal(moved, out, f"tokens in another order give other outputs. {t.reading('order')}")


def tokens_are_prepared_one_by_one(t: Trial) -> None:
    """Scores see one token at a time; normalizers leave the rest to scaled_dot_product_attention."""
    if "tokens" in t.reads:
        return
    made, (q, k, v) = t.build(), t.inputs(LONG)
    fix, score = t.reading("tokens"), made.last.score
    both = score(q, k, v, mask=None, is_causal=False)[:2]
    for name, prepare, x, got in (("query", score.query, q, both[0]), ("key", score.key, k, both[1])):
        alone = torch.cat([prepare(x[:, :, i : i + 1]) for i in range(LONG)], dim=2)
        equal(alone, prepare(x), f"{name}() of a token depends on the other tokens. {fix}")
        equal(got, prepare(x), f"forward() gives something else than query() and key(). {fix}")
    with Fused() as fused:
        made(q, k, v)
    if not fused.calls:
        raise Wrong(f"the output does not come from scaled_dot_product_attention. {fix}")


def packing(t: Trial) -> None:
    """attention_packed over sequences of different lengths equals a loop over them, or an error names it."""
    made, lengths = t.build(), [4, 9, 1, 4, 0]
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    q, k, v = (x[0].transpose(0, 1) for x in t.inputs(sum(lengths), batch=1))  # [T, heads, features]
    if t.config.needs_input:
        with t.expect_refusal("attention_packed", "that it needs no input of the layer"):
            attention_packed(q, k, v, made.last, cu_seqlens=cu)
        return
    if "samples" in t.reads or t.chained:
        if "length" in t.reads:
            with t.expect_refusal("attention_packed", "that samples or lengths do not matter"):
                attention_packed(q, k, v, made.last, cu_seqlens=cu)
        return
    if t.randomizes:
        return
    for is_causal in (False, True) if t.can("causal") else (False,):
        got = attention_packed(q, k, v, made.last, cu_seqlens=cu, is_causal=is_causal)
        single = [[x[a:b].transpose(0, 1)[None] for x in (q, k, v)] for a, b in itertools.pairwise(cu[:-1])]
        wanted = torch.cat([made(*tensors, is_causal=is_causal)[0].transpose(0, 1) for tensors in single])
        equal(got, wanted, "packed sequences differ from a loop over them")


def heads_can_be_divided(t: Trial) -> None:
    """Two ranks with half the heads and parameters each compute what one does (tensor parallelism)."""
    if "heads" in t.reads or t.groups % 2 or t.chained or t.randomizes:
        return
    made, tensors, halves = t.build(), t.inputs(), []
    for rank in range(2):
        half = copy.deepcopy(made.last)
        half.head_share = (rank, 2)
        for name, axis in head_axes(t.config, Dims(HEADS, t.groups, DIM)).items():
            owner, _, leaf = name.rpartition(".")
            whole = half.get_parameter(name)
            own = whole if axis is None else whole.chunk(2, axis)[rank]
            half.get_submodule(owner).register_parameter(leaf, nn.Parameter(own.detach().clone()))
        halves.append(half(*(x.chunk(2, 1)[rank] for x in tensors)))
    fix = f"Read heads from the tensors, not from dims. {t.reading('heads')}"
    equal(torch.cat(halves, 1), made(*tensors), f"half of the heads, run separately, compute something else. {fix}")


# --- transforms and checkpoints ---------------------------------------------------------------------------------------


def devices(t: Trial) -> None:
    """Run on the device of the inputs, which a device without numbers shows on every machine."""
    fix = "Make tensors with device=k.device, and read no numbers in Python (item(), if x > 0)"
    with t.possible("a call on another device", fix):
        out = t.build().to("meta")(*(x.to("meta") for x in t.inputs()))
        if out.device.type != "meta":
            raise Wrong(f"inputs on another device give an output on {out.device}. {fix}")


def compiles(t: Trial) -> None:
    """torch.compile in one graph, and torch.export run again, give the same; a refusal must name the mechanism."""
    if t.randomizes or t.chained:
        return
    made, tensors = t.build(), t.inputs()
    given = made.layer_input(tensors[0])
    causal = given | ({"is_causal": True} if t.can("causal") else {})
    fix = "Use PyTorch operations only, or raise UnsupportedError that names the mechanism"
    with t.possible("torch.compile", fix):
        compiled: Any = torch.compile(made.last, fullgraph=True, backend="eager")
        equal(compiled(*tensors, **causal), made.last(*tensors, **causal), "torch.compile gives another output")
    torch._dynamo.reset()
    with t.possible("torch.export", fix):
        exported = torch.export.export(made.last, tensors, given).module()
        equal(exported(*tensors, **given), made(*tensors), "torch.export gives another output")
    torch._dynamo.reset()


def state_dict(t: Trial) -> None:
    """A state dict names its attention, loads into the same one strictly, and into no other."""
    made, tensors, stored = t.build(seed=0), t.inputs(), io.BytesIO()
    torch.save(made.last.state_dict(), stored)
    stored.seek(0)
    saved = torch.load(stored, weights_only=True)
    if (ENTRY in saved) == t.config.is_standard:
        raise Wrong(f"the state dict has no '{ENTRY}'; report this to quest_core")
    twin = t.build(seed=7)
    twin.load_state_dict(made.state_dict(), strict=True)
    equal(twin(*tensors), made(*tensors), "a state dict does not carry all that the output depends on")
    if not t.config.is_standard and not t.config.means("qnorm+sigmoid"):
        try:
            Mechanism("qnorm+sigmoid", num_heads=HEADS, head_dim=DIM).load_state_dict(saved, strict=True)
        except CheckpointError:
            return
        raise Wrong("a mechanism of another attention loads this state dict")


def copies_and_pickles(t: Trial) -> None:
    """A deep copy and a pickled copy compute the same."""
    made, tensors = t.build(), t.inputs()
    want = made(*tensors)
    equal(copy.deepcopy(made)(*tensors), want, "a deep copy computes something else")
    with t.possible("a pickled copy", "Keep no lambdas and local classes on the module"):
        twin = pickle.loads(pickle.dumps(made))
        if not t.chained:
            equal(twin(*tensors), want, "a pickled copy computes something else")
