"""Tests of the model extension."""
