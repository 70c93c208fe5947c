"""The graph benchmarks: tasks, graph generators, and a GPS model for PyTorch Geometric's GraphGym."""
