"""The graph benchmarks: tasks, graph generators, and a GPS model for PyTorch Geometric's GraphGym.

`import quest_graphgps` does not load this package.
"""
