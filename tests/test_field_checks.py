# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""
Failures that people met with hybrid models, custom code, Triton kernels and stateful caches, by
their names, each with the tests that would notice it here; and those few checks that belong to no
other file.
"""

import ast
import copy
import gc
import inspect
import pickle
import re
import threading
from pathlib import Path

import pytest
import torch
from atma import AtmaCache, AtmaForCausalLM
from atma.generation_atma import AtmaGenerationMixin
from atma.modeling_atma import AtmaPreTrainedModel
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin
from transformers.generation import utils as generation_utils

TESTS = Path(__file__).parent
MODULES = sorted([*TESTS.parent.glob("*_atma.py"), *TESTS.parent.glob("kernels/*.py")])

# Check: what goes wrong elsewhere, and the tests, as file.test (without "test_").
CHECKS = {
    "PAD-1": (
        "left padding leaks into convolutions and memory",
        "padding.padding_changes_nothing padding.the_pad_id_and_the_neighbours_do_not_matter "
        "generation.greedy_equals_a_loop_without_cache",
    ),
    "PAD-2": (
        "a padded row alone in its batch is not masked",
        "padding.a_padded_row_alone_in_a_batch_is_masked",
    ),
    "PAD-4": (
        "a right-padded prefill spoils the cache",
        "padding.a_right_padded_prefill_leaves_a_good_cache "
        "padding.padding_in_the_middle_of_a_sequence_leaves_no_trace",
    ),
    "PAD-5": (
        "biases turn a zeroed pad into a signal",
        "padding.large_biases_do_not_turn_padding_into_a_signal",
    ),
    "PAD-6": (
        "rows that see nothing become NaN and spread",
        "padding.rows_of_padding_alone_stay_finite "
        "gpu.padding_alone_stays_finite_and_leaves_no_trace",
    ),
    "CACHE-1": (
        "several tokens on a filled cache start from nothing",
        "cache.any_chunking_equals_the_whole generation_gpu.pieces_of_any_size_continue_a_cache",
    ),
    "CACHE-2": (
        "a whole forward and prefill with steps disagree",
        "cache.prefill_and_steps_equal_the_whole_around_the_chunk_size "
        "model.the_model_is_the_equations_of_the_paper "
        "generation_gpu.prefill_and_steps_equal_a_token_loop_in_fp64",
    ),
    "CACHE-4": (
        "the token counter moves in the middle of a forward",
        "cache.every_layer_sees_the_length_before_the_call",
    ),
    "CACHE-5": (
        "length or mask size come from the wrong kind of layer",
        "field_checks.every_order_of_layers_counts_alike",
    ),
    "CACHE-7": (
        "embeddings and ids give different text",
        "generation.inputs_embeds_generate_the_same_text",
    ),
    "CACHE-8": (
        "generate() runs without its cache and says nothing",
        "generation.each_step_of_generate_sees_one_token_and_the_cache",
    ),
    "GEN-1": (
        "beams keep each other's states",
        "generation.beams_keep_their_own_states "
        "cache.reordering_swaps_every_state_of_every_layer "
        "generation_gpu.beams_share_pages_and_keep_their_own_states",
    ),
    "GEN-2": (
        "crop rolls back only some of the states",
        "cache.crop_is_as_if_the_tokens_had_never_been generation.prompt_lookup_equals_greedy "
        "generation.assisted_decoding_equals_greedy",
    ),
    "GEN-3": (
        "speculation on a static cache",
        "generation.speculation_on_a_static_cache_equals_greedy_or_is_refused",
    ),
    "GEN-5": (
        "a state is restored at the wrong unit of pages",
        "cache.forks_go_their_own_ways cache.copies_and_files_restore_the_cache",
    ),
    "GEN-6": (
        "a saved cache loses or shifts states",
        "cache.copies_and_files_restore_the_cache "
        "cache.a_saved_cache_without_one_layers_state_is_refused",
    ),
    "GEN-7": (
        "continuous batching dies in a background thread",
        "generation.continuous_batching_is_refused_at_once "
        "generation.caches_that_hold_only_keys_and_values_are_refused "
        "serving.continuous_batching_is_refused_before_anything_is_served",
    ),
    "COBJ-2": (
        "a cache cannot be copied",
        "cache.copies_and_files_restore_the_cache "
        "field_checks.a_cache_with_gradients_can_be_copied",
    ),
    "COBJ-4": (
        "an offloaded cache gives wrong logits",
        "generation.caches_that_hold_only_keys_and_values_are_refused "
        "generation_gpu.offloaded_and_quantised_caches_are_refused",
    ),
    "COBJ-5": (
        "a static cache does not know the kinds of layers",
        "generation.greedy_equals_a_loop_without_cache cache.any_chunking_equals_the_whole "
        "config.the_older_name_of_a_convolution_layer_is_understood",
    ),
    "PACK-1": (
        "packed documents see each other",
        "packing.packed_documents_equal_documents_alone "
        "packing.packed_gradients_equal_those_of_documents_alone "
        "packing.a_document_does_not_move_by_one_bit_when_its_neighbour_changes "
        "gpu.packed_documents_equal_documents_alone",
    ),
    "PACK-3": (
        "trainers flatten batches unasked",
        "packing.the_flattening_collator_isolates_documents "
        "trainer.checkpointing_keeps_the_documents_apart "
        "trl.packing_of_sft_keeps_documents_apart",
    ),
    "NUM-1": (
        "saved tensors are unpacked twice",
        "training.gradient_checkpointing_changes_no_gradient "
        "polar_attention.the_backward_saves_no_weights_and_unpacks_each_tensor_once "
        "gpu.checkpointing_changes_no_gradient",
    ),
    "NUM-3": (
        "recomputation applies an operation twice",
        "gated_delta_triton.checkpointing_recomputes_the_same "
        "gpu.checkpointing_changes_no_gradient",
    ),
    "NUM-4": (
        "strong decay overflows",
        "gated_delta.any_decay_and_any_write_strength_are_exact "
        "gated_delta_triton.any_decay_and_any_write_strength_are_exact "
        "decode_triton.memory_with_extreme_decay_and_repeated_or_zero_keys",
    ),
    "NUM-5": (
        "gradients of states are wrong for the shortest chunks",
        "gated_delta.any_split_continues_the_state "
        "short_convolution.any_split_continues_the_state_with_the_same_gradients "
        "short_convolution_triton.kernels_equal_the_sum_with_all_gradients",
    ),
    "NUM-6": (
        "the tail of a length that fills no block",
        "polar_attention_triton.nothing_behind_the_end_is_read "
        "polar_attention_triton.kernels_are_the_oracle "
        "gated_delta_triton.kernels_equal_the_token_loop_with_all_gradients",
    ),
    "NUM-8": (
        "views are read as if contiguous",
        "polar_attention_triton.slices_of_one_projection_are_read_in_place "
        "polar_attention_triton.strides_change_nothing "
        "gated_delta_triton.any_strides_of_inputs_and_gradients "
        "short_convolution_triton.any_strides_of_inputs_and_gradients",
    ),
    "NUM-9": (
        "the gradient of a strong decay is rounded away",
        "gated_delta_triton.gate_gradients_keep_their_precision_at_strong_decay",
    ),
    "NUM-11": (
        "decay parameters are rounded at load (here by choice: one dtype for all)",
        "loading.low_precision_loading_rounds_once_and_runs "
        "gpu.a_file_in_fp32_loads_on_the_gpu_in_bf16",
    ),
    "NUM-12": (
        "autocast mixes dtypes in custom functions",
        "training.autocast_trains_fp32_weights gpu.autocast_trains_fp32_weights "
        "gpu.trainer_trains_in_mixed_precision",
    ),
    "KERN-1": (
        "32-bit offsets wrap",
        "polar_attention_triton.more_than_2_31_elements polar_attention_triton.enormous_strides "
        "generation_gpu.the_last_pages_of_a_huge_pool_are_reached",
    ),
    "KERN-2": (
        "a kernel runs on the current device, not the tensor's",
        "gated_delta_triton.kernels_run_on_the_device_of_their_inputs "
        "two_gpus.kernels_run_on_the_device_of_their_tensors",
    ),
    "KERN-4": (
        "every length compiles anew",
        "generation_gpu.no_length_compiles_a_kernel generation_gpu.no_step_stalls "
        "polar_attention_triton.a_new_length_compiles_nothing",
    ),
    "KERN-5": (
        "lengths of 1 and multiples of 16 are compiled apart",
        "gated_delta_triton.a_new_length_compiles_nothing decode_triton.no_length_compiles_anew",
    ),
    "KERN-6": (
        "head sizes that are no power of two",
        "polar_attention_triton.any_head_size_and_group polar_attention_triton.more_head_sizes "
        "gated_delta_triton.any_head_size_and_any_number_of_heads_per_group "
        "config.bad_combinations_are_refused_in_one_sentence",
    ),
    "KERN-7": (
        "groups of heads that are no power of two",
        "polar_attention_triton.more_groups "
        "gated_delta.heads_share_the_key_and_value_of_their_group "
        "config.bad_combinations_are_refused_in_one_sentence",
    ),
    "KERN-8": (
        "shared memory runs out for large heads",
        "gated_delta_triton.single_precision_at_large_heads polar_attention_triton.more_head_sizes",
    ),
    "KERN-10": (
        "two threads start a kernel at once",
        "field_checks.threads_share_a_model "
        "polar_attention_triton.threads_may_call_it_first_at_the_same_time "
        "generation_gpu.threads_and_fresh_processes_agree_in_every_bit",
    ),
    "KERN-11": (
        "each process computes other bits",
        "generation_gpu.threads_and_fresh_processes_agree_in_every_bit",
    ),
    "KERN-12": (
        "the same input gives another output",
        "polar_attention_triton.every_tile_of_the_table_is_deterministic "
        "generation_gpu.the_same_step_gives_the_same_bits "
        "gated_delta_triton.results_are_the_same_in_every_run",
    ),
    "KERN-14": (
        "Triton renames what a kernel uses",
        "field_checks.kernels_use_no_name_that_triton_dropped",
    ),
    "ENV-1": (
        "the loader demands packages that are optional",
        "hub.flat_files_import_only_siblings_and_required_packages",
    ),
    "ENV-3": (
        "Triton without a GPU fails at import (this machine is such a case)",
        "generation.greedy_equals_a_loop_without_cache "
        "training.every_parameter_gets_a_gradient_after_a_few_steps",
    ),
    "ENV-4": (
        "other systems have no Triton, other devices no fp64",
        "hub.everything_works_without_triton hub.no_fp64_anywhere_in_training_or_generation "
        "hub.a_tensor_of_another_device_takes_the_torch_path",
    ),
    "COMP-1": (
        "kernels break the compiled graph",
        "gpu.training_compiles_as_one_graph_and_equals_eager "
        "gated_delta_triton.operators_follow_the_rules_of_torch "
        "polar_attention_triton.the_operators_keep_their_promises",
    ),
    "COMP-2": (
        "compiled, and wrong",
        "inference_tools.text_written_by_inductor_is_that_of_eager "
        "generation.a_static_cache_decodes_in_one_compiled_graph "
        "generation_gpu.a_static_cache_compiles_once",
    ),
    "COMP-3": (
        "CUDA graphs overwrite what they returned",
        "generation_gpu.compiled_steps_keep_what_they_returned",
    ),
    "LOAD-1": (
        "initialisation overwrites what was loaded",
        "loading.loaded_weights_are_bitwise_those_of_the_file "
        "loading.a_missing_tensor_is_listed_and_its_siblings_are_untouched",
    ),
    "LOAD-2": (
        "buffers are garbage after loading (there are none)",
        "loading.loading_twice_over_a_dirty_allocator_gives_the_same_logits "
        "loading.a_model_on_meta_is_initialised_as_a_constructed_one "
        "model.no_module_keeps_a_tensor_besides_its_parameters",
    ),
    "LOAD-3": (
        "tied weights come apart",
        "loading.tied_and_untied_heads_survive_saving_and_resizing",
    ),
    "AUTO-1": (
        "Transformers renames the cache and ours is ignored",
        "generation.greedy_equals_a_loop_without_cache "
        "cache.both_names_of_the_cache_are_understood "
        "cache.a_cache_under_an_unknown_name_is_an_error "
        "field_checks.what_is_overridden_is_still_called",
    ),
    "AUTO-2": (
        "code is not saved beside the weights",
        "hub.three_rounds_of_load_and_save_change_nothing "
        "hub.checkpoints_of_trainer_load_without_the_original_folder",
    ),
    "AUTO-5": (
        "imports from folders are not found",
        "hub.flat_files_differ_from_the_package_in_import_lines_only "
        "hub.flat_files_import_only_siblings_and_required_packages",
    ),
    "TRAIN-1": (
        "accumulation inflates the loss",
        "training.accumulation_counts_labels_not_batches "
        "training.trainer_accumulation_equals_one_large_batch",
    ),
    "TRAIN-3": (
        "evaluation collects caches",
        "training.trainer_trains_evaluates_and_keeps_no_cache "
        "field_checks.no_cache_outlives_a_step_of_training_or_evaluation",
    ),
    "TRAIN-4": (
        "Trainer drops columns that forward does not name",
        "training.forward_names_what_trainer_looks_for training.labels_may_come_in_another_dtype "
        "gpu.labels_may_come_from_another_device",
    ),
    "TRAIN-5": (
        "replicas of DataParallel have no parameters()",
        "field_checks.a_replica_needs_no_parameters "
        "two_gpus.trainer_without_a_launcher_uses_both_gpus",
    ),
    "PEFT-1": (
        "fused paths bypass an adapter",
        "peft.every_adapter_is_used_and_merges_exactly "
        "peft.a_convolution_can_be_a_target_parameter "
        "generation_gpu.adapters_decode_right",
    ),
    "PEFT-2": (
        "default targets reach few layers",
        "peft.the_documented_targets_reach_every_layer_kind",
    ),
    "PEFT-5": (
        "a list of its own replaces what is spared from quantisation",
        "inference_tools.weight_only_quantisation_spares_what_is_small "
        "inference_tools.bitsandbytes_spares_what_is_small gpu.bitsandbytes_spares_what_is_small",
    ),
    "PEFT-6": (
        "a quantiser replaces a class with a forward of its own",
        "field_checks.no_class_is_a_linear_with_a_forward_of_its_own",
    ),
    "DIST-1": (
        "two devices in one operation",
        "two_gpus.layers_may_be_split_anywhere",
    ),
    "DIST-2": (
        "offloaded weights are read, not called",
        "distributed.offload_changes_nothing loading.cpu_offload_changes_nothing",
    ),
    "DIST-4": (
        "FSDP needs one dtype in a unit",
        "distributed.two_processes_train_as_one",
    ),
    "DIST-5": (
        "ZeRO-3 empties parameters",
        "distributed.zero3_initialises_and_loads_what_is_meant "
        "distributed.initialisation_never_reads_a_parameter",
    ),
    "DIST-6": (
        "wrappers that recompute feed a cache twice, or save no memory",
        "training.layers_may_be_recomputed_by_a_wrapper distributed.two_processes_train_as_one "
        "two_gpus.fsdp2_in_bf16_with_checkpointing_saves_memory_and_keeps_the_loss "
        "gpu.checkpointing_saves_memory_in_every_kind_of_layer",
    ),
    "LONG-1": (
        "logits of the whole prompt",
        "generation.prefill_computes_the_logits_of_one_position "
        "model.logits_to_keep_takes_every_form "
        "training.labels_with_logits_to_keep_are_refused "
        "model.bf16_evaluation_holds_no_fp32_copy_of_all_logits",
    ),
    "LONG-2": (
        "rotary angles lose their digits",
        "softmax_attention.rotary_angles_are_exact_in_low_precision",
    ),
    "LONG-4": (
        "a length beyond what was tested",
        "gpu.kernels_follow_the_torch_paths_at_every_threshold "
        "gpu.a_context_of_131072_tokens_reads_the_same_in_pieces",
    ),
}


def test_every_check_has_tests_that_exist():
    known = set()
    for path in TESTS.rglob("test_*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef):
                known.add(f"{path.stem}.{node.name}".replace("test_", ""))
    missing = {name for _, names in CHECKS.values() for name in names.split()} - known
    assert not missing


@pytest.mark.parametrize(
    "kinds",
    [["hybrid", "conv"], ["conv", "hybrid"], ["conv", "conv"], ["hybrid", "hybrid"]],
    ids="-".join,
)
def test_every_order_of_layers_counts_alike(make_model, tokens, close, kinds):
    model, ids = make_model(layer_types=kinds), tokens(1, 14)
    with torch.no_grad():
        cache = model(ids[:, :9], use_cache=True).past_key_values
        assert cache.get_seq_length() == 9 and cache.get_mask_sizes(5, 0) == (14, 0)
        steps = [model(ids[:, i : i + 1], past_key_values=cache).logits for i in range(9, 14)]
        close(torch.cat(steps, 1), model(ids, use_cache=False).logits[:, 9:])


def test_a_cache_with_gradients_can_be_copied(model, tokens, close):
    """Filled under autograd; a copy holds values, no graph."""
    ids = tokens(2, 12)
    cache = model(ids[:, :9], use_cache=True).past_key_values
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits[:, 9:]
        for twin in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
            close(model(ids[:, 9:], past_key_values=twin).logits, expected)
        assert cache.get_seq_length() == 9


def test_threads_share_a_model(model, tokens):
    """Four at once, each with its own prompt: nothing of a call lies on the model."""
    prompts = [tokens(1, n, seed=n) for n in (5, 9, 17, 12)]
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    expected = [model.generate(ids, **options) for ids in prompts]
    found = [None] * 4

    def write(i):
        found[i] = model.generate(prompts[i], **options)

    threads = [threading.Thread(target=write, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def replica_of(module: nn.Module) -> nn.Module:
    """As `DataParallel` makes them: modules whose parameters are plain attributes."""
    replica = module._replicate_for_data_parallel()
    for name, child in module._modules.items():
        setattr(replica, name, None if child is None else replica_of(child))
    for name, parameter in module._parameters.items():
        if parameter is not None:
            setattr(replica, name, parameter.view_as(parameter))
    return replica


def test_a_replica_needs_no_parameters(make_model, tokens):
    ids = tokens(2, 9)
    model, plain = make_model().train(), make_model().train()
    replica = replica_of(model)
    assert not list(replica.parameters())
    replica(input_ids=ids, labels=ids).loss.backward()
    plain(input_ids=ids, labels=ids).loss.backward()
    for (name, p), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, other.grad), name


def test_no_cache_outlives_a_step_of_training_or_evaluation(make_model, tokens):
    def caches():
        gc.collect()
        return sum(type(x) is AtmaCache for x in gc.get_objects())

    model, ids = make_model(), tokens(2, 9)
    before = caches()
    model.train()(ids, labels=ids).loss.backward()
    output = model(ids, labels=ids)
    assert output.past_key_values is None  # a training step has no use for one
    with torch.no_grad():
        output = model.eval()(ids, labels=ids)
    assert caches() == before + 1  # a caller who keeps it has it
    assert output.to_tuple()[0] is output.loss
    names = model.config.keys_to_ignore_at_inference
    assert all(k in names for k, v in output.items() if isinstance(v, Cache))
    del output
    assert caches() == before


@pytest.mark.smoke
def test_what_is_overridden_is_still_called():
    """A method that Transformers renamed would be ours alone, and never called."""
    own = {name for name in vars(AtmaGenerationMixin) if not name.startswith("__")}
    for name in own - set(dir(GenerationMixin)):
        assert f'"{name}"' in inspect.getsource(generation_utils), name
    own = {name for name in vars(AtmaPreTrainedModel) if not name.startswith("__")}
    assert own <= set(dir(PreTrainedModel))
    called = "get_seq_length get_mask_sizes reorder_cache batch_repeat_interleave crop reset "
    called += "batch_select_indices is_compileable is_initialized activate_past_recording "
    called += "is_croppable get_max_length"
    for name in called.split():
        assert hasattr(Cache, name) and name in vars(AtmaCache), name


def test_no_class_is_a_linear_with_a_forward_of_its_own(model):
    for name, module in model.named_modules():
        assert type(module) is nn.Linear or not isinstance(module, nn.Linear | nn.Conv1d), name
    assert AtmaForCausalLM.get_output_embeddings(model) is model.lm_head


DROPPED = ["libdevice", "trans_b", "trans_a", "tl.math.", "tl.libdevice", "triton.ops", "tl.ravel"]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_kernels_use_no_name_that_triton_dropped(path):
    """And nobody asks a module for its first parameter: replicas have none."""
    text = path.read_text()
    assert not [name for name in DROPPED if name in text]
    assert not re.search(r"next\(\s*\w+(\.\w+)*\.parameters\(", text)
