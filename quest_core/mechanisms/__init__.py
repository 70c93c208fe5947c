"""The maths, one family a file, beside `reference`: the slow float64 truth of every mechanism."""

from . import groupings, normalisers, scores

PARTS = (*scores.PARTS, *normalisers.PARTS, *groupings.PARTS)
