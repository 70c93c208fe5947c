"""quest_core.attention_maps: the weights that the outputs were made of."""

import atexit
import contextlib
import json
import math
import sys

import pytest
import torch
from models import Around, unchanged
from torch import nn

import quest_core
from quest_core.cli import main
from quest_core.hosts import launch
from quest_core.tools import pictures, script


def layer(attention=None):
    torch.manual_seed(0)
    made = nn.MultiheadAttention(16, 4, batch_first=True)
    if attention:
        quest_core.inject(made, attention)
    return made


class Model(nn.Module):
    def __init__(self, attention=None):
        super().__init__()
        self.attn = layer(attention)

    def forward(self, x, mask=None, is_causal=False):
        return self.attn(x, x, x, need_weights=False, attn_mask=mask, is_causal=is_causal)[0]


@pytest.mark.parametrize("queries", [None, [2, 0], [-1, 3, -6], [], lambda n: range(0, n, 2)])
@pytest.mark.parametrize("attention", [None, "quest", "quest+sigmoid", "standard+sinkhorn", "quest+gqa(kv_heads=2)"])
def test_weights_equal_those_that_the_layer_returns(attention, queries):
    model, x = Model(attention).eval(), torch.randn(2, 6, 16)
    _, wanted = layer(attention).eval()(x, x, x, need_weights=True, average_attn_weights=False)  # [B, H, N, M]
    found = quest_core.attention_maps(model, (x,), queries=queries)
    assert list(found) == ["attn"]
    torch.testing.assert_close(
        found["attn"], wanted if queries is None else wanted[:, :, queries(6) if callable(queries) else queries]
    )
    assert type(model.attn) is nn.MultiheadAttention or attention


@pytest.mark.parametrize("queries", [None, [4, 1]])
def test_causal_weights_equal_float64(queries):
    model, x = Model("quest").eval(), torch.randn(2, 6, 16)
    hidden = torch.ones(6, 6, dtype=torch.bool).triu(1)
    found = quest_core.attention_maps(model, {"x": x, "mask": hidden, "is_causal": True}, queries=queries)["attn"]
    q, k, _ = nn.functional.linear(x, model.attn.in_proj_weight, model.attn.in_proj_bias).double().chunk(3, -1)
    q, k = (t.unflatten(-1, (4, 4)).transpose(1, 2) for t in (q, k))  # [B, H, N, D]
    wanted = (q @ nn.functional.normalize(k, dim=-1).mT).masked_fill(hidden, -math.inf).softmax(-1)
    torch.testing.assert_close(
        found.double(), wanted if queries is None else wanted[:, :, queries], rtol=1e-5, atol=1e-6
    )


def test_training_and_its_random_numbers_go_on_as_before():
    x = torch.randn(2, 6, 16)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 2).train()
    torch.manual_seed(3)
    wanted = torch.rand(3)
    torch.manual_seed(3)
    quest_core.attention_maps(model, x)
    assert torch.equal(torch.rand(3), wanted)


def test_buffers_stay_and_autocast_does_not_round_the_weights():
    model = nn.Sequential(nn.BatchNorm1d(6), Model("quest")).train()
    x = 3 * torch.randn(2, 6, 16)
    with unchanged(model):
        wanted = quest_core.attention_maps(model, x)["1.attn"]
    with torch.autocast("cpu", torch.bfloat16):
        found = quest_core.attention_maps(model, x)["1.attn"].float()
    torch.testing.assert_close(found.sum(-1), torch.ones(2, 4, 6), rtol=0, atol=0.01)
    torch.testing.assert_close(found, wanted, rtol=0.1, atol=0.02)


def test_a_layer_that_runs_twice_is_there_twice():
    shared = Model("quest").eval()
    found = quest_core.attention_maps(nn.Sequential(shared, shared), (torch.randn(2, 6, 16),))
    assert list(found) == ["0.attn", "0.attn#2"]


@pytest.mark.parametrize("attention", [None, "quest"])
def test_attention_that_an_example_finds(attention):
    x, found = torch.randn(2, 6, 16), []
    for attend in (nn.functional.scaled_dot_product_attention, lambda q, k, v: (q @ k.mT * 0.5).softmax(-1) @ v):
        torch.manual_seed(0)
        model = nn.Sequential(Around(attend, heads=4)).eval()
        if attention:
            quest_core.inject(model, attention, example=x)
        found.append(quest_core.attention_maps(model, x)["0"])
    assert found[0].shape == (2, 4, 6, 6)
    torch.testing.assert_close(found[0].sum(-1), torch.ones(2, 4, 6))
    torch.testing.assert_close(found[0], found[1])


def test_what_has_no_weights_or_no_such_query_is_named():
    with pytest.raises(quest_core.UnsupportedError, match="attention 'linear' forms no weights"):
        quest_core.attention_maps(Model("linear"), (torch.randn(2, 6, 16),))
    for query in (6, -7):
        with pytest.raises(quest_core.InputError, match=f"queries holds {query}, .* has 6 queries"):
            quest_core.attention_maps(Model("quest"), (torch.randn(2, 6, 16),), queries=[0, query])
    with pytest.raises(quest_core.InjectionError):
        quest_core.attention_maps(nn.Linear(2, 2), (torch.randn(2, 2),))


# --- pictures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "batch", "keys", "grid"),
    [
        ((224, 224), 2, 197, (14, 14)),  # and a class token
        ((224, 224), 2, 201, (14, 14)),  # and four registers
        ((32, 64), 2, 8, (2, 4)),
        ((64, 64), 2, 77, None),  # words
        ((224, 224), 128, 49, None),  # windows
    ],
)
def test_the_patches_of_an_image(size, batch, keys, grid):
    assert pictures._patches(torch.zeros(batch, 3, 5, keys), torch.zeros(2, 3, *size)) == grid


@pytest.mark.parametrize("query", [None, 3])
def test_pictures_show_the_weights(tmp_path, monkeypatch, query):
    pytest.importorskip("matplotlib")
    model, x, seen = Model("quest").eval(), torch.randn(2, 100, 16), []
    table = pictures._table
    monkeypatch.setattr(pictures, "_table", lambda *given: seen.append(table(*given)) or seen[0])
    files = pictures.draw_maps(model, x, tmp_path / "new" / "a", query=query)
    assert [file.name for file in files if file.stat().st_size] == ["a-heads.png", "a-keys.png"]
    weights = quest_core.attention_maps(model, x)["attn"][0]  # [H, N, M]
    wanted = weights[:, ::2].mean(1) if query is None else weights[:, query]
    torch.testing.assert_close(torch.tensor(seen[0].axes[0].images[0].get_array()), wanted)
    wide = table({"a": torch.rand(2, 700)}, None).axes[0]
    assert wide.get_xlim() == (-0.5, 699.5)  # the numbers below are those of keys, of which columns are means
    with pytest.raises(quest_core.InputError, match="tokens has 2 words; the layers have 100 keys"):
        pictures.draw_maps(model, x, tmp_path / "b", tokens=["a", "b"])


class Cached(nn.Module):
    """Attends to all that a cache has seen; called once, with keywords."""

    def __init__(self):
        super().__init__()
        self.attn = layer()

    def forward(self, images, *, cache):
        cache.append(images.flatten(2).mT)  # [B, M, 16]
        x = torch.cat(cache, 1)
        return self.attn(x, x, x, need_weights=False)[0]


def test_the_models_of_a_script_are_drawn_and_compute_what_they_did(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    asked = {}
    monkeypatch.setattr(launch, "start", lambda command, plugins, variables: asked.update(variables) or sys.exit())
    with pytest.raises(SystemExit):
        main(["maps", "--out", str(tmp_path), "--", "python", "predict.py"])
    given = json.loads(asked[script.LOOK])
    assert given.pop("command") == "maps"
    with contextlib.closing(script.Maps(**given)):
        images, cache = torch.randn(2, 16, 4, 4), []
        outputs = [Cached().eval()(images, cache=cache), Cached().eval()(images, cache=[]), nn.Linear(4, 1)(images)]
    assert len(cache) == 1
    torch.testing.assert_close(outputs[0], outputs[1])
    names = [f"Cached{number}-{what}.png" for number in ("-2", "") for what in ("heads", "keys")]
    assert sorted(file.name for file in tmp_path.iterdir()) == names
    assert "Linear is not drawn: " in capsys.readouterr().err


@pytest.mark.parametrize("call", [2, 3])
def test_a_call_that_never_came_is_told(tmp_path, capsys, call):
    pytest.importorskip("matplotlib")
    with contextlib.closing(script.Maps(str(tmp_path), call, None, None)) as maps:
        model = layer().eval()
        for _ in range(2):
            model(*torch.randn(3, 1, 4, 16), need_weights=False)
    atexit.unregister(maps.say_nothing_drawn)
    maps.say_nothing_drawn()
    assert capsys.readouterr().err.startswith("quest maps: drew" if call == 2 else "quest maps: nothing was drawn; no")
