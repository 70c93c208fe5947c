"""Everything about other people's code: the contract of a plugin, injection, discovery, launching.

Attention that no adapter lists is found by an example, and becomes a site of its own class:

    finding.py    judges each module by what a search saw: a site, left as it is, or refused
    search.py     runs the example, and notes calls of attention, products and softmaxes
    following.py  from which product a tensor was made, by which factor; in a search and as a site runs
    functions.py  what following knows of PyTorch's functions
    universal.py  the site that calls an attention function
    written.py    the site that writes attention out
    sites.py      what both sites share
"""
