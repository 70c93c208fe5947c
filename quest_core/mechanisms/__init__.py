"""The maths, one family a file, beside `reference`: the float64 normalisers that MechanismConformance compares with."""

from . import aft, aft_conv, elliptical, groupings, linear, normalisers, scores

PARTS = (
    *scores.PARTS,
    *elliptical.PARTS,
    *normalisers.PARTS,
    *groupings.PARTS,
    *linear.PARTS,
    *aft.PARTS,
    *aft_conv.PARTS,
)
