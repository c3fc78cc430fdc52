"""Model directories as they are found in the world: old and new spellings, bare names, what is refused, what is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

import fw as package
from fw import UserError, load_model, save_model
from fw.pretrained.directory import named_base
from models.architectures import make, save

IDS = torch.arange(1, 31)[None]


def edit(directory: Path, **fields) -> None:
    """Change config.json; None takes a field out."""
    config = json.loads((directory / "config.json").read_text()) | fields
    (directory / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def weights(directory: Path, change) -> None:
    """Rewrite the weights; ``change`` alters the dict of tensors in place."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("case", "old"),
    [
        ("llama-theta", {"rope_theta": 500000.0}),
        ("llama-linear", {"rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 4.0}}),
        ("llama-dynamic", {"rope_theta": 10000.0, "rope_scaling": {"type": "dynamic", "factor": 2.0}}),
        ("llama-yarn", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}}),
        (
            "llama-llama3",
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 32,
                }
            },
        ),
        ("gemma3", {"rope_theta": 1000000.0, "rope_local_base_freq": 10000, "sliding_window_pattern": 6, "layer_types": None}),
        (
            "gemma3-stretched",
            {"rope_theta": 20000.0, "rope_local_base_freq": 500.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        ),
        ("qwen2-windows-tied", {"rope_theta": 10000.0, "layer_types": None}),
    ],
)
def test_configurations_of_older_transformers(case, old, tmp_path):
    theirs = save(case, tmp_path)
    edit(tmp_path, rope_parameters=None, **old)
    torch.testing.assert_close(load_model(tmp_path)(IDS), theirs(IDS).logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "case", ["llama-llama3", "llama-yarn-mscale", "gemma3-stretched", "gemma2-uncapped", "mistral", "qwen3-layer_types"]
)
def test_a_written_configuration_means_the_same_to_both(case, tmp_path):
    save(case, tmp_path / "a")
    save_model(load_model(tmp_path / "a"), tmp_path / "b")
    save_model(load_model(tmp_path / "b"), tmp_path / "c")
    assert json.loads((tmp_path / "b/config.json").read_text()) == json.loads((tmp_path / "c/config.json").read_text())
    ours, theirs = AutoConfig.from_pretrained(tmp_path / "b").to_dict(), AutoConfig.from_pretrained(tmp_path / "a").to_dict()
    # Where the files lie, who wrote them, and what layer_types says already.
    other = {"_name_or_path", "transformers_version", "_sliding_window_pattern", "max_window_layers", "use_bidirectional_attention"}
    for key in theirs.keys() - other:
        assert ours[key] == theirs[key], key


def test_dtype_device_and_mode(tmp_path):
    save("llama", tmp_path)
    model = load_model(tmp_path, dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16} and not model.training
    assert model(IDS).shape == (1, 30, 131) and model(IDS).dtype == torch.bfloat16
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, attn_implementation="sdpa")
    assert (model(IDS) - theirs(IDS).logits).abs().max() < 0.02 * theirs(IDS).logits.abs().max()


def test_attention_plugins_agree(tmp_path):
    save("gemma2", tmp_path)
    torch.testing.assert_close(load_model(tmp_path, attention="eager")(IDS), load_model(tmp_path)(IDS), atol=1e-5, rtol=0)


def test_names_without_prefix_masks_and_repeated_heads_are_understood(tmp_path):
    """The published GPT-2 has bare names and masks; others hold a tied head besides, or rotary frequencies."""
    theirs = save("gpt2", tmp_path / "gpt2")

    def as_published(tensors) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 256, 256)
        tensors["h.0.attn.masked_bias"] = torch.tensor(-1e4)

    weights(tmp_path / "gpt2", as_published)
    torch.testing.assert_close(load_model(tmp_path / "gpt2")(IDS), theirs(IDS).logits, atol=1e-4, rtol=0)

    theirs = save("llama-mha-tied", tmp_path / "llama")

    def with_head(tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(6)

    weights(tmp_path / "llama", with_head)
    torch.testing.assert_close(load_model(tmp_path / "llama")(IDS), theirs(IDS).logits, atol=1e-4, rtol=0)
    weights(tmp_path / "llama", lambda tensors: tensors["lm_head.weight"].mul_(2))
    with pytest.raises(UserError, match=r"ties lm_head.weight to model.embed_tokens.weight, but the files hold two different tensors"):
        load_model(tmp_path / "llama")


def test_weights_that_do_not_fit_are_listed(tmp_path):
    save("mixtral", tmp_path)

    def spoil(tensors) -> None:
        del tensors["model.layers.1.block_sparse_moe.experts.3.w2.weight"], tensors["model.norm.weight"]
        tensors["model.layers.9.extra.weight"] = torch.zeros(2)
        tensors["lm_head.weight"] = tensors["lm_head.weight"][:100].clone()

    weights(tmp_path, spoil)
    with pytest.raises(UserError) as error:
        load_model(tmp_path)
    for words in (
        "missing: model.layers.1.block_sparse_moe.experts.3.w2.weight, model.norm.weight",
        "unexpected: model.layers.9.extra.weight",
        "lm_head.weight is [100, 48] in the files and [131, 48] in the model",
    ):
        assert words in str(error.value)


@pytest.mark.parametrize(
    ("case", "fields", "says"),
    [
        ("llama", {"hidden_act": "gelu", "residual_multiplier": 0.5}, r"hidden_act='gelu' \(only 'silu'\), residual_multiplier=0.5; use"),
        ("llama", {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0}}, "rope type 'longrope' is not honoured"),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "slope": 1}}, "rope parameters that are not honoured: slope"),
        ("llama", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ("llama", {"hidden_size": "wide"}, "hidden_size is 'wide', which is no int"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("llama", {"num_key_value_heads": 3}, "num_key_value_heads: 3 does not divide"),
        ("mixtral", {"router_jitter_noise": 0.1}, r"router_jitter_noise=0.1 \(only 0.0\)"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ("gemma2", {"layer_types": ["full_attention"]}, "layer_types: 1 entries for 7 layers"),
        ("gpt2", {"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn=True"),
        ("gpt2", {"activation_function": "swish9"}, "activation_function: unknown 'swish9'"),
        ("llama", {"model_type": "lama"}, "no model plugin reads model_type 'lama'; did you mean 'llama'"),
        ("llama", {"model_type": None}, "has no model_type"),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(case, fields, says, tmp_path):
    save(case, tmp_path)
    edit(tmp_path, **fields)
    with pytest.raises(UserError, match=says) as error:
        load_model(tmp_path)
    assert "config.json" in str(error.value)


def test_what_is_no_model_directory_is_refused(tmp_path):
    with pytest.raises(UserError, match="no such directory"):
        load_model(tmp_path / "nowhere" / "at" / "all")
    with pytest.raises(UserError, match=r"has no config.json"):
        load_model(tmp_path)
    save("llama", tmp_path / "a", max_shard_size="50KB")
    next((tmp_path / "a").glob("model-00002-of-*")).unlink()
    with pytest.raises(UserError, match=r"files that model\.safetensors\.index\.json names are missing: model-00002"):
        load_model(tmp_path / "a")
    index = tmp_path / "a/model.safetensors.index.json"
    for name in ("../b/model.safetensors", "/etc/passwd", "..\\b", 1):
        index.write_text(json.dumps({"weight_map": {"x": name}}))
        with pytest.raises(UserError, match=r"model\.safetensors\.index\.json names .* no file beside it"):
            load_model(tmp_path / "a")
    save("llama", tmp_path / "b")
    file = tmp_path / "b/model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(UserError, match="is no whole safetensors file"):
        load_model(tmp_path / "b")
    file.unlink()
    with pytest.raises(UserError, match="holds no weights"):
        load_model(tmp_path / "b")
    (tmp_path / "b/pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UserError, match="pickled weights"):
        load_model(tmp_path / "b")
    (tmp_path / "b/config.json").write_text("[1]")
    with pytest.raises(UserError, match="is no JSON object"):
        load_model(tmp_path / "b")


def test_a_hub_repository_is_downloaded_without_pickles(tmp_path, monkeypatch):
    """The hub's client is called as it wants to be; the network is not."""
    import huggingface_hub

    theirs = save("llama", tmp_path / "snapshot")
    asked = {}

    def snapshot_download(repository, **options):
        asked.update(options, repository=repository)
        return str(tmp_path / "snapshot")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.chdir(tmp_path)
    torch.testing.assert_close(load_model("org/some-model@v2")(IDS), theirs(IDS).logits, atol=1e-4, rtol=0)
    assert asked["repository"] == "org/some-model" and asked["revision"] == "v2"
    assert not [pattern for pattern in asked["allow_patterns"] if "bin" in pattern or pattern == "*"]
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: (_ for _ in ()).throw(OSError("offline")))
    with pytest.raises(UserError, match=r"org/other: no such directory, and the hub gives none \(OSError: offline\)"):
        load_model("org/other")


def test_saving_never_overwrites_unasked_and_leaves_nothing_behind(tmp_path, monkeypatch):
    save("llama", tmp_path / "a")
    model = load_model(tmp_path / "a")
    with pytest.raises(UserError, match="exists already"):
        save_model(model, tmp_path / "a")
    save_model(model, tmp_path / "a", overwrite=True, max_shard_size="50KB")
    assert len(list((tmp_path / "a").glob("*.safetensors"))) > 2
    torch.testing.assert_close(AutoModelForCausalLM.from_pretrained(tmp_path / "a")(IDS).logits, make("llama")(IDS).logits)
    monkeypatch.setattr(type(model), "hf_config", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        save_model(model, tmp_path / "b")
    assert not (tmp_path / "b").exists() and not list(tmp_path.glob("*.tmp"))


def test_everything_is_there_by_name():
    assert {"load_model", "load_tokenizer", "save_model"} <= set(dir(package)) | set(package.__all__)


def shape_of(directory: Path, **fields):
    """The configuration that `model: {name: auto, path: …, fields: …}` makes."""
    from fw_plugins.model.auto import AutoConfig as Options, AutoModel

    return AutoModel(Options(str(directory), fields=fields))._plugin.config


@pytest.mark.parametrize(
    ("case", "fields", "expected"),
    [
        ("llama-theta", {"rope_theta": 777}, {"rope_theta": 777.0}),
        ("llama-theta", {"rope_scaling": {"rope_type": "linear", "factor": 2}}, {"rope_theta": 500000.0}),
        ("llama-theta", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5.0}}, {"rope_theta": 5.0}),
        ("qwen3_moe", {"num_experts": 4}, {"num_experts": 4}),
        ("gemma3", {"rope_local_base_freq": 5, "rope_theta": 6}, {"rope_local_base_freq": 5.0, "rope_theta": 6.0}),
        ("gemma3", {"sliding_window_pattern": 2}, {"layer_types": [["sliding_attention", "full_attention"][n % 2] for n in range(7)]}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2}, {"sliding_window": 9}),
        ("gemma2", {"final_logit_softcapping": None}, {"final_logit_softcapping": None}),
    ],
)
def test_changed_fields_act_however_they_are_spelt(case, fields, expected, tmp_path):
    save(case, tmp_path)
    changed = shape_of(tmp_path, **fields)
    for name, value in expected.items():
        assert getattr(changed, name) == value
    if "rope_scaling" in fields:
        assert changed.rope_scaling.factor == 2.0 and changed.rope_scaling.rope_type == "linear"
    if case == "qwen2":
        assert [changed.window(layer) for layer in range(3)] == [None, None, 9]


@pytest.mark.parametrize("model", ["auto", "hf"])
def test_changes_that_would_change_nothing_are_refused(model, tmp_path):
    from fw_plugins.model.auto import AutoConfig as AutoOptions, AutoModel
    from fw_plugins.model.hf import HFConfig, HFModel

    save("llama", tmp_path)
    options, plugin = {"auto": (AutoOptions, AutoModel), "hf": (HFConfig, HFModel)}[model]
    for fields, says in (({"atention_dropout": 0.1}, "atention_dropout"), ({"return_dict": False}, "return_dict")):
        with pytest.raises(UserError, match=says):
            plugin(options(str(tmp_path), fields=fields))
    assert plugin(options(str(tmp_path), fields={"attention_dropout": 0.1}))


@pytest.mark.parametrize(
    ("case", "harmless"),
    [
        ("qwen2", {"use_mrope": False}),
        ("gemma2", {"sliding_window_size": 9, "_attn_implementation": "eager", "hidden_act": "gelu_pytorch_tanh"}),
        ("gpt2", {"n_special": 0, "predict_special_tokens": True, "output_past": True, "n_ctx": 256, "summary_type": "cls_index"}),
        ("qwen3_moe", {"qkv_bias": False, "use_qk_norm": True, "shared_expert_intermediate_size": 0, "max_window_layers": 28}),
        (
            "llama",
            {"is_llama_config": True, "rope_interleaved": False, "pretraining_tp": 8, "unsloth_fixed": True},
        ),
        ("gemma3", {"hidden_act": "gelu_pytorch_tanh", "cache_implementation": "hybrid"}),
    ],
)
def test_what_published_files_carry_along_is_accepted(case, harmless, tmp_path):
    theirs = save(case, tmp_path)
    edit(tmp_path, **harmless)
    torch.testing.assert_close(load_model(tmp_path)(IDS), theirs(IDS).logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("case", ["gemma2", "gemma3"])
def test_an_absent_padding_id_is_transformers_own(case, tmp_path):
    """Looking up the padding id trains nothing, in Gemma by default."""
    save(case, tmp_path)
    edit(tmp_path, pad_token_id=None)
    theirs, ours = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager"), load_model(tmp_path)
    batch = torch.tensor([[0, 5, 0, 7, 0, 9]])
    torch.nn.functional.cross_entropy(ours(batch)[0, :-1], batch[0, 1:]).backward()
    theirs(batch, labels=batch).loss.backward()
    torch.testing.assert_close(ours.embed_tokens.weight.grad, theirs.model.embed_tokens.weight.grad, atol=1e-6, rtol=1e-4)
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**fields, "pad_token_id": None}))
    save_model(load_model(tmp_path), tmp_path / "copy")
    assert AutoConfig.from_pretrained(tmp_path / "copy").pad_token_id is None


def test_only_a_models_own_files_are_ever_replaced(tmp_path, monkeypatch):
    save("llama", tmp_path / "a")
    model = load_model(tmp_path / "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "b/precious.txt").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(UserError, match=r"holds precious.txt"):
            save_model(model, tmp_path / "b", overwrite=overwrite)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file"):
        save_model(model, tmp_path / "file", overwrite=True)
    (tmp_path / "c").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "c")
    save_model(model, tmp_path / "link")
    assert (tmp_path / "c/config.json").is_file()
    (tmp_path / "d").mkdir()
    monkeypatch.chdir(tmp_path / "d")
    save_model(model, ".")
    assert (tmp_path / "d/config.json").is_file()


def test_shapes_that_cannot_be_are_refused(tmp_path):
    save("qwen3_moe", tmp_path / "q")
    save("gemma2", tmp_path / "g")
    for directory, fields, says in (
        ("q", {"decoder_sparse_step": 0}, "decoder_sparse_step: 0 is too small"),
        ("q", {"mlp_only_layers": [99]}, "there is no block 99"),
        ("q", {"num_experts_per_tok": 7}, "num_experts_per_tok: 7 is not between 1 and the 6 experts"),
        ("g", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
        ("g", {"sliding_window": None}, "sliding_window"),
        ("q", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 0}}, "original_max"),
    ):
        with pytest.raises(UserError, match=says):
            shape_of(tmp_path / directory, **fields)


@pytest.mark.parametrize(
    ("base", "revision", "named"),
    [
        ("org/name", "abc123", "org/name@abc123"),
        ("org/name", None, "org/name"),
        ("org/name@main", "abc123", "org/name@main"),
        (".", "abc123", "."),
    ],
)
def test_an_adapters_base_is_of_the_revision_that_it_names(tmp_path, base, revision, named):
    told = {"peft_type": "LORA", "base_model_name_or_path": base, "revision": revision}
    (tmp_path / "adapter_config.json").write_text(json.dumps(told))
    assert named_base(tmp_path) == named
