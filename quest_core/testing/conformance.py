"""AdapterConformance: what every adapter promises, as tests to inherit.

The chain of proof: `standard` through the adapter equals the host's own attention (so the plumbing is right), and
another mechanism differs from `standard` only inside the module that the reference checks (so the mathematics is).
"""

import copy
import gc
import io
import pickle
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar, TypeAlias
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import quest_core
from quest_core import Adapter, Mechanism
from quest_core.checkpoints import ENTRY, decode, set_attention_from
from quest_core.hosts.functions import map_tensors
from quest_core.hosts.inject import REPORT
from quest_core.mechanisms.base import Score
from quest_core.notices import LOGGER
from quest_core.registry import find, mechanisms, owner, register, temporary
from quest_core.testing.truth import missing, use_truth

Gradients: TypeAlias = dict[str, Tensor | None]

NUMBERS = (
    "test_every_site_is_replaced_and_reported",
    "test_every_attention_goes_through_its_mechanism",
    "test_standard_equals_the_host",
    "test_mechanisms_equal_their_reference_inside_the_host",
    "test_families_train_or_are_refused_by_name",
    "test_padding_never_matters",
    "test_a_host_checkpoint_loads_into_fewer_key_heads",
    "test_queries_can_be_scaled",
    "test_initial_norms_are_set_in_a_fresh_model",
    "test_compiles",
    "test_what_the_host_cannot_honor_is_refused_by_name",
)
"""The tests of a variant: what depends on the options of a model, and not only on the classes of its modules."""


class _Cubed(Score):
    """q · k³."""

    causal = cross = cached = True
    reads = ()

    def key(self, k: Tensor) -> Tensor:
        return k**3

    def reference(self, q: Tensor, k: Tensor, v: Tensor, *, head: Tensor, seen: Tensor) -> Tensor:
        return q @ (k * k * k)[:, head].mT


def from_elsewhere() -> list[str]:
    """Return the name of a score that no adapter knows, and those of all mechanisms of other distributions."""
    return ["conformance-cubed", *(name for name, part in mechanisms().items() if owner(part) != "quest-core")]


class AdapterConformance(ABC):
    """Inherit, name the class ``Test...``, and fill in what is marked.

    Attributes, which may also stand behind the base, as in ``class TestLarge(TestSmall, variant=True, sites=4)``:
        adapter: the adapter under test.
        sites: the number of attention modules in the model of `make_model`.
        mechanisms: mechanisms that the host must honor.
        refused: mechanisms for which this host must raise an error that names them.
        autocasts: whether the host's own model runs under autocast to bfloat16 on a CPU.
        compiles: whether the host's own model can be compiled; an adapter must not take that away.
        calibrates: whether the adapter can be used by `quest_core.calibrate`.
        variant: whether another class tests a model of the same modules with other options; then only NUMBERS run.
        tolerance: absolute and relative difference allowed between `standard` and the host, in float32.
    """

    def __init_subclass__(cls, **attributes: Any) -> None:
        """Set the attributes, and drop the tests that say nothing about this host, so that none is skipped."""
        super().__init_subclass__()
        for name, value in attributes.items():
            setattr(cls, name, value)
        applies = {
            "test_padding_never_matters": cls.make_padded is not AdapterConformance.make_padded,
            "test_queries_can_be_scaled": cls.calibrates,
            "test_autocast": cls.autocasts,
            "test_compiles": cls.compiles,
            "test_what_the_host_cannot_honor_is_refused_by_name": bool(cls.refused),
        }
        for name in filter(re.compile("test_").match, vars(AdapterConformance)):
            if not applies.get(name, True) or (cls.variant and name not in NUMBERS):
                setattr(cls, name, False)
            elif getattr(cls, name) is False:  # dropped by a base, which says less than this class
                setattr(cls, name, vars(AdapterConformance)[name])

    adapter: ClassVar[Adapter]
    sites: ClassVar[int]
    mechanisms: ClassVar[tuple[str, ...]] = (
        "quest",
        "qnorm",
        "qknorm-hs",
        "qknorm-ds",
        "qknorm",
        "quest+sigmoid",
        "sinkhorn",
    )
    refused: ClassVar[tuple[str, ...]] = ()
    autocasts: ClassVar[bool] = True
    compiles: ClassVar[bool] = True
    calibrates: ClassVar[bool] = True
    variant: ClassVar[bool] = False
    tolerance: ClassVar[float] = 2e-5

    @abstractmethod
    def make_model(self) -> nn.Module:
        """The host's own small model with dropout, freshly built; the caller seeds."""

    @abstractmethod
    def make_inputs(self) -> tuple[Any, ...]:
        """Arguments for the model's forward; the caller seeds."""

    def make_padded(self) -> tuple[tuple[Any, ...], tuple[Any, ...], Callable[[Tensor], Tensor]]:
        """Two sets of arguments that differ only where padding hides it, and a function that picks the real outputs.

        Override unless the host has no padding.
        """
        raise NotImplementedError

    def run(self, model: nn.Module, inputs: tuple[Any, ...]) -> Tensor:
        """Call the model and return one tensor of its outputs."""
        out = model(*inputs)
        return out[0] if isinstance(out, tuple) else out  # type: ignore[no-any-return]

    # --- helpers ---------------------------------------------------------------------------------------------------

    def stock(self, seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        return self.make_model()

    def inputs(self, seed: int = 1) -> tuple[Any, ...]:
        torch.manual_seed(seed)
        return self.make_inputs()

    def inject(self, attention: quest_core.AttentionSpec, seed: int = 0) -> nn.Module:
        return quest_core.inject(self.stock(seed), attention, adapter=self.adapter)[0]

    def run_with_seed(self, model: nn.Module, inputs: tuple[Any, ...]) -> Tensor:
        torch.manual_seed(2)
        return self.run(model, inputs)

    def is_refused(self, attention: str, name: str) -> bool:
        """Return whether a site cannot have this attention; fail unless `inject` says so of mechanism `name`."""
        config = quest_core.AttentionConfig.parse(attention)
        if all(self.adapter.refusal(site, config) is None for site in self.adapter.sites(self.stock())):
            return False
        with pytest.raises(quest_core.UnsupportedError, match=f"'.*{re.escape(name)}.*' cannot be used in"):
            self.inject(attention)
        return True

    def grouping(self, name: str = "gqa") -> str | None:
        """A grouping that fits every site, or None when the host's projections cannot change."""
        found = list(self.adapter.sites(self.stock()))
        if all(site.num_heads % 2 == 0 for site in found):
            spec = quest_core.AttentionConfig.parse(f"quest+{name}(kv_heads={min(s.num_heads // 2 for s in found)})")
            if all(self.adapter.refusal(site, spec) is None for site in found):
                return str(spec)
        return None

    def assert_close(self, got: Tensor, want: Tensor, tolerance: float | None = None) -> None:
        allowed = self.tolerance if tolerance is None else tolerance
        torch.testing.assert_close(_plain(got), _plain(want), rtol=allowed, atol=allowed)

    # --- injection -------------------------------------------------------------------------------------------------

    def test_every_site_is_replaced_and_reported(self) -> None:
        model = self.stock()
        found = list(self.adapter.sites(model))
        assert len(found) == self.sites
        model, report = quest_core.inject(model, "quest", adapter=self.adapter)
        assert [r.path for r in report.replacements] == [site.path for site in found]
        assert all(r.parameters_before == r.parameters_after for r in report.replacements)
        assert getattr(model, REPORT) == report
        assert report.attention == "quest"

    def test_a_replaced_module_is_a_site_again(self) -> None:
        model = self.inject("quest")
        model, report = quest_core.inject(model, "standard", adapter=self.adapter)
        assert len(report.replacements) == self.sites
        model.eval()
        self.assert_close(self.run(model, self.inputs()), self.run(self.stock().eval(), self.inputs()))
        gc.collect()  # hooks may hold what was replaced
        model.load_state_dict(model.state_dict())

    def test_every_attention_goes_through_its_mechanism(self) -> None:
        """In training, and in evaluation without gradients, where hosts and PyTorch keep shortcuts."""
        model = self.inject("quest")
        for training in (True, False):
            model.train(training)
            with _collect_used(model) as touched, torch.set_grad_enabled(training):
                self.run(model, self.inputs())
            assert len(touched) == self.sites

    def test_parameters_of_a_mechanism_are_frozen_with_the_projections(self) -> None:
        frozen = quest_core.inject(self.stock().requires_grad_(False), "qknorm-hs", adapter=self.adapter)[0]
        assert not any(p.requires_grad for p in frozen.parameters())
        own = [p for m in self.inject("qknorm-hs").modules() if isinstance(m, Mechanism) for p in m.parameters()]
        assert own
        assert all(p.requires_grad for p in own)

    def test_modules_stay_the_same_objects_and_can_be_restored(self) -> None:
        model = self.stock().eval()
        modules, kinds = [*model.modules()], [type(module) for module in model.modules()]
        attributes = [vars(module).keys() for module in modules]
        own, inputs = self.run(model, self.inputs()), self.inputs()
        quest_core.inject(model, "quest", adapter=self.adapter)
        assert {*map(id, modules)} <= {*map(id, model.modules())}
        assert not torch.equal(_plain(self.run(model, inputs)), _plain(own))
        quest_core.uninject(model)
        assert [*map(id, model.modules())] == [*map(id, modules)]
        assert [type(module) for module in model.modules()] == kinds
        assert [vars(module).keys() for module in modules] == attributes
        assert torch.equal(_plain(self.run(model, inputs)), _plain(own))

    # --- standard is the host's own --------------------------------------------------------------------------------

    @pytest.mark.parametrize("training", [True, False])
    def test_standard_equals_the_host(self, training: bool) -> None:
        """Outputs, gradients of every parameter, and the stream of random numbers of dropout."""
        stock, ours = self.stock().train(training), self.inject("standard").train(training)
        want, got = (self.run_with_seed(model, self.inputs()) for model in (stock, ours))
        self.assert_close(got, want)
        self._compare_gradients(_gradients(ours, got), _gradients(stock, want))

    # --- other mechanisms ------------------------------------------------------------------------------------------

    def test_mechanisms_equal_their_reference_inside_the_host(self) -> None:
        """Outputs, and gradients of every parameter, in float64; what has no reference still differs from standard."""
        self._compare_with_reference(*self.mechanisms)

    @pytest.mark.parametrize("name", from_elsewhere())
    def test_a_mechanism_from_elsewhere_runs_or_is_refused_by_name(self, name: str) -> None:
        """By its declarations only: a score that no adapter knows, and what other distributions have installed."""
        with temporary():
            if name == "conformance-cubed":
                register(name, source="a test")(type("Cubed", (_Cubed,), {}))
            grouping = any(option.name == "kv_heads" for option in find(name).options)
            attention = (self.grouping(name) if grouping else None) or name
            if not self.is_refused(attention, name):
                self._compare_with_reference(attention)

    def _compare_with_reference(self, *attentions: str) -> None:
        inputs = map_tensors(self.inputs(), lambda x: x.double() if x.is_floating_point() else x)
        standard = self.run(self.inject("standard").double().eval(), inputs)
        for attention in attentions:
            model = self.inject(attention).double().eval()
            found = [module for module in model.modules() if isinstance(module, Mechanism)]
            got = self.run_with_seed(model, inputs)
            assert not torch.allclose(_plain(got), _plain(standard), atol=1e-9), attention
            gradients = _gradients(model, got)
            if any(missing(mechanism.config) for mechanism in found):
                continue
            with use_truth(found):
                want = self.run_with_seed(model, inputs)
                self.assert_close(got, want, 1e-9)
                self._compare_gradients(gradients, _gradients(model, want), 1e-9)

    def _compare_gradients(self, got: Gradients, want: Gradients, tolerance: float | None = None) -> None:
        for name, own in got.items():
            gradient = want[name]
            assert (own is None) == (gradient is None), f"{name} has a gradient only in one"
            if own is not None and gradient is not None:
                assert own.isfinite().all(), f"the gradient of {name} is not finite"
                at = gradient.isfinite()  # a plain formula has none at a zero vector
                self.assert_close(own[at], gradient[at], tolerance)

    def test_families_train_or_are_refused_by_name(self) -> None:
        """Mechanisms without weights refuse to drop them, to pass them on and to return them."""
        for name in [name for name, part in mechanisms().items() if part.axis == "family"]:
            if self.is_refused(name, name):
                continue
            model = self.inject(name)
            with _collect_used(model) as touched:
                _loss(self.run(model, self.inputs())).backward()
            assert len(touched) == self.sites
            own = [p for m in model.modules() if isinstance(m, Mechanism) for p in m.parameters()]
            assert all(p.grad is not None and p.grad.isfinite().all() for p in own), name

    def test_padding_never_matters(self) -> None:
        torch.manual_seed(1)
        one, other, real = self.make_padded()
        for attention in ("standard", *self.mechanisms):
            model = self.inject(attention).eval()
            self.assert_close(real(self.run(model, one)), real(self.run(model, other)))
        stock, ours = self.stock().eval(), self.inject("standard").eval()
        self.assert_close(real(self.run(ours, one)), real(self.run(stock, one)))

    def test_what_is_uninstalled_is_gone(self) -> None:
        self.adapter.install()
        made, handlers = list(self.adapter.patches), len(LOGGER.handlers)
        patched = [vars(owner)[name] for owner, name, _ in made]
        self.adapter.install()
        assert [vars(owner)[name] for owner, name, _ in made] == patched, "install() twice changes the host twice"
        self.adapter.uninstall()
        for place, name, original in made:
            assert vars(place).get(name) is original, f"{place}.{name} is not restored"
        self.adapter.install()
        assert len(LOGGER.handlers) == handlers, "uninstall() leaves a handler of notices"

    # --- checkpoints -----------------------------------------------------------------------------------------------

    def test_a_state_dict_names_its_attention(self) -> None:
        stock, ours = self.stock(seed=5), self.inject("quest", seed=6)
        shapes = {name: x.shape for name, x in stock.state_dict().items()}
        entries = [name for name in ours.state_dict() if name.endswith(ENTRY)]
        assert {name: x.shape for name, x in ours.state_dict().items() if name not in entries} == shapes
        assert {decode(ours.state_dict()[name]) for name in entries} == {"quest"}
        with pytest.raises((RuntimeError, quest_core.CheckpointError), match=ENTRY):
            stock.load_state_dict(ours.state_dict(), strict=True)
        standard = self.inject("standard", seed=8).eval()
        standard.load_state_dict(stock.state_dict(), strict=True)
        self.assert_close(self.run(standard, self.inputs()), self.run(stock.eval(), self.inputs()))
        stock.load_state_dict(standard.state_dict(), strict=True)

    def test_no_checkpoint_loads_silently_into_another_attention(self) -> None:
        """As loaders do that copy a state dict into a plain mapping, through a file of tensors."""
        # None is the host's own; the last is gqa, with as few key heads as every site allows, where the host takes it.
        attentions = (None, "standard", "quest", "sigmoid", *filter(None, [self.grouping()]))

        def build(attention: str | None, seed: int) -> nn.Module:
            return self.stock(seed) if attention is None else self.inject(attention, seed)

        stored = io.BytesIO()
        torch.save([dict(build(attention, 5).state_dict()) for attention in attentions], stored)
        stored.seek(0)
        states = torch.load(stored, weights_only=True)
        for attention in attentions:
            model = build(attention, 6)
            for trained, state in zip(attentions, states, strict=True):
                self._load(model, attention, trained, state)

    def _load(self, model: nn.Module, attention: str | None, trained: str | None, state: dict[str, Tensor]) -> None:
        plain = (None, "standard")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if attention == trained or trained in plain:
                model.load_state_dict(state, strict=True)
            elif attention is None:
                with pytest.raises((RuntimeError, quest_core.CheckpointError), match=ENTRY):
                    model.load_state_dict(state, strict=True)
            else:
                before = {name: x.clone() for name, x in model.state_dict().items()}
                with pytest.raises(quest_core.CheckpointError, match="attention_from"):
                    model.load_state_dict(state, strict=True)
                assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
        said = [w for w in caught if issubclass(w.category, quest_core.AttentionMismatchWarning)]
        assert len(said) == (trained in plain and attention not in plain), f"{trained} into {attention}"

    @pytest.mark.parametrize("trained", ["standard", "quest"])
    def test_a_host_checkpoint_loads_into_fewer_key_heads(self, trained: str) -> None:
        attention = self.grouping()
        assert attention is not None, "the adapter offers fewer key heads, but no site of this model can have them"
        source = self.inject(trained, seed=5)
        model = self.inject(attention, seed=6).eval()
        set_attention_from(model, trained)
        model.load_state_dict(source.state_dict(), strict=True)
        converted = quest_core.inject(source, attention, adapter=self.adapter)[0].eval()
        self.assert_close(self.run(model, self.inputs()), self.run(converted, self.inputs()))

    def test_learnable_mechanisms_round_trip(self) -> None:
        first, second = self.inject("qknorm-hs", seed=5).eval(), self.inject("qknorm-hs", seed=6).eval()
        with torch.no_grad():
            for parameter in first.parameters():
                parameter.add_(0.01)
        second.load_state_dict(first.state_dict(), strict=True)
        self.assert_close(self.run(second, self.inputs()), self.run(first, self.inputs()))

    def test_copies_and_pickles(self) -> None:
        model = self.inject("quest").eval()
        want = self.run(model, self.inputs())
        self.assert_close(self.run(copy.deepcopy(model), self.inputs()), want)
        twin = pickle.loads(pickle.dumps(model))
        self.assert_close(self.run(twin, self.inputs()), want)
        assert getattr(twin, REPORT) == getattr(model, REPORT)

    # --- conversion ------------------------------------------------------------------------------------------------

    def test_queries_can_be_scaled(self) -> None:
        """Each head's queries grow by its own factor, and nothing else of the module changes."""
        for index in range(self.sites):
            model = self.inject("standard").eval()
            site = list(self.adapter.sites(model))[index]
            (mechanism,) = (m for m in site.module.modules() if isinstance(m, Mechanism))
            factor = torch.linspace(0.5, 2, site.num_heads, dtype=torch.float64)
            found: list[Any] = []
            for _ in range(2):
                # Only the first call: where a host runs a module again, the second one sees the changes of the first.
                with quest_core.Monitor(mechanism, every=10**6, logits=False) as monitor:
                    self.run(model, self.inputs())
                    found += monitor.collect().values()
                self.adapter.scale_queries(site.module, factor)
            before, after = found
            wanted = [norm * c for norm, c in zip(before["query_norm_mean"], factor.tolist(), strict=True)]
            assert after["query_norm_mean"] == pytest.approx(wanted, rel=1e-4)
            assert after["key_norm_mean"] == pytest.approx(before["key_norm_mean"], rel=1e-4)

    # --- types and compilers ---------------------------------------------------------------------------------------

    def test_initial_norms_are_set_in_a_fresh_model(self) -> None:
        spec = "quest(init=5, key_init=2)"
        sites = list(self.adapter.sites(self.inject("quest")))
        refused = any(self.adapter.refusal(site, quest_core.AttentionConfig.parse(spec)) for site in sites)
        assert not (refused and self.calibrates), "queries that can be scaled can have an initial norm"
        if refused or not any(self.adapter.projections(site.module) for site in sites):
            errors = (quest_core.UnsupportedError, quest_core.ConfigError)
            with pytest.raises(errors, match="describes none|cannot be used in|a Mechanism does not have"):
                quest_core.inject(self.stock(), spec, adapter=self.adapter, fresh=True)
            return
        model, report = quest_core.inject(self.stock(), spec, adapter=self.adapter, fresh=True)
        parts = [part for site in self.adapter.sites(model) for part in self.adapter.projections(site.module)]
        assert len(parts) >= self.sites, "each replacement must be or contain a quest_core.projections.Projected"
        for part in parts:
            for role, norm in (("q", 5.0), ("k", 2.0)):
                norms = part.projections.norms(part, part.head_sizes, role)
                torch.testing.assert_close(norms, torch.full_like(norms, norm), rtol=1e-5, atol=0)
        assert {round(norm, 4) for row in report.replacements for norm in row.query_norms} == {5.0}
        model.load_state_dict(self.inject("quest").state_dict())  # a checkpoint does not depend on initial norms

    def test_autocast(self) -> None:
        try:
            with torch.autocast("cpu", torch.bfloat16):
                self.run(self.stock().eval(), self.inputs())
        except RuntimeError as error:  # for example an LSTM, whose bfloat16 kernel needs AVX-512
            pytest.xfail(f"the host's own model fails under autocast on this CPU: {error}")
        model = self.inject("quest").eval()
        with torch.autocast("cpu", torch.bfloat16):
            low = self.run(model, self.inputs())
        self.assert_close(low.float(), self.run(model, self.inputs()).float(), 0.1)

    @pytest.mark.slow
    def test_compiles(self) -> None:
        model = self.inject("quest").eval()
        compiled: Any = torch.compile(model, backend="eager")
        self.assert_close(self.run(compiled, self.inputs()), self.run(model, self.inputs()))
        torch._dynamo.reset()

    # --- refusals --------------------------------------------------------------------------------------------------

    def test_what_the_host_cannot_honor_is_refused_by_name(self) -> None:
        for attention in self.refused:
            model = self.stock()
            before = [type(m) for m in model.modules()]
            with pytest.raises(quest_core.UnsupportedError, match="Possible here: .*quest"):
                quest_core.inject(model, attention, adapter=self.adapter, fresh=True)
            assert [type(m) for m in model.modules()] == before


@contextmanager
def _collect_used(model: nn.Module) -> Iterator[set[int]]:
    """Collect the mechanisms of `model` of which a part is used inside the block: a score, or a family."""
    touched: set[int] = set()
    with ExitStack() as changes:
        for mechanism in model.modules():
            for part in mechanism.children() if isinstance(mechanism, Mechanism) else ():

                def spy(*args: Any, _method: Any = part.forward, _owner: int = id(mechanism), **kwargs: Any) -> Any:
                    touched.add(_owner)
                    return _method(*args, **kwargs)

                changes.enter_context(mock.patch.object(part, "forward", spy))
        yield touched


def _gradients(model: nn.Module, out: Tensor) -> Gradients:
    """The gradient of `_loss` for each parameter by name."""
    model.zero_grad()
    _loss(out).backward()
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def _loss(out: Tensor) -> Tensor:
    """A loss that no normalization at the end of a host makes constant."""
    flat = out.flatten() if out.dtype == torch.float64 else out.float().flatten()
    return (flat - torch.linspace(-1, 1, len(flat), dtype=flat.dtype)).square().mean()


def _plain(x: Tensor) -> Tensor:
    """Hosts return subclasses of Tensor, which comparisons should not dispatch on."""
    return x.detach().as_subclass(Tensor)
