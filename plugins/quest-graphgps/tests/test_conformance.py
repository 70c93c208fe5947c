"""PyTorch Geometric's GPSConv and the GPS model of GraphGym through the suite that all adapters inherit."""

from models import RAGGED, SIZES, ConvModel, EdgeModel, GymModel, configure, conv_inputs, graph, gym_inputs
from torch_geometric.data import Batch

from quest_core.testing import AdapterConformance
from quest_graphgps import GraphGPSAdapter


class Graphs(AdapterConformance, sites=2, refused=("linear", "aft-full")):
    adapter = GraphGPSAdapter()
    sizes = SIZES


class Conv(Graphs):
    dropout = 0.3

    def make_model(self):
        return ConvModel(self.dropout)

    def make_inputs(self):
        return conv_inputs(self.sizes)

    def make_padded(self):
        """One graph in two batches, with other graphs of other sizes; only its own nodes are compared."""
        n = max(self.sizes)
        first, others = graph(n), [[graph(m) for m in sizes] for sizes in (self.sizes, (n // 2, 2, 1))]
        one, other = (Batch.from_data_list([first, *rest]) for rest in others)
        arguments = [(b.x, b.edge_index, b.batch, b.edge_attr) for b in (one, other)]
        return arguments[0], arguments[1], lambda out: out[:n]


class TestGPSConv(Conv):
    compiles = False  # the ragged batches below are compiled, by the same code


class TestGPSConvRagged(Conv, variant=True):
    """Batches that are packed in evaluation, and for all but `standard` in training."""

    sizes = RAGGED


class TestGPSConvRaggedWithoutDropout(Conv, variant=True, compiles=False, refused=("aft-full", "aft-local")):
    """Always packed. Without dropout, linear attention and its relatives are possible."""

    sizes = RAGGED
    dropout = 0.0


class TestTransformerConv(Graphs, calibrates=False):
    mechanisms = ("quest", "qnorm", "qknorm", "qknorm-hs", "qknorm-ds")
    refused = ("quest(kv_heads=2)", "quest+sigmoid", "linear", "elliptical", "sinkhorn", "aft-simple")

    # No logit but those of edges is formed, so references, and checkpoints of what this host refuses, do not apply.
    test_mechanisms_equal_their_reference_inside_the_host = None
    test_no_checkpoint_loads_silently_into_another_attention = None
    test_a_host_checkpoint_loads_into_fewer_key_heads = None

    def make_model(self):
        return EdgeModel(0.1)

    def make_inputs(self):
        return conv_inputs(self.sizes)


class TestGraphGym(Graphs):
    def make_model(self):
        configure()
        return GymModel()

    def make_inputs(self):
        return gym_inputs(self.sizes)
