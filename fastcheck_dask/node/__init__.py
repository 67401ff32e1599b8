"""The storage node: a process that owns checkpoints in memory, with a Dask worker as its control plane."""
