"""The papers' runs beside ours: ``python -m tools.paper tables`` and ``python -m tools.paper study``."""
