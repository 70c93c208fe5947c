"""The conformance suite that every adapter's tests inherit.

>>> from quest_core.testing import AdapterConformance
>>> class TestMyHost(AdapterConformance):
...     adapter = MyAdapter()
...     sites = 2
...     def make_model(self): return MyModel(dropout=0.1)
...     def make_inputs(self): return (torch.randn(2, 9, 16),)
"""

from .conformance import AdapterConformance as AdapterConformance
