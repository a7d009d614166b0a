"""Measures flash_ext beside its peers in one process: `python -m flash_ext.bench --help`.

    grid      which points are measured
    peers     how each library is called on a point
    timing    medians of interleaved runs, cold caches, ceilings
    measure   one point: times, host times, errors or memory
    results   result files: rows, keys, merging, the fingerprint of a kernel's sources (no torch)
    report    tables and figures (no torch)

docs/performance.md says how the figures come about and shows the last ones.
"""
