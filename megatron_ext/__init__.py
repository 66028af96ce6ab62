"""Transformers with a residual stream on the sphere, as an extension of Megatron-core."""

from megatron_ext.backends import what_backend_lacks
from megatron_ext.compiling import compile_layers
from megatron_ext.context import DocumentRuns, find_runs, own_part
from megatron_ext.cpu import install_cpu_support
from megatron_ext.documents import Documents, find_documents
from megatron_ext.geometry import Geometry, GeometryProbe
from megatron_ext.kernels.compiled import why_not_compile
from megatron_ext.model import build_model
from megatron_ext.residual import Residual, Sublayer
from megatron_ext.retraction import Retraction, project_to_sphere, retract, tangent
from megatron_ext.schemes import (
    SCHEMES,
    Scheme,
    residual_block_spec,
    residual_layer_spec,
    scheme_of,
    with_defaults,
)
from megatron_ext.settings import ModelSettings, ParallelSettings, ResidualSettings

__all__ = [
    "SCHEMES",
    "DocumentRuns",
    "Documents",
    "Geometry",
    "GeometryProbe",
    "ModelSettings",
    "ParallelSettings",
    "Residual",
    "ResidualSettings",
    "Retraction",
    "Scheme",
    "Sublayer",
    "build_model",
    "compile_layers",
    "find_documents",
    "find_runs",
    "install_cpu_support",
    "own_part",
    "project_to_sphere",
    "residual_block_spec",
    "residual_layer_spec",
    "retract",
    "scheme_of",
    "tangent",
    "what_backend_lacks",
    "why_not_compile",
    "with_defaults",
]
