"""Several runs side by side for people without TensorBoard: ``python -m tools.report RUN...``."""
