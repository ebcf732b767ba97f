# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""Transformers' own common model tests, from the source distribution of the installed version."""

import importlib
import subprocess
import sys
import tarfile
import types
import unittest
import unittest.mock
from pathlib import Path

import pytest
import transformers
from atma import AtmaConfig, AtmaForCausalLM, AtmaModel, modeling_atma

VERSION = transformers.__version__
# Downloaded once, never committed. The source distribution holds the first level of the tests only:
# tests/generation/test_utils.py with its GenerationTesterMixin is deeper down, and no package of
# this version has it; what it asks has its like in test_generation.py.
FOLDER = Path(__file__).parents[2] / ".pytest_cache" / f"transformers-{VERSION}"
PACKAGE = "transformers_own_tests"


def fetch() -> Path:
    """The folder with the tests of Transformers, downloaded if it is not there."""
    tests = FOLDER / f"transformers-{VERSION}" / "tests"
    if not tests.is_dir():
        FOLDER.mkdir(parents=True, exist_ok=True)
        archive = FOLDER / f"transformers-{VERSION}.tar.gz"
        if not archive.exists():
            subprocess.run(
                [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
                + ["--no-binary", ":all:", "--no-build-isolation"]
                + ["--dest", str(FOLDER), f"transformers=={VERSION}"],
                check=True,
            )
        with tarfile.open(archive) as file:
            file.extractall(FOLDER, filter="data")
        (tests / "__init__.py").touch()
    return tests


def register(name: str, **attributes) -> None:
    """Registers a module, or a package if it has a `__path__`."""
    module = types.ModuleType(f"{PACKAGE}.{name}" if name else PACKAGE)
    vars(module).update(attributes)
    sys.modules[module.__name__] = module


tests = fetch()
register("", __path__=[str(tests)])
# What the tests import from deeper folders is empty here.
for folder, module, attributes in (
    ("generation", "test_utils", {"GenerationTesterMixin": type("GenerationTesterMixin", (), {})}),
    ("exporters", "test_export", {"ExportTesterMixin": type("ExportTesterMixin", (), {})}),
    ("utils", "test_configuration_utils", {"config_common_kwargs": {"num_labels": 3}}),
):
    register(folder, __path__=[])
    register(f"{folder}.{module}", **attributes)
common = importlib.import_module(f"{PACKAGE}.test_modeling_common")
training = importlib.import_module(f"{PACKAGE}.test_training_mixin")
configuration = importlib.import_module(f"{PACKAGE}.test_configuration_common")

# Why each test that Transformers skips for this model is skipped. Any other skip is a failure, and
# so is an entry that runs.
NO_GPU = "needs a GPU"
FLASH = "needs a FlashAttention package, which ATMA's attention cannot use"
NO_ROPE = "no module computes rotary tables: the rope core makes its angles where it rotates"
ONE_MODEL = "for models made of several models"
FP32 = "all parameters share one dtype: scalars are cast up where they are used"
EXPERTS = "for mixtures of experts"
DEEPSPEED = "needs DeepSpeed on a GPU (test_distributed.py has ZeRO-3 on the CPU)"
NAMES = "checkpoints have the names of the modules: there is nothing to convert"
REASONS = {
    NO_GPU: (
        "can_load_with_device_context_manager",
        "can_load_with_global_device_set",
        "cpu_offload",
        "disk_offload_bin",
        "disk_offload_safetensors",
        "flex_attention_with_grads",
        "model_parallelism",
        "sdpa_can_compile_dynamic",
        "sdpa_can_dispatch_on_flash",
    ),
    FLASH: (
        "flash_attn_2_can_compile_with_attention_mask_None_without_graph_break",
        "flash_attn_2_can_dispatch_composite_models",
        "flash_attn_2_fp32_ln",
        "flash_attn_2_from_config",
        "flash_attn_2_inference_equivalence",
        "flash_attn_2_inference_equivalence_right_padding",
        "flash_attn_3_can_dispatch_composite_models",
        "flash_attn_3_from_config",
        "flash_attn_3_inference_equivalence",
        "flash_attn_3_inference_equivalence_right_padding",
        "flash_attn_4_can_dispatch_composite_models",
        "flash_attn_4_from_config",
        "flash_attn_4_inference_equivalence",
        "flash_attn_4_inference_equivalence_right_padding",
        "flash_attn_kernels_inference_equivalence",
        "flash_attn_kernels_mps_inference_equivalence",
    ),
    NO_ROPE: (
        "model_rope_scaling_frequencies",
        "model_rope_scaling_from_config_0_linear",
        "model_rope_scaling_from_config_1_dynamic",
        "model_rope_scaling_from_config_2_yarn",
        "model_rope_with_partial_rotation",
        "vision_axial_rope",
    ),
    ONE_MODEL: (
        "attn_implementation_composite_models",
        "can_set_attention_dynamically_composite_model",
        "encoder_decoder_loss_no_double_shift",
        "internal_model_config_and_subconfig_are_same",
        "sdpa_can_dispatch_composite_models",
    ),
    FP32: (
        "keep_in_fp32_modules",
        "keep_in_fp32_modules_exist",
        "keep_in_fp32_modules_strict_also_hardcode_fp32",
    ),
    EXPERTS: (
        "eager_matches_batched_and_grouped_inference_0_fp16",
        "eager_matches_batched_and_grouped_inference_1_fp32",
        "eager_matches_batched_and_grouped_inference_2_bf16",
        "moe_models_record_router_logits",
        "output_router_logits_from_config",
    ),
    DEEPSPEED: (
        "resize_embeddings_untied_with_deepspeed",
        "resize_embeddings_untied_with_deepspeed_multi_gpu",
        "resize_tokens_embeddings_with_deepspeed",
        "resize_tokens_embeddings_with_deepspeed_multi_gpu",
    ),
    NAMES: ("can_load_from_already_mapped_keys", "reverse_loading_mapping"),
    "the cache is an AtmaCache; both of its names are tried in test_generation.py": (
        "bc_cache_name_forward",
    ),
    "outputs are collected without that decorator": ("capture_outputs_decorator",),
    "needs the library of kernels, which has no release for this version": (
        "kernels_can_load_without_crashing",
    ),
    "there are no position embeddings": ("resize_position_vector_embeddings",),
    "there is no mask: the window is a rule of the kernels": ("sliding_window_mask",),
    "slow, and needs a GPU": ("torch_compile_for_training",),
}
SKIPPED = {f"test_{name}": reason for reason, names in REASONS.items() for name in names}


class AtmaModelTester:
    """What the common tests ask for: a tiny configuration and inputs."""

    config_class = AtmaConfig
    base_model_class = AtmaModel
    causal_lm_class = AtmaForCausalLM
    batch_size, seq_length, is_training = 13, 7, True
    vocab_size, hidden_size, num_hidden_layers, num_attention_heads = 99, 32, 2, 2
    pad_token_id, bos_token_id, eos_token_id = 0, 1, 2

    def __init__(self, parent):
        self.parent = parent

    def get_config(self) -> AtmaConfig:
        return AtmaConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=37,
            num_hidden_layers=2,
            layer_types=["conv", "hybrid"],
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=2,
            head_dim=16,
            pad_token_id=self.pad_token_id,
            bos_token_id=self.bos_token_id,
            eos_token_id=self.eos_token_id,
            zero_init_residual=False,
        )

    def prepare_config_and_inputs_for_common(self):
        input_ids = common.ids_tensor([self.batch_size, self.seq_length], self.vocab_size)
        mask = common.torch.tril(common.torch.ones_like(input_ids))
        return self.get_config(), {"input_ids": input_ids, "attention_mask": mask}


@pytest.fixture(autouse=True, scope="module")
def registered():
    """By this table Transformers' tests know that the base model has no loss."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(common.MODEL_MAPPING_NAMES, "atma", "AtmaModel")
        yield


class AtmaModelTest(
    common.ModelTesterMixin,
    common.GenerationTesterMixin,
    training.TrainingTesterMixin,
    unittest.TestCase,
):
    all_model_classes = (AtmaModel, AtmaForCausalLM)
    model_tester = None

    def setUp(self):
        self.model_tester = AtmaModelTester(self)
        self.config_tester = configuration.ConfigTester(self, config_class=AtmaConfig)

    def test_config(self):
        self.config_tester.run_common_tests()

    def test_attention_outputs(self):
        self.model_tester.num_hidden_layers = 1  # of two layers, one has attention weights
        super().test_attention_outputs()

    def test_retain_grad_hidden_states_attentions(self):
        # Attention weights are a report: polar attention's output is no function of them alone.
        self.has_attentions = False
        super().test_retain_grad_hidden_states_attentions()

    def test_can_capture_specific_layers_hidden_states(self):
        recorded = {"hidden_states": modeling_atma.AtmaDecoderLayer}
        with unittest.mock.patch.object(AtmaModel, "_can_record_outputs", recorded):
            super().test_can_capture_specific_layers_hidden_states()
