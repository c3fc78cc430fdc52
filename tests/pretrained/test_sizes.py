"""Presets have the published shapes, and `fw models list` says how large they are."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from conftest import fw
from fw.pretrained.sizes import _default, size_of, sized_plugins
from fw_plugins.attention.sdpa import SDPAttention
from models.architectures import save

PUBLISHED = {
    "tinyllama-1.1b": 1_100_048_384,
    "llama2-7b": 6_738_415_616,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "gemma2-2b": 2_614_341_888,
    "gemma2-9b": 9_241_705_984,
    "gemma3-1b": 999_885_952,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
}
"""Parameters, tied weights counted once, as the models' pages give them."""


def test_every_preset_is_known_here():
    assert set(sized_plugins()) == set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_equal_the_published_and_those_of_transformers(name, tmp_path):
    assert size_of(name).parameters == PUBLISHED[name]
    plugin = _default(name)
    with torch.device("meta"):
        fields = plugin.build(plugin.vocab_size, 1, SDPAttention(None)).hf_config()
        (tmp_path / "config.json").write_text(json.dumps(fields))
        theirs = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    assert theirs.num_parameters() == PUBLISHED[name]


def test_active_parameters_and_cache_by_hand():
    qwen = size_of("qwen3-30b-a3b")
    expert = 3 * 2048 * 768
    assert qwen.active_parameters == qwen.parameters - 48 * (128 - 8) * expert
    assert qwen.kv_bytes_per_token == 48 * 2 * 4 * 128 * 2
    assert size_of("mixtral-8x7b").active_parameters == 12_879_925_248
    gemma = size_of("gemma3-1b")
    assert (gemma.blocks, gemma.windowed_blocks, gemma.window, gemma.context) == (26, 22, 512, 32768)
    assert size_of("llama3-8b").weight_bytes(16) == 2 * PUBLISHED["llama3-8b"]


def test_the_list_on_the_command_line(workspace):
    done = fw("models", "list").ok()
    lines = {line.split()[0]: line for line in done.out.splitlines() if line}
    assert set(PUBLISHED) <= set(lines)
    assert "3,353,032,704" in lines["qwen3-30b-a3b"] and "56.9 GiB" in lines["qwen3-30b-a3b"] and "96 KiB" in lines["qwen3-30b-a3b"]
    save("gemma3", workspace / "dir")
    found = json.loads(fw("models", "list", "dir", "gpt2", "--json").ok().out)
    assert [entry["name"] for entry in found] == ["dir", "gpt2"]
    assert found[1]["weight_bytes"] == {"fp32": 497759232, "bf16": 248879616, "int8": 124439808, "4bit": 62219904}
    wrong = fw("models", "list", "lama3-8b")
    assert wrong.code == 2 and "neither a model plugin nor a directory; did you mean 'llama3-8b'" in wrong.err
    assert fw("models", "list", "llama").code == 2


def test_a_presets_shape_can_be_overridden(workspace):
    done = fw("config", "tiny.yaml", "model=llama3.1-8b", "model.num_hidden_layers=2", "model.rope_scaling.factor=16").ok()
    assert "num_hidden_layers: 2\n" in done.out and "hidden_size: 4096" in done.out
    assert "rope_type: llama3\n    factor: 16.0\n    original_max_position_embeddings: 8192" in done.out
    done = fw("config", "tiny.yaml", "model=llama3.1-8b", "model.rope_scaling={rope_type: yarn, factor: 2}").ok()
    assert "rope_type: yarn\n    factor: 2.0\n    original_max_position_embeddings: null\n    low_freq_factor: null" in done.out
    for override, says in (
        ("model.rope_scaling.factr=2", "unknown key 'factr' in 'model.rope_scaling'; did you mean 'factor'"),
        ("model.rope_scaling.factor=far", "model.rope_scaling.factor: 'far' is not of type float"),
        ("model.rope_scaling.beta_fast=2", "model.rope_scaling.beta_fast: means nothing to rope_type llama3"),
        ("model.rope_scaling=3", "model.rope_scaling: 3 is not of type RopeScaling | None"),
    ):
        wrong = fw("config", "tiny.yaml", "model=llama3.1-8b", override)
        assert wrong.code == 2 and says in wrong.err and f"override {override}" in wrong.err, wrong.err


def test_an_interpolation_sees_the_defaults_around_a_nested_override(workspace):
    words = ("model=llama3.1-8b", "model.rope_scaling.factor=16")
    done = fw("config", "tiny.yaml", *words, "train.sequence_length=${model.rope_scaling.original_max_position_embeddings}").ok()
    assert "sequence_length: 8192" in done.out
