"""Pictures of attention: the weights of every head, and what each key gets, on the image or under its token."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d, interpolate, pad

from ..errors import InputError
from .maps import attention_maps

SIDE = 64
"""Pixels a side of a head's picture, and the most queries of it that are computed."""
EXTRA = 8
"""The most keys, such as class tokens and registers, that stand before those of an image's patches."""


def draw_maps(
    model: nn.Module,
    example: Any,
    to: str | Path,
    *,
    query: int | None = None,
    tokens: Sequence[str] | None = None,
    image: Tensor | None = None,
) -> list[Path]:
    """Draw the attention of the first sample in one run of a model, as `quest maps` does; needs matplotlib.

    >>> draw_maps(model, batch, "cat", image=batch)  # cat-heads.png and cat-keys.png

    Args:
        model, example: as for :func:`quest_core.attention_maps`.
        to: the beginning of the files' names; its folder is made.
        query: the position of the query whose weights the second picture shows; by default the mean over queries.
        tokens: the words under the keys of the second picture.
        image: [B, C, height, width], over which weights are laid that are of its patches: if the number of keys, less
            at most 8 before them, is that of equal squares which fill the image.

    Returns:
        The files: of the weights [N, M] of each head, each divided by its largest; and of the weights of the keys. Of
        more than 64 queries every n-th is drawn; of more than 128 keys, means of neighbors.

    Raises:
        InputError: no layer has a key for each token, or one has no such query.
        QuestError: as attention_maps does.
    """
    last = [] if query is None else [query]
    maps = attention_maps(model, example, queries=lambda n: [*range(0, n, -(-n // SIDE)), *last])
    rows = {path: weights[0].float().cpu() for path, weights in maps.items()}  # [H, n, M]
    matrices = {path: x[:, : x.shape[1] - len(last)] for path, x in rows.items()}
    keys = {path: x[:, -1] if last else x.mean(1) for path, x in rows.items()}  # [H, M]
    grids = {path: _patches(maps[path], image) for path in keys}
    laid = {path: x[:, -grid[0] * grid[1] :].unflatten(-1, grid) for path, x in keys.items() if (grid := grids[path])}
    if laid and tokens is None:
        assert image is not None
        second, shown = _mosaic(laid, image[0].float().cpu()), len(laid)
    else:
        count = len(tokens) if tokens is not None else next(iter(keys.values())).shape[-1]
        same = {path: x for path, x in keys.items() if x.shape[-1] == count}
        if not same:
            have = sorted({x.shape[-1] for x in keys.values()})
            raise InputError(f"tokens has {count} words; the layers have {' or '.join(map(str, have))} keys")
        second, shown = _table(same, tokens), len(same)
    what = f"{'mean over queries' if query is None else f'query {query}'}, {shown} of {len(maps)} layers"
    Path(to).parent.mkdir(parents=True, exist_ok=True)
    files = []
    for figure, name, title in (
        (_mosaic(matrices), "heads", "a row a query, a column a key"),
        (second, "keys", f"weights of keys: {what}"),
    ):
        figure.suptitle(title, fontsize=9)
        figure.savefig(path := Path(f"{to}-{name}.png"), dpi=100)
        files.append(path)
    return files


def _patches(weights: Tensor, image: Tensor | None) -> tuple[int, int] | None:
    """Return the rows and columns of equal squares of the image that the last keys of weights [B, H, N, M] may be."""
    if image is None or len(weights) != len(image):  # windows of an image count as samples
        return None
    height, width = image.shape[-2:]
    for extra in range(EXTRA + 1):
        for side in range(1, min(height, width) + 1):
            grid = height // side, width // side
            if height % side == width % side == 0 and grid[0] * grid[1] == weights.shape[-1] - extra:
                return grid
    return None


def _mosaic(layers: dict[str, Tensor], image: Tensor | None = None) -> Any:
    """Return a Figure: a row for each layer, and in it the picture of each head, [H, height, width]."""
    from matplotlib.figure import Figure

    heads, step = max(map(len, layers.values())), SIDE + 2  # with a border
    shown = torch.full((len(layers) * step, heads * step), torch.nan)
    for i, x in enumerate(layers.values()):
        small = adaptive_avg_pool2d(x, (min(x.shape[1], SIDE), min(x.shape[2], SIDE)))
        tiles = interpolate((small / small.amax((1, 2), keepdim=True).clamp(min=1e-30))[None], (SIDE, SIDE))[0]
        tiles = pad(tiles, (0, 2, 0, 2), value=torch.nan)  # [H, step, step]
        shown[i * step : (i + 1) * step, : len(x) * step] = tiles.transpose(0, 1).flatten(1)
    figure = Figure(figsize=(0.7 * heads + 2, 0.7 * len(layers) + 0.8), layout="constrained")
    axes = figure.subplots()
    if image is not None:
        gray = interpolate(image.mean(0)[None, None], (SIDE, SIDE), mode="bilinear", antialias=True)[0, 0]
        photos = pad(gray, (0, 2, 0, 2), value=torch.nan).tile(len(layers), heads)
        axes.imshow(photos.masked_fill(shown.isnan(), torch.nan).numpy(), cmap="gray")
    cmap, alpha = ("viridis", 1.0) if image is None else ("inferno", 0.6)
    axes.imshow(shown.numpy(), cmap=cmap, alpha=alpha, vmin=0, vmax=1)
    _label(axes, [step * h + SIDE / 2 for h in range(heads)], [f"head {h}" for h in range(heads)])
    axes.set_yticks([step * i + SIDE / 2 for i in range(len(layers))], list(layers), fontsize=7)
    return figure


def _table(layers: dict[str, Tensor], tokens: Sequence[str] | None) -> Any:
    """Return a Figure: a row for each head of each layer [H, M], a column for each key."""
    from matplotlib.figure import Figure

    shown = torch.cat(list(layers.values()))  # [all heads, M]
    count = shown.shape[1]
    wide = min(count, 2 * SIDE)  # columns, each the mean of some keys
    figure = Figure(figsize=(max(4, 0.16 * wide) + 2, 0.14 * len(shown) + 1.5), layout="constrained")
    axes = figure.subplots()
    pooled, sides = adaptive_avg_pool2d(shown[None], (len(shown), wide))[0], (-0.5, count - 0.5, len(shown) - 0.5, -0.5)
    figure.colorbar(axes.imshow(pooled.numpy(), aspect="auto", extent=sides), pad=0.01).ax.tick_params(labelsize=7)
    if tokens is not None and wide == count:
        _label(axes, range(wide), tokens)
    starts = [0, *torch.tensor([len(x) for x in layers.values()]).cumsum(0).tolist()]
    axes.set_yticks(starts[:-1], [f"{path}, head 0" for path in layers], fontsize=7)
    return figure


def _label(axes: Any, places: Sequence[float], words: Sequence[str]) -> None:
    axes.xaxis.tick_top()
    axes.set_xticks(places, words, fontsize=7, rotation=90)
