"""The conformance suites that plugins and mechanisms are tested with.

>>> from quest_core.testing import AdapterConformance
>>> class TestMyHost(AdapterConformance):
...     adapter = MyAdapter()
...     sites = 2
...     def make_model(self): return MyModel(dropout=0.1)
...     def make_inputs(self): return (torch.randn(2, 9, 16),)

>>> from quest_core.testing import check_mechanism
>>> check_mechanism("quest+gqa(kv_heads=2)")
"""

from typing import TYPE_CHECKING, Any

from .mechanisms import CHECKS as CHECKS
from .mechanisms import MechanismError as MechanismError
from .mechanisms import check_mechanism as check_mechanism

if TYPE_CHECKING:
    from .conformance import AdapterConformance as AdapterConformance


def __getattr__(name: str) -> Any:
    if name != "AdapterConformance":
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    from .conformance import AdapterConformance  # needs pytest, which users of quest_core may lack

    return AdapterConformance
