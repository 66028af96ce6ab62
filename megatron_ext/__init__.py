"""Transformers with a residual stream on the sphere, as an extension of Megatron-core."""

from megatron_ext.cpu import install_cpu_support, save_checkpoints_in_process
from megatron_ext.geometry import Geometry, GeometryProbe
from megatron_ext.model import build_model
from megatron_ext.retraction import exponential_step, project_to_sphere, tangent
from megatron_ext.schemes import SCHEMES, Scheme, residual_block_spec, residual_layer_spec
from megatron_ext.settings import ModelSettings, ParallelSettings, ResidualSettings

__all__ = [
    "SCHEMES",
    "Geometry",
    "GeometryProbe",
    "ModelSettings",
    "ParallelSettings",
    "ResidualSettings",
    "Scheme",
    "build_model",
    "exponential_step",
    "install_cpu_support",
    "project_to_sphere",
    "residual_block_spec",
    "residual_layer_spec",
    "save_checkpoints_in_process",
    "tangent",
]
