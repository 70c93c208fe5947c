"""The benchmark suites: their data, their metrics, and one short cell of each that needs no download."""

import functools
import math
from dataclasses import replace

import pytest
import torch
from models import write_superpixels, write_zinc
from torch_geometric.data import Data

from devtools.cells import HostSuites, check_resume, smoke_cell
from quest_core.errors import ConfigError
from quest_suites.contract import STATE
from quest_suites.graphgps import superpixels, tasks
from quest_suites.graphgps.data import (
    add_eigenvectors,
    add_random_walks,
    adjacency,
    cluster_graphs,
    join_positions,
    main,
    molecule_tasks,
    molecules,
    pattern_graphs,
    tu_fold,
    tu_tasks,
    write_raw,
)
from quest_suites.graphgps.suites import SUITES as ALL

SUITES = {name: suite for name, suite in ALL.items() if "paper" in suite}  # others: below, test_own
cell = functools.partial(smoke_cell, ALL)


# --- cells ----------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr(tasks, "SMOKE_GRAPHS", (4, 2, 2))


@pytest.mark.parametrize("suite", ["graph/pattern", "graph/cluster"])
def test_a_cell_says_what_it_did(tmp_path, suite):
    reported = []
    one = tasks.run_graph(cell(tmp_path, suite, layers=1), lambda done, _: reported.append(done))
    assert reported == [0.5, 1.0]
    assert one.details["injected"].startswith("attention=quest in 1 module")
    assert one.details["graphs"] == list(tasks.SMOKE_GRAPHS)
    assert 0 <= one.metrics["accuracy"] <= 100
    assert tasks.run_graph(cell(tmp_path, suite, "standard", layers=1), lambda *_: None).series != one.series


WRITE = {
    "graph/pattern": lambda folder: write_raw(folder, "PATTERN", pattern_graphs((9, 4, 4), seed=3)),
    "graph/zinc": write_zinc,
    "graph/cifar10": lambda folder: write_superpixels(folder, "CIFAR10"),
}


@pytest.mark.parametrize("suite", ["graph/pattern", *(name for name in SUITES if SUITES[name].get("data_required"))])
def test_a_cell_reads_data_in_pytorch_geometrics_layout(tmp_path, suite, monkeypatch):
    monkeypatch.setattr(tasks, "SMOKE_GRAPHS", (8, 4, 4))
    WRITE[suite](tmp_path)
    result = tasks.run_graph(cell(tmp_path, suite, data=tmp_path), lambda *_: None)
    assert result.details["graphs"] == [8, 4, 4]
    assert math.isfinite(result.metrics[SUITES[suite]["metric"]])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("PATTERN", "--graphs", "-5", "1", "1"), "at least one graph"),
        (("PATTERN", "--graphs", "150", "1", "1"), "150 + 1 + 1 graphs; PATTERN hides"),
        (("CIFAR10",), "give --images cifar-10-batches-bin"),
        (("PATTERN", "--images", "x"), "--images is x, but PATTERN is drawn without images"),
        (("CIFAR10", "--images", "x"), "'x/data_batch_1.bin' is missing or not of CIFAR-10's binary version"),
        (("CIFAR10", "--images", "x", "--graphs", "1", "5001", "1"), "1 5001 1 graphs; CIFAR10 has at most 45000 5000"),
    ],
)
def test_data_that_cannot_be_made_are_refused(tmp_path, arguments, said, capsys):
    with pytest.raises(SystemExit, match="2"):
        main([*arguments, "--out", str(tmp_path)])
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def blobs(seed, size=4):
    """An image of smooth colors, bytes [3, 32, 32]."""
    small = torch.rand(1, 3, size, size, generator=torch.Generator().manual_seed(seed))
    return (torch.nn.functional.interpolate(small, (32, 32), mode="bicubic").clamp(0, 1)[0] * 255).byte()


@pytest.mark.parametrize("image", [*map(blobs, range(4)), blobs(0, 32), torch.full((3, 32, 32), 7).byte()])
def test_superpixels_are_the_means_of_segments_joined_to_their_eight_nearest(image):
    segment = superpixels.segments(image)
    graph = superpixels.superpixels(image, 3, torch.Generator().manual_seed(0))
    nodes = len(segment.unique())
    assert graph.num_nodes == nodes <= superpixels.MOST
    assert graph.y.tolist() == [3]
    parts = [(segment == i).nonzero() for i in range(nodes)]
    found = {(*x.tolist(), *p.tolist()) for x, p in zip(graph.x, graph.pos, strict=True)}
    for part in parts:
        color = image[:, part[:, 0], part[:, 1]].double().mean(1) / 255
        want = torch.cat([color, part.double().mean(0) / 32]).float()
        assert min((want - torch.tensor(one)).abs().max() for one in found) < 1e-6

    place = graph.pos.double()
    apart = [[(a - b).norm().item() for b in place] for a in place]
    scale = [sum(sorted(row)[1:9]) / 8 for row in apart]
    weight = [
        [(math.exp(-((d / scale[i]) ** 2)) + math.exp(-((d / scale[j]) ** 2))) / 2 for j, d in enumerate(row)]
        for i, row in enumerate(apart)
    ]
    for i in range(nodes):
        mine = graph.edge_index[1, graph.edge_index[0] == i].tolist()
        assert len({*mine} - {i}) == 8
        others = sorted((weight[i][j] for j in range(nodes) if j != i), reverse=True)
        torch.testing.assert_close(graph.edge_attr[graph.edge_index[0] == i].tolist(), others[:8], atol=1e-5, rtol=0)
        torch.testing.assert_close([weight[i][j] for j in mine], others[:8], atol=1e-5, rtol=0)


def test_superpixels_of_images_train_a_cell(tmp_path, monkeypatch):
    images = torch.stack([torch.cat([torch.tensor([i % 10]).byte(), blobs(i % 20).flatten()]) for i in range(5004)])
    (tmp_path / "data_batch_1.bin").write_bytes(images.numpy().tobytes())
    (tmp_path / "test_batch.bin").write_bytes(images[:3].numpy().tobytes())
    main(["CIFAR10", "--images", str(tmp_path), "--graphs", "4", "2", "3", "--out", str(tmp_path)])
    monkeypatch.setattr(tasks, "SMOKE_GRAPHS", (4, 2, 3))
    drawn = tasks.splits(cell(tmp_path, "graph/cifar10", data=tmp_path))
    assert [[graph.y.item() for graph in split] for split in drawn] == [[0, 1, 2, 3], [0, 1], [0, 1, 2]]
    result = tasks.run_graph(cell(tmp_path, "graph/cifar10", data=tmp_path), lambda *_: None)
    assert result.details["graphs"] == [4, 2, 3]
    assert 0 <= result.metrics["accuracy"] <= 100
    with pytest.raises(ConfigError, match="holds 4 2 3 of 4 2 4 images; is it whole"):
        superpixels.superpixel_graphs((4, 2, 4), 0, tmp_path)


@pytest.mark.parametrize("suite", SUITES)
def test_suites_declare_the_metrics_that_their_cells_report(suite):
    (task,) = SUITES[suite]["tasks"]
    declared = SUITES[suite]["metric"], SUITES[suite].get("higher_is_better", True)
    assert tasks.METRICS[task][:2] == declared


# --- metrics --------------------------------------------------------------------------------------------------------


def test_metrics():
    scores, true = torch.tensor([0.9, 0.8, 0.2, 0.7]), torch.tensor([1, 0, 0, 1])
    halves = zip(scores.split(2), true.split(2), strict=True)
    assert tasks.class_accuracy(halves) == pytest.approx(75)  # both of class 1, one of two of class 0
    logits = torch.tensor([[2.0, 0.0, 1.0], [0.0, 1.0, 2.0]])
    assert tasks.class_accuracy([(logits, torch.tensor([0, 1]))]) == pytest.approx(50)
    batches = [(logits, torch.tensor([0, 1])), (logits[:1], torch.tensor([0]))]
    assert tasks.accuracy(batches) == pytest.approx(200 / 3)  # of graphs, not of batches
    assert tasks.METRICS["ZINC"][2]([(torch.tensor([1.0, 3.0]), torch.tensor([2.0, 3.0]))]) == pytest.approx(0.5)


# --- data -----------------------------------------------------------------------------------------------------------


def test_pattern_follows_its_published_parameters():
    train, val, test = pattern_graphs((300, 100, 100), seed=0)
    assert [len(split) for split in (train, val, test)] == [300, 100, 100]
    nodes = sum(d.num_nodes for d in train) / 300
    assert nodes == pytest.approx(117, rel=0.05)  # 6 blocks of 5 to 34; published: 118.9
    assert sum(d.num_edges for d in train) / 300 == pytest.approx(6099, rel=0.1)
    counts = torch.zeros(3, 2)  # links and pairs: from patterns to the rest, inside of patterns, inside of the rest
    for data in train[:100]:
        links, hidden = adjacency(data), data.y == 1
        assert torch.equal(links, links.T)
        assert not links.diagonal().any()
        for row, rows, columns in zip(counts, (hidden, hidden, ~hidden), (~hidden, hidden, ~hidden), strict=True):
            block = links[rows][:, columns]
            row += torch.tensor([block.sum(), block.numel() - (rows & columns).sum()])
    between, inside, rest = (counts[:, 0] / counts[:, 1]).tolist()
    assert between == pytest.approx(0.5, abs=0.01)
    assert inside == pytest.approx(0.5, abs=0.02)
    assert 0.35 < rest < 0.42
    assert train[0].x.sum(1).eq(1).all()
    # Graph 0 and graph 100 hide the same pattern: features and links among its nodes, in another order.
    first, second = (d.x[d.y == 1].sum(0) for d in (train[0], train[100]))
    assert torch.equal(first, second)


def test_cluster_follows_its_published_parameters():
    (train, _, _) = cluster_graphs((200, 1, 1), seed=0)
    assert sum(d.num_edges for d in train) / 200 == pytest.approx(4304, rel=0.1)
    for data in train[:20]:
        kinds = data.x.argmax(1)
        marked = kinds > 0
        assert marked.sum() == 6
        assert torch.equal(kinds[marked] - 1, data.y[marked])  # a marked node's feature is its community
        assert data.y.bincount().min() >= 5
        assert data.y.bincount().max() <= 34


def test_data_is_a_function_of_its_seed():
    one, two, other = (pattern_graphs((3, 1, 1), seed)[0] for seed in (0, 0, 1))
    assert all(torch.equal(a.edge_index, b.edge_index) for a, b in zip(one, two, strict=True))
    assert not torch.equal(one[0].edge_index, other[0].edge_index)


def test_encodings_of_position():
    (data,) = cluster_graphs((1, 0, 0), seed=0)[0]
    add_random_walks(add_eigenvectors(data, 5), [1, 2, 3])
    links = adjacency(data)
    laplacian, step = torch.diag(links.sum(1)) - links, links / links.sum(1, keepdim=True)
    vectors, values = data.EigVecs.double(), data.EigVals[0, :, 0].double()
    torch.testing.assert_close(laplacian @ vectors, vectors * values, atol=1e-4, rtol=1e-4)
    assert values[0] == pytest.approx(0, abs=1e-5)
    assert data.pestat_RWSE[:, 0].eq(0).all()  # no walk is back after one step
    for column, walk in ((1, step @ step), (2, step @ step @ step)):
        torch.testing.assert_close(data.pestat_RWSE[:, column].double(), walk.diag(), atol=1e-6, rtol=1e-5)
    missing = add_eigenvectors(data, data.num_nodes + 2)
    assert missing.EigVecs[:, -2:].isnan().all()


def test_superpixels_carry_their_positions():
    data = join_positions(Data(x=torch.zeros(2, 3), pos=torch.ones(2, 2, dtype=torch.double)))
    assert data.x.dtype == torch.float32
    assert data.x.tolist() == [[0, 0, 0, 1, 1]] * 2


def test_a_stopped_cell_continues_at_its_last_epoch(tmp_path):
    check_resume(tasks.run_graph, cell(tmp_path, "graph/pattern"), tmp_path, share=0.5)


# --- stability/graph ------------------------------------------------------------------------------------------------

RATES = {"graphs": 8, "epochs": 2, "layers": 1, "rates": 2, "lowest": 0.0005}


def rates(tmp_path, **options):
    return cell(tmp_path, "stability/graph", smoke=False, **RATES | options)


def test_every_rate_is_measured_and_watching_the_attention_changes_no_training(tmp_path):
    given = rates(tmp_path)
    result = tasks.run_rates(given, lambda *_: None)
    assert result.metrics["accuracy"] == sum(result.metrics[f"accuracy/lr={lr}"] for lr in (0.0005, 0.0016)) / 2
    for name in ("train_loss", "validation", "max_logit", "entropy", "query_norm", "key_norm"):
        assert len(result.series[f"{name}/lr=0.0016"]) == 2
        assert all(map(math.isfinite, result.series[f"{name}/lr=0.0016"]))
    assert [path.name for path in given.workdir.iterdir()] == [STATE]
    options = {name: RATES[name] for name in ("graphs", "epochs", "layers")} | {"batch_size": 8, "warmup_epochs": 0}
    plain = tasks.run_graph(cell(tmp_path, "graph/pattern", smoke=False, lr=0.0005, **options), lambda *_: None)
    assert result.series["train_loss/lr=0.0005"] == plain.series["train_loss"]
    assert result.metrics["accuracy/lr=0.0005"] == plain.metrics["accuracy"]


def test_a_rate_that_diverges_counts_as_guessing(tmp_path):
    result = tasks.run_rates(rates(tmp_path, lowest=1e30), lambda *_: None)
    assert result.metrics["diverged"] == 2
    assert result.metrics["accuracy"] == 50


def test_a_stopped_cell_continues_in_the_middle_of_a_rate(tmp_path):
    check_resume(tasks.run_rates, rates(tmp_path), tmp_path, share=0.7)  # the first epoch of the second of two rates


# --- graph/tu -------------------------------------------------------------------------------------------------------


@pytest.fixture
def made_up(tmp_path):
    """Twenty paths of three nodes; the class of graph i is i % 3 + 1, and fold k tests graphs 2k and 2k + 1."""
    folder = tmp_path / "data" / "MADEUP"
    (folder / "10fold_idx").mkdir(parents=True)
    graphs = "".join(f"3 {i % 3 + 1}\n7 1 1\n9 2 0 2 0.5\n7 1 1\n" for i in range(20))
    (folder / "MADEUP.txt").write_text(f"20\n{graphs}")
    for k in range(10):
        for part, chosen in (("test", [2 * k, 2 * k + 1]), ("train", [i for i in range(20) if i // 2 != k])):
            (folder / "10fold_idx" / f"{part}_idx-{k + 1}.txt").write_text("".join(f"{i}\n" for i in chosen))
    return folder


def test_a_seed_is_a_published_fold_and_validation_a_part_of_its_training_graphs(made_up):
    train, validation, test = tu_fold(made_up, 4)
    assert [graph.y.item() for graph in test] == [8 % 3, 9 % 3]
    assert [len(train), len(validation)] == [16, 2]
    assert sorted(graph.y.item() for graph in train + validation) == sorted(i % 3 for i in range(20) if i // 2 != 4)
    assert test[0].x.tolist() == [[0], [1], [0]]
    assert test[0].edge_index.tolist() == [[0, 1, 1, 2], [1, 0, 2, 1]]
    with pytest.raises(ConfigError, match="seed is 10; .* 0 to 9"):
        tu_fold(made_up, 10)


def test_an_incomplete_tu_dataset_is_named_before_a_cell_starts(made_up):
    assert tu_tasks(made_up.parent)["MADEUP"]["problem"] is None
    (made_up / "10fold_idx" / "test_idx-3.txt").unlink()
    assert "test_idx-3.txt not found" in tu_tasks(made_up.parent)["MADEUP"]["problem"]


def test_a_cell_of_a_tu_dataset(tmp_path, made_up):
    options = {"task": "MADEUP", "smoke": False, "data": made_up.parent}
    one = cell(tmp_path, "graph/tu", seed=4, epochs=2, heads=32, **options)
    assert tasks.run_rates(one, lambda *_: None).metrics["best accuracy"] in (0, 50, 100)
    lost = replace(one, options={**one.options, "lowest": 1e30})
    metrics = tasks.run_rates(lost, lambda *_: None).metrics
    assert metrics["accuracy"] == pytest.approx(100 / 3)
    assert math.isnan(metrics["best accuracy"])


# --- graph/molecules ------------------------------------------------------------------------------------------------


@pytest.fixture
def alcohols(tmp_path):
    """Methane, and chains of one to nineteen carbons with a hydroxyl; the number of molecule i is i."""
    path = tmp_path / "esol.csv"
    path.write_text("smiles,value\n" + "C,0\n" + "".join(f"{'C' * i}O,{i}\n" for i in range(1, 20)))
    return path


def test_molecules_are_split_at_random_and_equal_atoms_have_one_type(alcohols):
    parts = molecules(alcohols, 3)
    assert [len(part) for part in parts] == [16, 2, 2]
    everything = [graph for part in parts for graph in part]
    assert sorted(graph.num_nodes for graph in everything) == [1, *range(2, 21)]
    assert sum(graph.y.item() for graph in parts[0]) == pytest.approx(0, abs=1e-5)
    sizes = {graph.num_nodes: graph for graph in everything}
    chain, methane, other = sizes[9].x[:, 0].tolist(), sizes[1].x[:, 0].tolist(), sizes[5].x[:, 0].tolist()
    assert len({*chain}) == 3
    assert len({chain[0], *chain[1:-1]}) == 2
    assert {*chain} == {*other}
    assert methane[0] not in chain
    assert (sizes[9].y - sizes[5].y).item() == pytest.approx(4)
    assert sizes[1].edge_attr.shape == (0,)
    assert sizes[9].edge_attr.shape == (16,)
    assert [g.num_nodes for g in molecules(alcohols, 3)[2]] == [g.num_nodes for g in parts[2]]
    assert [g.num_nodes for g in molecules(alcohols, 4)[2]] != [g.num_nodes for g in parts[2]]


def test_a_cell_of_molecules(tmp_path, alcohols):
    assert molecule_tasks(tmp_path)["ESOL"]["problem"] is None
    assert "freesolv.csv not found; fix: git clone" in molecule_tasks(tmp_path)["FreeSolv"]["problem"]
    one = cell(tmp_path, "graph/molecules", smoke=False, data=tmp_path, epochs=2)
    result = tasks.run_graph(one, lambda *_: None)
    assert 0 < result.metrics["rmse"] < 100
    assert result.details["graphs"] == [16, 2, 2]


class TestSuites(HostSuites):
    committed = ("time/graphgps", "graph/pattern", "stability/graph")
