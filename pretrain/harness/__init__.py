"""Our models under lm-evaluation-harness, which is an extra: ``pip install -e '.[evaluate]'``."""
