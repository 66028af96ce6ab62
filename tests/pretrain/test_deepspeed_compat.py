"""What pretrain.deepspeed_compat relies on inside DeepSpeed; red when upstream changes it."""

import inspect
from importlib.metadata import version

from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils.tensor_fragment import fragment_address, tensor_fragment


def source(thing: object) -> str:
    return inspect.getsource(thing)  # type: ignore[arg-type]


def test_the_version_that_was_read() -> None:
    assert version("deepspeed") == "0.19.8", "read deepspeed_compat.py again with the new version beside it"


def test_bf16_gradients_wait_on_the_parameters() -> None:
    assert "lp._hp_grad = hp_grad" in source(BF16_Optimizer._update_hp_grad)
    assert "lp_param.grad = None" in source(BF16_Optimizer.accumulate_hp_grads_and_remove_lp)


def test_empty_groups_are_dropped_and_norms_reduced_group_by_group() -> None:
    """The two together are why every stage gets an idle element."""
    assert 'if len(pg["params"]) != 0' in source(DeepSpeedEngine._configure_optimizer)
    norm = source(DeepSpeedZeroOptimizer.scaled_global_norm)
    assert "for i, group in enumerate(self.bit16_groups)" in norm
    assert "get_grad_norm_direct" in norm


def test_the_state_is_linked_after_the_first_group_only() -> None:
    step = source(DeepSpeedZeroOptimizer._optimizer_step)
    assert "self.optimizer.param_groups = [original_param_groups[group_no]]" in step
    assert "self._lazy_init_hp_params_optimizer_state()" in step
    for optimizer in (DeepSpeedZeroOptimizer, BF16_Optimizer):
        link = source(optimizer._lazy_init_hp_params_optimizer_state)
        assert "if not self._hp_optimizer_states_linked" in link


def test_fragments_have_the_fields_that_checkpoints_read() -> None:
    assert {"lp_fragment_address", "hp_fragment", "optim_fragment"} <= set(tensor_fragment.__dataclass_fields__)
    assert set(fragment_address.__dataclass_fields__) == {"numel", "start"}


def test_both_optimizers_refresh_the_working_weights() -> None:
    for optimizer in (DeepSpeedZeroOptimizer, BF16_Optimizer):
        assert "all_gather_dp_groups" in source(optimizer.update_lp_params)


def test_a_step_that_is_not_finite_is_skipped_by_both() -> None:
    assert "self.overflow = True" in source(BF16_Optimizer.step)
    assert "is_invalid_grad_norm(scaled_global_grad_norm)" in source(DeepSpeedZeroOptimizer.step)


def test_stage_0_has_no_bf16_with_fp32_accumulation_and_counts_the_first_stage_alone() -> None:
    """Why stage 0 is stage 1 over one rank."""
    assert 'NotImplementedError(f"unsupported mix of' in source(DeepSpeedEngine._do_optimizer_sanity_check)
    assert "clip_grad_norm_(parameters=self.module.parameters()" in source(DeepSpeedEngine.clip_fp32_gradients)


def test_an_offloaded_step_that_is_skipped_keeps_its_gradients() -> None:
    step = source(DeepSpeedZeroOptimizer.step)
    overflow = step[step.index("if self.overflow:") :].split("return\n")[0]
    assert "if self.cpu_offload:\n                self.reset_cpu_buffers()\n            else:" in overflow
    assert "averaged_gradients" not in source(DeepSpeedZeroOptimizer.reset_cpu_buffers)


def test_stage_3_divides_every_parameter_into_equal_parts() -> None:
    grads = source(DeepSpeedZeroOptimizer_Stage3.set_grad_positions)
    assert "self.grad_position[param_id] = [int(i), int(current_offset), int(num_elements)]" in grads
    assert "narrow(0, dest_offset, num_elements)" in source(DeepSpeedZeroOptimizer_Stage3._get_fp32_opt_state_partition)


def test_stage_3_keeps_small_parameters_and_expects_tensors_of_modules() -> None:
    assert "param.ds_numel <= param_threshold" in source(DeepSpeedZeRoOffload.mark_persistent_parameters)
    assert "output if isinstance(output, dict) else vars(output)" in source(
        DeepSpeedZeRoOffload._register_deepspeed_module
    )


def test_stage_3_puts_the_masters_back_as_after_a_step() -> None:
    whole = source(DeepSpeedZeroOptimizer_Stage3)  # decorated methods hide theirs
    assert "self._reassign_or_swap_out_partitioned_parameters(sub_group_id)" in whole
    assert "self.persistent_parameters[0].all_gather(self.persistent_parameters)" in whole


def test_stages_2_and_3_take_the_boundary_from_their_caller() -> None:
    assert "self._is_gradient_accumulation_boundary = is_boundary" in source(
        DeepSpeedEngine.set_gradient_accumulation_boundary
    )
    assert "self.optimizer.clear_backward_seen_flag()" in source(DeepSpeedEngine)


def test_all_ask_one_function_for_the_norm_within_their_step() -> None:
    """Which is replaced for the time of a step; a norm that is not finite clears the gradients and changes nothing."""
    zero, bf16 = source(DeepSpeedZeroOptimizer.step), source(BF16_Optimizer.step)
    assert zero.count("self.scaled_global_norm()") == 1
    assert "get_grad_norm_direct" not in zero
    assert bf16.count("get_global_norm_of_tensors(") == 1
    assert "global_norm=all_groups_norm" in bf16
    assert "self.zero_grad(set_to_none=True)" in zero
    assert "self.clear_hp_grads()" in bf16
    assert "norm_type=self.norm_type" in bf16
    whole = source(DeepSpeedZeroOptimizer_Stage3)  # decorated methods hide theirs
    assert whole.count("self._get_norm_groups()") == 1
    assert "scaled_global_grad_norm = combine_grad_norm_groups(norm_groups)" in whole


def test_a_reduced_gradient_is_found_through_its_mapping() -> None:
    """By its place in the group, as fp32."""
    assert "def get_lp_grad_fragment(self, index_in_param_group)" in source(tensor_fragment)
    assert "_index_in_param_group" in source(BF16_Optimizer._link_all_hp_params)
