"""DDP's own tests, as PyTorch ships them, with ddpcomm in DDP's place: those that torch's class passes on CPU ranks.

Those that ddpcomm fails on purpose are named, with the reason, in docs/differences.md, and left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.ddp import upstream
from tests.ranks import RankPool

DIFFERENCES = (Path(__file__).parents[2] / "docs" / "differences.md").read_text()

TESTS = """
    test_DistributedDataParallelCPU
    test_DistributedDataParallelCPU_grad_is_view
    test_DistributedDataParallel_requires_grad
    test_DistributedDataParallel_with_amp_and_grad_is_view
    test_accumulate_gradients_no_sync
    test_accumulate_gradients_no_sync_allreduce_hook
    test_accumulate_gradients_no_sync_allreduce_with_then_hook
    test_accumulate_gradients_no_sync_grad_is_view
    test_compute_bucket_assignment_by_size_sparse_error_without_logger
    test_ddp_broadcast_buffer
    test_ddp_broadcast_buffer_via_hook
    test_ddp_broadcast_buffers_deprecation_warning
    test_ddp_bucket_cap_mb_list
    test_ddp_buffer_hook_allreduce
    test_ddp_buffer_hook_allreduce_return_future
    test_ddp_build_debug_param_to_name_mapping
    test_ddp_build_debug_param_to_name_mapping_requires_grad
    test_ddp_comm_hook_logging
    test_ddp_compile_static_graph
    test_ddp_control_flow_different_across_ranks
    test_ddp_control_flow_same_across_ranks
    test_ddp_create_graph
    test_ddp_device_mesh_initialization
    test_ddp_forward_backward_hook
    test_ddp_grad_div_uneven_inputs
    test_ddp_hook_parity_allreduce
    test_ddp_hook_parity_allreduce_process_group
    test_ddp_hook_parity_post_localSGD
    test_ddp_hook_parity_powerSGD
    test_ddp_ignore_params_arg
    test_ddp_init_sync_buffers_with_forward_sync_buffers_false
    test_ddp_join_model_equivalence
    test_ddp_join_respects_forward_sync_buffers_false
    test_ddp_logging_data_cpu
    test_ddp_model_diff_num_params_across_ranks
    test_ddp_multiple_nested_unused_params_err_ignore_params
    test_ddp_multiple_nested_unused_params_error
    test_ddp_namedtuple
    test_ddp_native_mixed_precision_ignored_params
    test_ddp_new_tensor_in_fwd
    test_ddp_new_tensor_in_fwd_static_graph
    test_ddp_profiling_torch_profiler
    test_ddp_python_error_logged
    test_ddp_remove_autograd_hooks
    test_ddp_returns_tensor_with_no_grad
    test_ddp_shared_grad_acc_unused_params
    test_ddp_sink_noclone
    test_ddp_static_graph_nested_types
    test_ddp_sync_module_states
    test_ddp_uneven_input_exception
    test_ddp_uneven_input_join_disable
    test_ddp_unused_params_rebuild_buckets_exception
    test_ddp_zero_output_features
    test_detect_ddp_is_actually_static
    test_different_graph_across_ranks
    test_get_data_parallel_params
    test_grads_same_across_ranks_with_no_sync
    test_invalid_static_graph
    test_output_unused_in_loss_dict_module
    test_output_unused_in_loss_tuple_module
    test_post_localSGD_optimizer_parity
    test_post_localSGD_optimizer_parity_grad_is_view
    test_post_localSGD_optimizer_parity_with_hierarchical_sgd
    test_post_localSGD_optimizer_parity_with_hierarchical_sgd_grad_is_view
    test_post_localSGD_optimizer_step_reload
    test_skip_all_reduce_unused_parameters
    test_stateless_api_with_ddp
    test_static_graph_api_cpu
    test_static_graph_multi_forward
    test_undefined_grad_parity_unused_parameters
    test_verify_model_across_rank_with_logger
    test_verify_model_across_rank_without_logger
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),  # the first of them also starts the ranks and imports torch's tests
    pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the list of tests is that of torch 2.13"),
    pytest.mark.skipif(
        any(find_spec(package) is None for package in upstream.NEEDS), reason=f"torch's tests need {', '.join(upstream.NEEDS)}"
    ),
]


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """Ranks of their own: torch's tests change much in a process that others should not meet."""
    with RankPool(2, timeout=timedelta(seconds=100)) as pool:
        yield pool


def test_each_that_fails_is_listed_with_its_reason() -> None:
    assert set(re.findall(r"`(test_\w+)`", DIFFERENCES)) <= set(TESTS.split())


@pytest.mark.parametrize("name", [name for name in TESTS.split() if f"`{name}`" not in DIFFERENCES])
def test_upstream(pool: RankPool, name: str, tmp_path: Path) -> None:
    reasons = pool.run(upstream.run, name, tmp_path, group_timeout=timedelta(seconds=60))
    if any(reasons):
        pytest.skip("; ".join(reason for reason in reasons if reason))
