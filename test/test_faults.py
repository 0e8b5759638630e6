"""Known faults of this kind of software, by number, and the tests that would fail if this package had them.

A fault in both tables is covered but for what the second one says. Nothing of the package is imported here.
"""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent

ALL = """
    A1 A2 A4 A5 A7 A8 A10 A11 A13 A14 A16
    B1 B2 B4 B5
    C1 C2 C4 C5 C7 C8 C10 C11 C13 C14
    D1 D2 D4 D5 D7 D8 D10 D11
    E1 E2 E4 E5 E7 E8 E10 E11
    F1 F2 F4 F5 F7 F8 F10
    G1 G2 G4 G5 G7 G8 G10 G11 G13 G14 G16 G17
    H1 H2 H4 H5 H7 H8
    I1 I2 I4 I5
    J1 J2 J4 J5
    K1 K2 K4 K5 K7 K8 K10
    L1 L2 L4 L5 L7 L8
    M1 M2 M4 M5 M7 M8
    N1 N2 N4 N5
"""

# Fault -> tests, as file::function.
COVERED: dict[str, tuple[str, ...]] = {
    # Calibration data.
    "A1": (
        "calibration/test_dataset.py::test_a1_short_lines_are_packed_and_shortage_is_one_warning",
        "calibration/test_dataset.py::test_no_data_at_all_is_an_error",
        "cli/test_quantize.py::test_missing_or_empty_data_are_named_in_the_last_line",
    ),
    "A2": (
        "calibration/test_dataset.py::test_a2_bad_records_are_counted_in_one_warning",
        "calibration/test_dataset.py::test_a2_only_bad_or_empty_file_is_an_error_with_its_name",
    ),
    "A4": (
        "calibration/test_dataset.py::test_a4_all_known_shapes_give_the_same_sample_count",
        "calibration/test_dataset.py::test_a4_unknown_column_lists_found_and_accepted",
    ),
    "A5": (
        "calibration/test_chat_text.py::test_a5_no_template_gives_plain_text_with_one_warning",
        "calibration/test_chat_text.py::test_a5_refused_system_role_is_retried_once_without_it",
        "calibration/test_dataset.py::test_a5_chats_work_without_template_and_with_one_that_refuses",
    ),
    "A7": (
        "test_compressor.py::test_padding_never_counts",
        "test_compressor.py::test_the_pad_embedding_changes_nothing",
    ),
    "A8": (
        "calibration/test_dataset.py::test_a8_no_pad_token_and_no_tokenizer",
        "calibration/test_record_encoder.py::test_a8_tokenizer_is_unchanged_down_to_the_saved_file",
    ),
    "A10": ("calibration/test_dataset.py::test_a10_seqlen_is_obeyed_for_text_and_tokens",),
    "A11": ("calibration/test_dataset.py::test_a11_one_very_long_line_is_cut_to_windows",),
    "A13": (
        "calibration/test_dataset.py::test_a13_mixed_data_sets_give_their_shares_in_a_fixed_order",
        "calibration/test_dataset.py::test_a13_num_shares_override_nsamples",
    ),
    "A14": (
        "calibration/test_dataset.py::test_a14_equal_content_gives_equal_samples_in_every_form",
        "calibration/test_dataset.py::test_a14_other_types_are_a_type_error_naming_the_accepted_ones",
    ),
    "A16": (
        "calibration/test_dataset.py::test_a16_local_file_and_builtin_need_no_network",
        "calibration/test_hub_source.py::test_a16_unreachable_hub_fails_within_seconds_and_names_the_way_out",
    ),
    # Block inputs.
    "B1": (
        "test_compressor.py::test_hidden_states_equal_the_whole_model",
        "test_compressor.py::test_padding_never_counts",
    ),
    "B2": ("test_compressor.py::test_batch_size_does_not_change_scales",),
    "B4": (
        "calibration/test_block_inputs.py::test_replay_equals_the_models_own_blocks",
        "test_compressor.py::test_hidden_states_equal_the_whole_model",
    ),
    "B5": ("calibration/test_block_inputs.py::test_nested_arguments_are_replayed_kept_once_and_released",),
    # Experts.
    "C1": ("integration/test_moe.py::test_experts_without_tokens_get_the_largest_range_of_the_others",),
    "C2": ("nn/test_observers.py::test_zero_tokens_change_nothing",),
    "C4": (
        "integration/test_moe.py::test_streamed_blocks_are_the_whole_model",
        "integration/test_moe.py::test_a_layer_without_any_token_stops_the_run",
    ),
    "C5": (
        "test_layer_plan.py::test_all_experts_become_fp8",
        "test_pipeline.py::test_a_model_that_stays_mostly_in_16_bit_is_warned_about",
    ),
    "C7": ("test_layer_plan.py::test_routers_are_listed_by_the_checkpoints_names_and_untouched",),
    "C8": (
        "test_plan.py::test_layers_1_is_not_layers_10",
        "test_plan.py::test_patterns_match_whole_name_parts_only",
        "test_layer_plan.py::test_routers_are_listed_by_the_checkpoints_names_and_untouched",
    ),
    "C10": (
        "test_layer_plan.py::test_what_has_no_scale_is_listed_and_what_is_listed_has_none",
        "integration/test_formats.py::test_the_config_says_of_every_matrix_whether_it_is_fp8",
    ),
    "C11": (
        "test_layer_plan.py::test_gate_and_up_of_an_expert_share_both_scales",
        "test_layer_plan.py::test_all_experts_of_a_layer_share_their_input_scales",
        "integration/test_moe.py::test_experts_without_tokens_get_the_largest_range_of_the_others",
    ),
    "C14": ("integration/test_moe.py::test_a_multi_token_prediction_layer_is_kept_in_16_bit",),
    # Native FP8 sources.
    "D1": (
        "checkpoint/test_source_format.py::test_every_element_is_its_code_times_its_blocks_scale",
        "integration/test_moe.py::test_a_native_fp8_source_is_its_16_bit_twin",
    ),
    "D2": ("checkpoint/test_source_format.py::test_weight_and_scale_in_different_shards",),
    "D4": (
        "checkpoint/test_source_format.py::test_weights_and_scales_are_one_to_one",
        "test_plan.py::test_an_fp8_tensor_without_a_config_is_refused",
    ),
    "D5": ("integration/test_moe.py::test_the_export_of_a_native_fp8_source",),
    "D7": (
        "integration/test_moe.py::test_the_export_of_a_native_fp8_source",
        "integration/test_moe.py::test_no_old_block_survives_inside_a_composites_config",
    ),
    "D8": (
        "integration/test_moe.py::test_a_native_fp8_source_is_its_16_bit_twin",
        "evaluation/test_block_error.py::test_a_native_fp8_reference",
    ),
    "D10": ("checkpoint/test_source_format.py::test_every_scale_dtype",),
    "D11": (
        "test_plan.py::test_a_quantised_source_is_refused_by_name",
        "test_plan.py::test_an_own_export_is_refused_as_a_source",
    ),
    # Numbers.
    "E1": (
        "numerics/test_fp8.py::test_zero_row_gives_a_finite_scale_zero_codes_and_exact_zeros",
        "test_compressor.py::test_degenerate_rows_give_finite_scales",
        "test_compressor.py::test_a_layer_that_sees_only_zeros_gets_a_finite_scale",
    ),
    "E2": (
        "inference/test_linear.py::test_far_inputs_saturate",
        "kernels/test_cpu.py::test_inputs_out_of_range_saturate",
    ),
    "E4": (
        "integration/test_formats.py::test_scales_are_as_documented",
        "test_autoround.py::test_the_quantised_model_is_the_reloaded_one_bit_for_bit",
    ),
    "E5": (
        "numerics/test_fp8.py::test_negative_side_sets_the_range",
        "nn/test_observers.py::test_negative_side_counts",
        "test_compressor.py::test_the_largest_negative_value_decides_the_scale",
    ),
    "E7": (
        "test_layer_plan.py::test_scales_come_with_codes_and_only_with_them",
        "test_compressor.py::test_every_layer_is_reported_once",
    ),
    "E8": ("integration/test_formats.py::test_files_hold_what_the_run_made_bit_for_bit",),
    "E10": (
        "test_pipeline.py::test_ranges_that_hang_on_few_tokens_are_named",
        "test_autoround.py::test_ignored_layers_stay_linear_in_both",
    ),
    "E11": (
        "numerics/test_fp8.py::test_subnormal_row_stays_finite",
        "test_compressor.py::test_degenerate_rows_give_finite_scales",
    ),
    # Tied embeddings, ignored layers.
    "F1": (
        "test_pipeline.py::test_a_tied_head_is_not_written_and_is_tied_again",
        "inference/test_hf_saving.py::test_dense",
    ),
    "F2": (
        "test_pipeline.py::test_an_untied_head_is_kept",
        "test_pipeline.py::test_a_head_of_its_own_is_kept_whatever_the_config_says",
        "test_pipeline.py::test_a_flag_that_says_untied_gives_a_model_in_memory_both_tensors",
    ),
    "F4": (
        "test_pipeline.py::test_nothing_in_shards_is_lost_if_the_config_says_nothing_of_tying",
        "integration/test_moe.py::test_a_composites_shards_are_complete_wherever_it_says_whether_it_is_tied",
    ),
    "F5": ("integration/test_moe.py::test_equal_experts_are_all_written",),
    "F7": (
        "cli/test_quantize.py::test_every_option_reaches_the_config",
        "cli/test_main.py::test_a_mistyped_option_is_refused_with_a_suggestion",
        "test_autoround.py::test_an_unknown_keyword_is_a_type_error",
    ),
    "F8": (
        "test_layer_plan.py::test_what_has_no_scale_is_listed_and_what_is_listed_has_none",
        "integration/test_formats.py::test_the_config_says_of_every_matrix_whether_it_is_fp8",
    ),
    "F10": (
        "test_plan.py::test_ignoring_one_of_a_fused_group_widens_to_the_group",
        "test_plan.py::test_ignoring_up_proj_keeps_gate_proj_too",
        "test_layer_plan.py::test_a_layer_without_v_proj_widens_to_what_it_has",
    ),
    # What is written.
    "G1": (
        "test_pipeline.py::test_side_files_are_copied_byte_for_byte",
        "test_pipeline.py::test_an_invalid_generation_config_in_memory_is_saved_as_it_is",
    ),
    "G2": (
        "test_pipeline.py::test_side_files_are_copied_byte_for_byte",
        "test_pipeline.py::test_a_model_in_memory_brings_its_tokenizer_if_it_is_given",
    ),
    "G4": (
        "test_export.py::test_side_files",
        "test_pipeline.py::test_old_weights_and_old_quantisation_files_stay_behind",
        "test_pipeline.py::test_code_is_copied_only_when_it_is_trusted",
    ),
    "G5": ("test_pipeline.py::test_config_json_is_the_source_plus_one_block",),
    "G7": (
        "test_pipeline.py::test_weights_that_are_not_contiguous_are_saved",
        "checkpoint/test_writer.py::test_non_contiguous_tensor_is_written_in_c_order",
        "models/test_skeleton.py::test_gpt2_is_refused_with_the_reason",
    ),
    "G8": (
        "test_pipeline.py::test_the_export_holds_exactly_what_was_made",
        "integration/test_moe.py::test_shards_change_nothing",
    ),
    "G10": ("test_pipeline.py::test_keys_are_the_source_plus_scales_and_the_rest_is_untouched",),
    "G11": (
        "test_pipeline.py::test_keys_are_the_source_plus_scales_and_the_rest_is_untouched",
        "integration/test_formats.py::test_every_format_holds_what_was_tuned",
    ),
    "G13": (
        "test_pipeline.py::test_a_model_in_memory_gives_the_same_tensors_as_its_folder",
        "test_pipeline.py::test_a_model_in_memory_brings_its_tokenizer_if_it_is_given",
    ),
    "G14": (
        "test_plan.py::test_nothing_left_to_quantise_is_an_error",
        "models/test_skeleton.py::test_unknown_model_type_is_named",
    ),
    "G16": (
        "test_pipeline.py::test_an_existing_export_is_replaced_only_when_asked",
        "checkpoint/test_writer.py::test_overwrite_leaves_no_stale_shard_or_index",
    ),
    "G17": ("test_pipeline.py::test_inference_mode_makes_no_difference",),
    # Loading again.
    "H1": (
        "test_autoround.py::test_the_quantised_model_is_the_reloaded_one_bit_for_bit",
        "test_autoround.py::test_quantize_then_save_equals_quantize_and_save",
        "test_pipeline.py::test_the_export_holds_exactly_what_was_made",
        "integration/test_moe.py::test_the_reloaded_export_is_the_simulation",
        "integration/test_moe.py::test_shards_change_nothing",
    ),
    "H2": (
        "inference/test_linear.py::test_transformers_does_not_initialise_it_again",
        "inference/test_hf_quantizer.py::test_dense",
    ),
    "H4": (
        "inference/test_linear.py::test_a_layer_that_was_never_loaded_refuses_to_run",
        "inference/test_linear.py::test_a_layer_that_was_never_loaded_refuses_off_meta_too",
    ),
    "H5": ("inference/test_hf_saving.py::test_dense", "inference/test_hf_saving.py::test_experts"),
    "H7": (
        "inference/test_load.py::test_the_bias_is_kept_in_the_sources_values",
        "inference/test_linear.py::test_it_computes_the_reference",
        "test_pipeline.py::test_keys_are_the_source_plus_scales_and_the_rest_is_untouched",
    ),
    "H8": (
        "inference/test_load.py::test_any_dtype_leaves_codes_and_scales_alone",
        "inference/test_load.py::test_half_after_loading",
        "inference/test_load.py::test_a_deep_copy_is_equal_and_apart",
        "inference/test_linear.py::test_casts_keep_codes_and_scales",
    ),
    # What engines read.
    "I1": ("integration/test_formats.py::test_scales_are_as_documented",),
    "I2": ("integration/test_formats.py::test_scales_are_as_documented",),
    "I4": (
        "integration/test_formats.py::test_the_strategy_of_a_layer_is_the_shape_of_its_scales",
        "integration/test_formats.py::test_what_consumers_cannot_load_is_refused_before_work",
    ),
    "I5": (
        "integration/test_moe.py::test_only_the_language_blocks_of_a_composite_are_quantised",
        "integration/test_moe.py::test_a_wildcard_does_not_reach_the_vision_tower",
    ),
    # Scales of the KV cache.
    "J1": (
        "calibration/test_kv_cache.py::test_scales_are_those_of_transformers_own_cache",
        "integration/test_kv_cache.py::test_the_export_differs_by_its_scales_alone",
        "models/test_attention.py::test_an_attention_that_cannot_be_told_is_refused_by_its_block",
    ),
    "J2": ("integration/test_kv_cache.py::test_the_export_differs_by_its_scales_alone",),
    "J4": (
        "calibration/test_kv_cache.py::test_tuning_holds_no_graph_of_the_cache",
        "integration/test_memory.py::test_peak_memory_is_flat_in_tuning_steps",
    ),
    "J5": ("integration/test_kv_cache.py::test_latent_attention_is_refused_with_the_reason",),
    # Memory, devices, speed.
    "K1": ("integration/test_memory.py::test_peak_memory_is_flat_in_depth",),
    "K2": ("integration/test_memory.py::test_peak_memory_is_flat_in_tuning_steps",),
    "K4": ("test_pipeline.py::test_a_lack_of_memory_names_what_to_make_smaller",),
    "K5": (
        "test_device.py::test_cpu_with_an_index",
        "models/test_loaded_model.py::test_weights_offloaded_to_disk_are_found",
        "test_device.py::test_a_missing_gpu_is_named_with_a_way_out",
        "test_device.py::test_other_words_are_refused_by_name",
        "test_autoround.py::test_a_bad_device_is_refused",
    ),
    "K8": ("cli/test_quantize.py::test_progress_names_the_worst_layer",),
    "K10": (
        "cli/test_main.py::test_a_value_of_the_wrong_kind_is_named",
        "test_config.py::test_counts_must_be_whole_and_positive",
    ),
    # lm-eval.
    "L1": (
        "evaluation/test_lm_eval_backend.py::test_gemma_gets_bos_whatever_its_folder_is_called",
        "evaluation/test_lm_eval_backend.py::test_a_folder_called_gemma_changes_nothing",
    ),
    "L2": (
        "evaluation/test_lm_eval_backend.py::test_simple_evaluate_by_name",
        "evaluation/test_lm_eval_registration.py::test_missing_or_old_lm_eval_is_one_sentence",
    ),
    "L4": ("evaluation/test_lm_eval_backend.py::test_code_of_the_folder_runs_only_if_asked",),
    "L5": (
        "evaluation/test_lm_eval_backend.py::test_a_missing_gpu_is_an_error_before_work",
        "cli/test_quantize.py::test_mistakes_are_one_line",
    ),
    "L7": (
        "evaluation/test_lm_eval_backend.py::test_a_broken_scale_changes_the_score",
        "evaluation/test_lm_eval_backend.py::test_linear_classes_are_counted_and_logged",
    ),
    "L8": (
        "cli/test_quantize.py::test_unknown_tasks_are_found_before_the_work",
        "evaluation/test_tasks.py::test_lm_evals_own_tasks",
        "evaluation/test_lm_eval_backend.py::test_context_length_comes_from_the_config",
    ),
    # Command line and Python.
    "M1": (
        "cli/test_quantize.py::test_every_option_reaches_the_config",
        "cli/test_quantize.py::test_no_setting_is_left_without_an_option_that_was_tried",
        "cli/test_quantize.py::test_a_run_from_the_command_line",
    ),
    "M4": ("test_plan.py::test_a_pattern_with_a_typing_error_is_named",),
    "M5": (
        "test_autoround.py::test_a_second_run_in_the_process_equals_a_fresh_one",
        "test_autoround.py::test_a_run_leaves_random_states_and_logging_alone",
        "integration/test_moe.py::test_transformers_is_left_as_it_was",
    ),
    "M7": (
        "test_autoround.py::test_a_bad_argument_is_refused_at_once",
        "test_autoround.py::test_a_quoted_scheme_name_and_a_scheme_object_are_understood",
        "test_autoround.py::test_an_unknown_keyword_is_a_type_error",
    ),
    "M8": ("models/test_skeleton.py::test_own_code_is_never_run_unasked_and_the_flag_is_named",),
    # Dependencies.
    "N1": (
        "inference/test_hf_quantizer.py::test_experts",
        "integration/test_moe.py::test_a_composite_reloads_as_the_simulation",
    ),
    "N2": ("integration/test_dependencies.py::test_the_range_of_transformers_is_what_was_tried",),
    "N4": (
        "integration/test_dependencies.py::test_every_module_can_be_imported_without_a_warning_about_it",
        "integration/test_dependencies.py::test_a_run_and_a_load_use_nothing_deprecated",
    ),
    "N5": ("calibration/test_text_sources.py::test_n5_parquet_with_odd_metadata_reads",),
}

# Fault -> what is not covered, and why.
NOT_COVERED: dict[str, str] = {
    "C13": "there is no mode that sends every token to every expert: tokens go where the model's router sends them",
    "D1": "a grid of scales with rows to spare is refused by name, not loaded: it may as well be of another block size",
    "E8": "every layer's weight error is in the report, the worst one on the screen, but no bound warns or stops",
    "J5": "latent attention is refused with the reason instead of being left out, as engines drop such scales",
    "K4": "nothing is tried again with a smaller batch: the run ends with a message that names what to make smaller",
    "K7": "scripts/bench_linear.py measures it; a bound on seconds would fail on a busy machine",
    "K8": "gains by larger batches are not asserted: a bound on seconds would fail on a busy machine",
    "M2": "not here: a run that was killed starts again from the first block",
    "N1": "only one version of transformers is installed at a time; the oldest one is not tried by the suite",
}


def literal_keys() -> list[list[str]]:
    """The keys of the tables above as they are written, repeated ones included."""
    tables = [node.value for node in ast.parse(Path(__file__).read_text()).body if isinstance(node, ast.AnnAssign)]
    return [[ast.literal_eval(key) for key in table.keys if key] for table in tables if isinstance(table, ast.Dict)]


def test_every_fault_is_in_a_table_and_once_in_each():
    keys = literal_keys()
    assert [set(found) for found in keys] == [set(COVERED), set(NOT_COVERED)]
    assert [name for found in keys for name, count in Counter(found).items() if count > 1] == []
    assert max(Counter(ALL.split()).values()) == 1
    assert COVERED.keys() | NOT_COVERED.keys() == set(ALL.split())
    assert all(COVERED.values())
    assert all(NOT_COVERED.values())


@pytest.mark.parametrize("file", sorted({test.partition("::")[0] for tests in COVERED.values() for test in tests}))
def test_every_named_test_exists(file: str):
    functions = {node.name for node in ast.parse((ROOT / file).read_text()).body if isinstance(node, ast.FunctionDef)}
    named = {test.partition("::")[2] for tests in COVERED.values() for test in tests if test.startswith(f"{file}::")}
    assert named - functions == set()
