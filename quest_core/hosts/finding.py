"""Find attention that no adapter knows: judge what a search saw while it ran an example."""

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..config import AttentionConfig
from ..drafts import host_class
from ..errors import InjectionError, UnsupportedError
from .adapter import Adapter, Site, refusal
from .following import LEARNED, TENSOR, Flow, Flows, Origin, varying
from .functions import from_last
from .search import UNSEEN, Frame, Operand, Search, Softmax, contracted
from .sites import KEPT, FoundSite, looks_like_attention, norm_note, within
from .universal import Call, Routed
from .written import PROJECTION, Product, SoftmaxOf, Written, WrittenOut

UNIVERSAL, WRITTEN_OUT = "universal", "written out"
"""Names of the adapters of what an example finds, as reports have them."""
MIXES = "it mixes the logits of its heads before the softmax (talking heads)"
NO_PRODUCT = "its softmax is of no product of two activations"


class _OneKey(UnsupportedError):
    """A softmax over one key, as in the first step of decoding; another call of the module may show more."""


class _Judge:
    """Decides for each module of a search whether it is a site, is kept, or is refused, and why."""

    def __init__(self, search: Search, again: Callable[[], Search], *, kernels_attend: bool) -> None:
        self.search, self.again = search, again
        self.sites: dict[str, Written] = {}
        self.refused = {**search.refused}
        self.left_alone: dict[str, str] = {}
        self._other: list[Origin] | None = None
        self._judge_softmaxes_by_hand()
        self._judge_frames()
        self._judge_products_without_softmax()
        for frame in search.frames:
            weighs = frame.softmaxes or (kernels_attend and frame.path in search.unseen)
            if not weighs and looks_like_attention(frame.module):
                self.left_alone.setdefault(frame.path, "it forms no softmax")
        judged = {*self.sites, *self.refused}
        self.left_alone = {path: why for path, why in self.left_alone.items() if path not in judged}

    def _judge_softmaxes_by_hand(self) -> None:
        """Refuse them, unless one operand is of no projection and the same for other inputs.

        Then they are random features (Performer), and not the weights of keys.
        """
        for origin, function in self.search.by_hand.items():
            with contextlib.suppress(UnsupportedError):
                fixed = self._are_fixed(origin)
                if fixed.count(True) == 1 and origin.operands[fixed.index(True)].origin is None:
                    continue
            self.refused.setdefault(origin.frames[-1].path, f"it spells its softmax by {function}")

    def _judge_frames(self) -> None:
        one_key: dict[str, str] = {}
        for frame in self.search.frames:
            own = [one for one in frame.softmaxes if one.owner is frame]
            for one in own:
                if one.projected and not one.terms:
                    self.left_alone.setdefault(one.place, NO_PRODUCT)
            try:
                self._judge_frame(frame, [one for one in own if one.terms])
            except _OneKey as error:
                one_key.setdefault(frame.path, str(error))
            except UnsupportedError as error:
                self.refused.setdefault(frame.path, str(error))
        self.refused = {path: why for path, why in one_key.items() if path not in self.sites} | self.refused
        self.sites = {path: site for path, site in self.sites.items() if path not in self.refused}

    def _judge_products_without_softmax(self) -> None:
        lost = [one.owner.path for one in self.search.softmaxes if not one.terms and not one.projected]
        for origin in self.search.products:
            path = origin.frames[-1].path
            if origin.operands and all(operand.features for operand in origin.operands):
                if not any(within(other, [path]) for other in lost):
                    self.left_alone.setdefault(path, "no softmax follows its products of two activations")
                elif not origin.softmaxes:
                    self.refused.setdefault(path, "between its product and its softmax stands a compiled kernel")

    def _judge_frame(self, frame: Frame, softmaxes: list[Softmax]) -> None:
        """Judge one run of a module by its own softmaxes of products."""
        roles: dict[Origin, Product] = {}
        found: list[Written] = []
        for softmax in softmaxes:
            if not (softmax.is_applied or "kept" in softmax.origin.uses):
                self.left_alone.setdefault(frame.path, "the softmax of its product is applied to no values")
            elif self._is_over_channels(softmax):
                self.left_alone.setdefault(frame.path, "it attends over channels, and not over tokens")
            elif all(_is_additive(flow.origin) for flow in softmax.terms):
                self.left_alone.setdefault(frame.path, NO_PRODUCT)
            else:
                for flow in self._content(softmax):
                    roles[flow.origin], one = self._role(softmax, flow)
                    found.append(replace(one, path=frame.path))
        for origin in frame.products if roles else ():
            if origin.is_logits and not origin.softmaxes and any(_share_operands(origin, role) for role in roles):
                raise UnsupportedError(
                    "it also multiplies its queries and keys without a softmax, as to choose among them (Informer), "
                    "and that product would stay the host's"
                )
        if roles:
            site, known = self._site(frame, roles, found), self.sites.get(frame.path)
            self.sites[frame.path] = site if known is None else known.join(site)

    def _site(self, frame: Frame, roles: dict[Origin, Product], found: list[Written]) -> Written:
        """Return the facts about one run of a module, from those `found` about each product of queries and keys."""
        if any(product.head is None for product in roles.values()):
            roles = {origin: replace(product, head=None) for origin, product in roles.items()}
            found = [replace(one, heads=1, kv_heads=1) for one in found]
        if not all(math.isclose(one.scale, found[0].scale) for one in found):
            raise UnsupportedError("it forms products with two scales, and a site has one")
        facts = functools.reduce(Written.join, (replace(one, products=()) for one in found))
        products = [roles.get(origin, _other_product(origin)) for origin in frame.products]
        softmaxes, start = list[SoftmaxOf](), frame.products[0].number
        for softmax in frame.softmaxes:
            terms = sorted(
                (flow.origin.number - start, flow.factor, flow.capped)
                for flow in softmax.terms
                if flow.origin.number >= 0 and (flow.origin in roles or not flow.origin.is_activation)
            )
            softmaxes.append(SoftmaxOf(tuple(terms), from_last(softmax.origin.axis, len(softmax.shape))))
        count = _period(products, softmaxes)
        return replace(
            facts,
            products=tuple(products[: len(products) // count]),
            softmaxes=tuple(softmaxes[: len(softmaxes) // count]),
            repeated=count > 1,
            multiplied=any(origin.multiplied for origin in frame.products),
        )

    def _is_over_channels(self, softmax: Softmax) -> bool:
        """Return whether tokens are contracted and features attend, as in XCiT."""
        for origin, over in softmax.axes.items():
            for operand, own in zip(origin.operands, origin.equation, strict=False):
                if operand.features is not None and over & {*own} & operand.features:
                    inner = {*contracted(origin.equation)}
                    return not any(one.features and one.features & inner for one in origin.operands)
        return False

    def _content(self, softmax: Softmax) -> Flows:
        """Return the products of queries and keys among the terms of a softmax; the others are of positions.

        There is one, or the logits of several are joined, as those of a window and of tokens that all see.
        """
        terms = softmax.terms
        if any(flow.origin.mixes for flow in terms):
            raise UnsupportedError(MIXES)
        if any(operand.origin in softmax.norms for flow in terms for operand in flow.origin.operands):
            raise UnsupportedError("it adds norms of its queries or keys to their product, as distances do")
        added = [flow for flow in terms if not all(_are_joined(flow, other) for other in terms if other is not flow)]
        if added:
            terms = tuple(flow for flow in terms if flow not in added or not self._is_position(flow.origin))
        if not terms:
            raise UnsupportedError(
                f"{len(softmax.terms)} products meet under one softmax, and none of them has other queries and keys "
                "for other inputs; use an example whose values differ"
            )
        if not all(_are_joined(*pair) for pair in itertools.combinations(terms, 2)):
            raise UnsupportedError(
                f"{len(softmax.terms)} products meet under one softmax, {len(terms)} of them of two activations"
            )
        if any(all(_are_joined(flow, other) for other in terms) for flow in softmax.terms if flow not in terms):
            raise UnsupportedError("its logits are joined with logits of positions")
        for flow in terms:
            if flow.odd == LEARNED and all(operand.norm for operand in flow.origin.operands):
                raise UnsupportedError("it is cosine attention: its cosines are multiplied by a learned temperature")
            if flow.odd:
                raise UnsupportedError(f"between the product and the softmax stands {flow.odd}")
            if sum(one.is_applied for one in flow.origin.softmaxes) > 1:
                raise UnsupportedError("two softmaxes share one product")
        if not softmax.is_applied:
            raise UnsupportedError("its softmax is over the queries (slot attention)")
        return terms

    def _is_position(self, origin: Origin) -> bool:
        """Return whether an operand is a parameter, or is the same for other inputs."""
        return any(self._are_fixed(origin))

    def _are_fixed(self, origin: Origin) -> list[bool]:
        """Return whether each operand is a parameter, or is the same for other inputs; [] if they are not known."""
        if self._other is None:
            try:
                self._other = self.again().products
            except Exception as error:  # of a host that does not take these values
                raise UnsupportedError(
                    "several products meet under one softmax, and a run on other values, which would show the one of "
                    f"positions, failed: {type(error).__name__}: {error}"
                ) from error
        if len(self._other) != len(self.search.products):
            raise UnsupportedError("its products depend on the values of the input")
        if origin.number < 0:
            return []
        both = zip(origin.learned, origin.operands, self._other[origin.number].operands, strict=False)
        return [learned or one.seen == two.seen for learned, one, two in both]

    def _role(self, softmax: Softmax, flow: Flow) -> tuple[Product, Written]:
        """Return the role of a product and the facts about it; UnsupportedError if it is not understood."""
        origin = flow.origin
        letters, over = origin.equation, softmax.axes.get(flow.origin, set())
        query = _query(softmax, origin)
        key = 1 - query
        whole = bool(over) and over <= {*letters[key]} - {*letters[query]}  # and no windows of tokens
        q, k = origin.operands[query], origin.operands[key]
        if any(origin.learned) and any(one.origin is not None and one.origin.mixes for one in (q, k)):
            raise UnsupportedError(MIXES)
        if origin.learned[key]:
            raise UnsupportedError("its keys are parameters (a router or a memory)")
        if flow.factor <= 0:
            raise UnsupportedError(f"it multiplies its logits by {flow.factor:g}")
        (feature,) = contracted(letters)
        factors, head_dim = (q.factor or 1.0, k.factor or 1.0, flow.factor), q.sizes[feature]
        if not (q.separable and k.separable) and not _make_scale(head_dim, *factors):  # LoRA's is on a part
            if TENSOR in (q.odd, k.odd):
                raise UnsupportedError(f"{TENSOR} is on its queries or keys, and none makes the scale 1/√D")
            if UNSEEN in (q.odd, k.odd):
                raise UnsupportedError(f"{UNSEEN} made its queries or keys, and no factor makes the scale 1/√D")
            raise UnsupportedError("a factor on its queries or keys is followed by more than moves")
        if flow.capped and not _make_scale(head_dim, *factors):
            raise UnsupportedError(
                "tanh caps its logits, and the factors before and after it do not make the scale 1/√D"
            )
        batch = {*letters[2]} - over
        split = [s for s in letters[query] if whole and s in batch and s in (q.features or ())]
        undone = (1.0, *factors[1:]) if _keeps_factor(q, k, factors, head_dim) else factors
        product = Product(letters, query, factors, undone)
        if len(split) == 1 and [*map(len, replace(product, head=split[0]).axes)] == [1] * 5:
            product = replace(product, head=split[0])
        tokens = math.prod(q.sizes[s] for s in letters[query] if s in batch - {*letters[key], *split})
        return product, Written(
            path="",
            products=(product,),
            heads=q.sizes[split[0]] if product.head else 1,
            kv_heads=k.sizes.get(split[0], 1) if product.head else 1,
            head_dim=head_dim,
            causal=softmax.causal,
            cross=whole and tokens != math.prod(k.sizes[s] for s in over),
            layout=_layout(flow) if over == {*product.axes.keys} and not flow.shifted else None,
            shifted=flow.shifted,
            late=origin.takers != [flow.factor],
            note=norm_note(k.norm) or (KEPT if undone != factors else ""),
            query=q.like,
        )


def _other_product(origin: Origin) -> Product | str | None:
    """Return what a run knows of a product that is not of queries and keys."""
    if any(origin.learned):
        return PROJECTION
    return None if origin.is_activation else Product(origin.equation)


def _query(softmax: Softmax, origin: Origin) -> int:
    """Return which operand of a product is q; UnsupportedError if nothing shows it."""
    if origin in softmax.queries:
        return softmax.queries[origin]
    if softmax.axes.get(origin):
        raise UnsupportedError("the axis of its softmax belongs to queries and keys")
    raise _OneKey("the axis of its softmax is not found; use an example with more than one token")


def _share_operands(one: Origin, other: Origin) -> bool:
    """Return whether two products are of entries of the same two tensors."""
    return any(
        all(_share(a, b) for a, b in zip(one.operands, operands, strict=False))
        for operands in (other.operands, other.operands[::-1])
        if one.operands
    )


def _share(one: Operand, other: Operand) -> bool:
    """Return whether two operands hold entries of one projection."""
    if one.origin is None or one.origin is not other.origin or one.places is None or other.places is None:
        return False
    return bool(torch.isin(one.places[one.places > 0], other.places).any())


def _is_additive(origin: Origin) -> bool:
    """Return whether a product is the last layer of additive attention, v·tanh(q + k), or one with a vector."""
    if origin.mixes or not any(origin.learned):
        return False
    made = [one for one, learned in zip(origin.operands, origin.learned, strict=False) if not learned]
    return not origin.operands or any(one.bent and not (one.origin and one.origin.mixes) for one in made)


def _are_joined(one: Flow, other: Flow) -> bool:
    """Return whether each logit is of one of two products, or of none, as after a join of both."""
    if one.places is None or other.places is None:
        return False
    return not bool(((one.places > 0) & (other.places > 0)).any())


def _keeps_factor(q: Operand, k: Operand, factors: tuple[float, float, float], head_dim: int) -> bool:
    """Return whether the factor on queries is a part of them; UnsupportedError for cosine attention.

    It is none if all factors make the scale of attention, 1/√D, whatever norms the queries of the example have.
    """
    if q.norm is not None and k.norm is not None:
        cosine = factors[2] * k.norm
        if min(abs(cosine - 1), abs(factors[0] * cosine - 1)) >= 0.1:
            raise UnsupportedError(
                "it is cosine attention: queries and keys are normalized, and their cosine is multiplied by "
                f"{cosine * q.norm:.3g}"
            )
    if _make_scale(head_dim, *factors):
        return False
    if q.seen is None or k.seen is None:
        raise UnsupportedError(
            f"it multiplies its logits by {math.prod(factors):.3g}, which is not 1/√D, and tensors without values do "
            "not show whether these are cosines; run the example on a CPU"
        )
    return _make_scale(head_dim, *factors[1:]) or q.norm is not None


def _make_scale(head_dim: int, *factors: float) -> bool:
    """Return whether some factors make the scale of attention, 1/√D."""
    return math.isclose(math.prod(factors) * math.sqrt(head_dim), 1, rel_tol=1e-2)


def _period(products: list[Product | str | None], softmaxes: list[SoftmaxOf]) -> int:
    """Return how often a module repeats the same products and softmaxes in one forward."""
    for count in range(len(softmaxes), 1, -1):
        if len(products) % count or len(softmaxes) % count:
            continue
        n, m = len(products) // count, len(softmaxes) // count
        first = [tuple((place - i // m * n, *how) for place, *how in x.terms) for i, x in enumerate(softmaxes)]
        if products == products[:n] * count and first == first[:m] * count:
            return count
    return 1


class FoundAdapter(Adapter):
    """Adapter for what is `found` in one way, by the path of its module; its name is `UNIVERSAL` or `WRITTEN_OUT`."""

    name: str  # type: ignore[misc]

    def __init__(self, name: str, found: Mapping[str, Call | Written]) -> None:
        self.name, self.found = name, found

    def replace(self, site: Site, config: AttentionConfig) -> nn.Module:
        """Return the draft of a site with a mechanism; its parameters are the same objects."""
        made: nn.Module = self.found[site.path].draft(site.module, config)
        return made

    def kernel(self, site: Site, made: nn.Module) -> str:
        """Return what the host's code calls, if the mechanism prepares operands only, or as in `Adapter`."""
        found = self.found[site.path]
        if isinstance(found, Written):
            return WRITTEN_OUT
        return found.function if found.function == "flex_attention" else super().kernel(site, made)

    def refusal(self, site: Site, config: AttentionConfig) -> str | None:
        """Return what `config` needs beyond the operands of a call or product, or None."""
        return self.found[site.path].refusal(config) or refusal(config, site.capabilities)


class Finding:
    """The modules that call an attention function of PyTorch or write attention out, and that no adapter takes.

    Args:
        model: it is not changed. What an earlier injection found in it is known from the start.
        taken: paths of the modules that adapters replace.
    """

    def __init__(self, model: nn.Module, taken: Collection[str] = ()) -> None:
        self.model, self.taken = model, taken
        self.modules = dict(model.named_modules())
        free = {path: module for path, module in self.modules.items() if not within(path, taken)}
        # What was found, by the path of its module, in the order in which they ran.
        self.calls: dict[str, Call] = {p: m.found_attention for p, m in free.items() if isinstance(m, Routed)}
        self.written: dict[str, Written] = {p: m.found_attention for p, m in free.items() if isinstance(m, WrittenOut)}
        # Those of `taken` that did not run, in modules that attend themselves; such modules only lend projections.
        self.idle = [path for path in taken if within(path, self._found())]
        self.left_alone: dict[str, str] = {}  # modules without a softmax of q·k over tokens, or not understood -> why
        self.missed: dict[str, nn.Module] = {}  # others that are like attention by their class or by a softmax

    def run(self, example: Any, adapters: Iterable[Adapter] = (), *, allow_partial: bool = False) -> None:
        """Run an example, as in :func:`quest_core.inject`, and find what it shows, besides what others have shown.

        Raises:
            UnsupportedError: attention is called or written out in a way that is not understood, or a module attends
                with other heads, features or scale in one call than in another; unless `allow_partial`.
        """
        known = {*self.taken, *self.written}
        search = Search(self.model, known).run(example)
        judge = _Judge(
            search,
            lambda: Search(self.model, known).run(example, changed=True),
            kernels_attend=all(one.kernels_attend for one in adapters),
        )
        if judge.refused and not allow_partial:
            shown = "; ".join(
                f"'{path}' ({type(self.modules[path]).__name__}): {why}" for path, why in [*judge.refused.items()][:8]
            )
            raise UnsupportedError(f"attention is not understood: {shown}; say allow_partial=True to leave it as it is")
        ran = {frame.path for frame in search.frames}
        self.calls |= {path: call for path, call in search.calls.items() if path not in judge.refused}
        self.written |= judge.sites
        self.idle = [x for x in self.taken if within(x, (*self._found(), *search.calls)) and x not in ran]
        self.left_alone |= judge.left_alone | judge.refused
        ours = self.ours()
        self.missed |= {path: self.modules[path] for path in judge.refused}
        self.missed = {path: module for path, module in self.missed.items() if not within(path, ours)}
        kinds = {host_class(self.modules[path]) for path in self._found()}
        weigh = {one.place for one in search.softmaxes if one.is_usual}
        alike = {type(self.modules[x]) for x in judge.left_alone} - {
            type(self.modules[x]) for x in (*ours, *judge.refused)
        }
        for path, module in self.modules.items():
            if type(module) in alike and path not in ran:
                self.left_alone.setdefault(path, "it did not run, and others of its class have no attention")
            apart = not within(path, ours) and not any(within(other, [path]) for other in ours)
            if apart and (type(module) in kinds or path in weigh):
                self.missed[path] = module

    def sites(self, *, allow_partial: bool = False) -> Iterator[tuple[Adapter, Site]]:
        """Yield what was found, each with its adapter.

        InjectionError for a module that cannot be a site, which `allow_partial` leaves as it is.
        Where some attention is causal, the queries of attention across sequences are taken for those of a decoder.
        """
        decodes = any(one.causal for one in (*self.calls.values(), *self.written.values()))
        for adapter in (FoundAdapter(UNIVERSAL, self.calls), FoundAdapter(WRITTEN_OUT, self.written)):
            for path, one in adapter.found.items():
                module = self.modules[path]
                inside = [other for other in self.ours() if within(other, [path])]
                inside.remove(path)  # it is there twice if it both calls a function and writes attention out
                if inside:
                    why, fix = f"it contains another attention, '{inside[0]}'", "move one of them into its own module"
                elif hasattr(module, "mechanism") and not isinstance(module, FoundSite):
                    why, fix = "it has an attribute 'mechanism', which a site needs", "rename it"
                else:
                    asked = replace(one.asks, causal=True) if decodes and one.cross else one.asks
                    yield adapter, Site(path, module, one.heads, one.head_dim, asked, note=one.note)
                    continue
                if not allow_partial:
                    raise InjectionError(
                        f"'{path}' ({type(module).__name__}) {one.does}, and {why}; {fix}, or say allow_partial=True "
                        "to leave it as it is"
                    )
                self.left_alone[path], self.missed[path] = why, module

    def ours(self) -> list[str]:
        """Return the paths of all modules that become sites, some of them twice."""
        return [path for path in (*self._found(), *self.taken) if path not in self.idle]

    def _found(self) -> list[str]:
        return [*self.calls, *self.written]


def _layout(flow: Flow) -> str | None:
    """Return the letters of a product in the order in which logits hold its entries; None if they hold others too."""
    shape, result, index = flow.origin.shape, flow.origin.equation[2], flow.places
    if index is None or index.numel() != math.prod(shape):
        return None
    order = "".join(result[i] for axis in range(index.dim()) for i in sorted(varying(flow, axis)))
    order = "".join(dict.fromkeys(order))
    for place, letter in enumerate(result):  # an axis of one entry varies nowhere
        order = order if letter in order else order[:place] + letter + order[place:]
    entries = torch.arange(1, index.numel() + 1).view(shape).permute([result.index(s) for s in order])
    return order if torch.equal(entries.reshape(index.shape), index.long()) else None
