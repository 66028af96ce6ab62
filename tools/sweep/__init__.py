"""A grid of training runs that takes hours and several sittings, and its results.

``python -m tools.sweep GRID.yaml`` runs what has no result yet. :mod:`.grid` reads the grid file, :mod:`.data` builds
the data, :mod:`.plan` says what state each run is in, :mod:`.runner` runs what is left, :mod:`.curves` reads what a run
left, :mod:`.results` keeps it; :mod:`.table` and :mod:`.plot` show it.
"""
