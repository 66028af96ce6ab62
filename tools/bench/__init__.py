"""Benchmarks behind one door, ``python -m tools.bench NAME``: timings against a peer in the same run.

A benchmark is a module with ``add_arguments(parser)`` and ``run(arguments) -> Report``, named in :data:`BENCHMARKS`.
"""

BENCHMARKS: dict[str, str] = {
    "data": "tools.bench.data",
    "step": "tools.bench.step",
    "residual": "tools.bench.residual",
    "gpu": "tools.bench.gpu",
    "checkpoint": "tools.bench.checkpoint",
    "logging": "tools.bench.logging_cost",
    "spikes": "tools.bench.spikes",
}
"""Name on the command line -> module, imported when it is asked for."""
