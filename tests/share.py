"""Of many alike cases, how many every check takes; `tools/test --all` takes them all.

A check is to be over in half an hour on two slow cores. What is left out here are cases of a test whose others go the same way through the
code, and single tests of a minute that smaller ones stand for. Marked `slow`, in the order in which they are written: of a grid, a number
that is one more than a row's length takes its diagonal.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

ONE_IN = {
    "distributed/test_again.py::test_each_run_meets_its_own_ranks_and_keeps_its_own_budget": 2,
    "distributed/test_averaging.py::test_a_resumed_run_goes_on_with_it": 3,
    "distributed/test_averaging.py::test_it_is_the_average_of_what_steps_left": 3,
    "distributed/test_averaging.py::test_validation_sees_it_and_training_does_not": 3,
    "distributed/test_batches.py::test_tokens_instead_of_sequences_change_nothing": 3,
    "distributed/test_nonfinite.py::test_skipping_and_rolling_back_are_the_same_on_all_ranks": 4,
    "distributed/test_nonfinite.py::test_the_first_bad_module_is_named": 3,
    "distributed/test_phases.py::test_assembling_validating_and_saving_take_what_was_planned": 4,
    "distributed/test_plan.py::test_every_rank_takes_what_was_planned": 3,
    "distributed/test_precision.py::test_each_phase_is_the_run_in_its_dtype_from_the_same_weights": 2,
    "inference/test_offload.py::test_the_same_answers": 3,
    "inference/test_parity.py::test_greedy_tokens_and_their_logprobs": 3,
    "inference/test_ranks.py::test_every_architecture": 3,
    "inference/test_scheduler.py::test_ten_thousand_requests": 2,
    "inference/test_steady.py::test_every_architecture": 3,
    "kernels/test_attention.py::test_a_token_of_each_sequence": 5,
    "kernels/test_attention.py::test_blocks_whose_rows_lie_together": 5,
    "kernels/test_attention.py::test_pieces_of_a_sequence": 5,
    "kernels/test_causal.py::test_equals_scores_written_out": 5,
    "kernels/test_linear.py::test_products": 3,
    "planning/test_beginning.py::test_several_ranks": 2,
    "planning/test_beginning.py::test_what_is_written_trains": 2,
    "planning/test_fit.py::test_the_run_stays_within_the_budget_and_tells_both": 2,
    "planning/test_generation.py::test_every_byte": 6,
    "planning/test_generation.py::test_every_byte_of_several_ranks": 3,
    "planning/test_generation_on_gpu.py::test_the_program_of_a_gpu_takes_as_much_anywhere": 6,
    "planning/test_plan.py::test_the_run_takes_what_was_planned": 3,
    "planning/test_plan.py::test_the_run_takes_what_was_planned_by_operators_of_torch": 3,
    "planning/test_ready_configs.py::test_it_fits_what_it_is_for": 3,
    "planning/test_repeat.py::test_few_blocks_tell_what_all_take": 3,
    "planning/test_repeat.py::test_on_a_gpu_they_also_take_as_long_and_reserve_as_much": 3,
    "planning/test_repeat.py::test_where_they_do_not_all_are_traced": 2,
    "planning/test_updates.py::test_one_stands_for_those_that_are_alike": 3,
    "plugins/test_base_in_files.py::test_a_model_of_transformers_own": 2,
    "plugins/test_base_in_files.py::test_a_plan_counts_what_is_in_memory": 2,
    "plugins/test_base_in_files.py::test_what_trains_is_the_same": 5,
    "plugins/test_sft.py::test_data_without_answers_is_refused": 5,
    "plugins/test_sft.py::test_runs_are_those_of_causal_lm_on_the_same_answers": 2,
    "plugins/test_stepper.py::test_an_update_in_backward_is_the_same_and_keeps_no_gradients": 2,
    "plugins/test_stepper.py::test_gradients_are_summed_up_in_a_dtype_of_their_own": 3,
    "pretrained/test_hub.py::test_a_model_of_the_hub_learns_from_data_of_the_hub_and_goes_on": 2,
    "pretrained/test_prune_depth.py::test_what_is_left_computes_as_the_whole_without_the_rest": 3,
    "testing/test_scaffold.py::test_all_of_it_passes": 3,
    "testing/test_scaffold.py::test_what_is_the_kinds_own_passes": 2,
    "testing/test_what_the_suites_find.py::test_what_is_wrong_in_other_kinds_is_found": 3,
    "testing/test_what_the_suites_find.py::test_what_is_wrong_is_found": 4,
    "third_party/test_packages.py::test_they_pass_what_every_plugin_of_their_kind_must": 3,
    "training/test_loading.py::test_a_run_reads_the_same_and_resumes_where_it_was": 2,
}
"""By a test's file and name: the first of so many cases is taken."""

NONE_OF = {
    "inference/test_offload.py::test_two_gigabytes_from_half_of_them",
    "planning/test_beginning.py::test_a_budget_changes_what_is_chosen",
    "planning/test_beginning.py::test_pretraining_a_preset_on_a_gpu_that_is_not_here",
    "planning/test_fit.py::test_under_torchrun_the_first_rank_decides_for_all",
    "plugins/test_narrow.py::test_a_compiled_run_is_the_same_in_fewer_bytes",
    "plugins/test_datasets.py::test_a_streaming_run_that_was_interrupted_goes_on_as_if_it_was_not",
    "testing/test_tutorial.py::test_every_block_runs",
}


def divide(items: Sequence[pytest.Item], whole_files: bool) -> None:
    """Mark what is left out. Where files are whole, what is named here and not there is an error."""
    met: dict[str, int] = {}
    for item in items:
        name = item.nodeid.partition("[")[0].removeprefix("tests/")
        met[name] = met.get(name, 0) + 1
        if name in NONE_OF or (met[name] - 1) % ONE_IN.get(name, 1):
            item.add_marker(pytest.mark.slow)
    files = {name.partition("::")[0] for name in met}
    gone = [name for name in (*ONE_IN, *NONE_OF) if name.partition("::")[0] in files and name not in met]
    if whole_files and gone:
        raise pytest.UsageError(f"tests/share.py: there is no {', no '.join(gone)}")
