"""Families that fw does not implement, run by transformers' own code: built without bytes, filled by fw, equal to from_pretrained."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

import fw
import serving
from conftest import column, fw as run_fw
from plugins.test_activation import SPEC, plugin as activation

_SHAPE = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
_OLD = {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4}
FAMILIES = {
    "gpt_neox": {**_SHAPE, "rotary_pct": 0.5},
    "phi": _SHAPE,
    "phi3": {**_SHAPE, "pad_token_id": 0},
    "olmo2": _SHAPE,
    "cohere": _SHAPE,
    "granite": {**_SHAPE, "logits_scaling": 3.0, "embedding_multiplier": 2.0},
    "starcoder2": {**_SHAPE, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "stablelm": {**_SHAPE, "num_key_value_heads": 4},
    "gptj": _OLD,
    "gpt_neo": {"vocab_size": 97, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
    "opt": {
        "vocab_size": 97,
        "hidden_size": 32,
        "ffn_dim": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "word_embed_proj_dim": 32,
    },
    "bloom": {"vocab_size": 97, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "falcon": _SHAPE,
    "olmoe": {**_SHAPE, "num_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {
        **_SHAPE,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "num_key_value_heads": 2,
        "decoder_sparse_step": 2,
    },
}
SHARED_ROWS_REFUSED = {"opt", "bloom", "falcon"}
IDS = torch.randint(1, 97, (2, 24), generator=torch.Generator().manual_seed(0))


@pytest.fixture(params=FAMILIES)
def family(request, tmp_path):
    """Its name, its directory and transformers' model."""
    config = AutoConfig.for_model(request.param, **FAMILIES[request.param], bos_token_id=1, eos_token_id=1)
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    theirs.save_pretrained(tmp_path / "theirs")
    return request.param, tmp_path / "theirs", theirs


def test_equals_transformers_in_and_out(family, tmp_path):
    _, directory, theirs = family
    ours = fw.load_model(directory, attention="eager", model="hf")
    torch.testing.assert_close(ours(IDS), theirs(IDS).logits, atol=1e-5, rtol=0)
    assert len({type(block) for block in ours.blocks}) == 1
    assert len(ours.blocks) == theirs.config.num_hidden_layers
    assert ours.flops_per_token(24) > 0 and 0 < len(ours.undecayed()) < len(list(ours.parameters()))
    fw.save_model(ours, tmp_path / "ours")
    before, after = load_file(directory / "model.safetensors"), load_file(tmp_path / "ours/model.safetensors")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager")
    torch.testing.assert_close(back(IDS).logits, theirs(IDS).logits, atol=1e-6, rtol=0)


def test_bf16_keeps_what_transformers_keeps_in_fp32(family):
    _, directory, _ = family
    theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16, attn_implementation="eager").eval()
    ours = fw.load_model(directory, torch.bfloat16, attention="eager", model="hf")
    torch.testing.assert_close(ours(IDS), theirs(IDS).logits, atol=1e-6, rtol=0)
    buffers = dict(theirs.named_buffers())
    for name, buffer in ours.hf.named_buffers():
        assert buffer.dtype == buffers[name].dtype and torch.equal(buffer, buffers[name]), name


def test_documents_share_a_row_only_where_the_family_keeps_them_apart(family):
    name, directory, theirs = family
    ours = fw.load_model(directory, attention="eager", model="hf")
    segments = torch.tensor([[1] * 10 + [2] * 11 + [0] * 3, [0] * 4 + [1] * 20])
    if name in SHARED_ROWS_REFUSED:
        with pytest.raises(fw.UserError, match="one document per row"):
            ours(IDS, segments_BL=segments)
        return
    packed = ours(IDS, segments_BL=segments)
    for row, start, end in ((0, 0, 10), (0, 10, 21), (1, 4, 24)):
        torch.testing.assert_close(packed[row, start:end], theirs(IDS[row : row + 1, start:end]).logits[0], atol=1e-5, rtol=0)
    positions = torch.arange(24)[None] + torch.tensor([[0], [3]])
    expected = theirs(IDS, position_ids=positions, attention_mask=torch.ones_like(IDS)).logits
    torch.testing.assert_close(ours(IDS, positions_BL=positions), expected, atol=1e-5, rtol=0)


def test_one_document_per_row_may_be_padded_in_every_family(family):
    _, directory, theirs = family
    ours = fw.load_model(directory, attention="eager", model="hf")
    padded = ours(IDS, segments_BL=torch.tensor([[1] * 17 + [0] * 7, [1] * 24]))
    torch.testing.assert_close(padded[0, :17], theirs(IDS[:1, :17]).logits[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(padded[1], theirs(IDS[1:]).logits[0], atol=1e-5, rtol=0)
    assert ours(IDS, segments_BL=torch.zeros_like(IDS)).isfinite().all()


def test_what_cannot_be_run_is_refused(tmp_path):
    with pytest.raises(fw.UserError, match="takes no path"):
        fw.load_model(tmp_path, model="llama")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no_such_family"}))
    with pytest.raises(fw.UserError, match="transformers does not read"):
        fw.load_model(tmp_path, model="hf")


def test_an_encoder_is_no_causal_language_model(tmp_path):
    """transformers builds BERT as a causal language model whether or not it is one."""
    for decoder in (False, True):
        config = AutoConfig.for_model("bert", **_SHAPE, is_decoder=decoder)
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / str(decoder))
    with pytest.raises(fw.UserError, match="sees later tokens"):
        fw.load_model(tmp_path / "False", model="hf")(IDS)
    assert fw.load_model(tmp_path / "True", model="hf")(IDS).shape == (2, 24, 97)


def test_a_family_without_attention(tmp_path):
    config = AutoConfig.for_model("mamba", vocab_size=97, hidden_size=32, num_hidden_layers=2, bos_token_id=1, eos_token_id=1)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    ours = fw.load_model(tmp_path, attention="eager", model="hf")
    assert ours.kv_shapes == [] and [type(block).__name__ for block in ours.blocks] == ["MambaBlock"] * 2 and ours.flops_per_token(8) > 0


def test_an_attention_the_family_does_not_have_is_refused(tmp_path):
    config = AutoConfig.for_model("bloom", **FAMILIES["bloom"])
    AutoModelForCausalLM.from_config(config, attn_implementation="eager").save_pretrained(tmp_path)
    with pytest.raises(fw.UserError, match="transformers builds no such model with attention 'sdpa'"):
        fw.load_model(tmp_path, model="hf")


def test_parameters_that_a_family_computes_have_no_bytes_either():
    """Llama 4 fills its experts with zeros, which are parameters and not buffers."""
    from fw_models.hf_wrapper import HFCausalLM

    config = AutoConfig.for_model("llama4_text", **_SHAPE, num_key_value_heads=2, head_dim=8, num_local_experts=2, intermediate_size_mlp=64)
    model = HFCausalLM(lambda dtype: AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager"))
    assert all(p.is_meta for p in model.parameters())


def test_the_routers_balance_is_in_the_loss_that_trains(tmp_path):
    """As transformers adds it to its own, where the configuration asks for it."""
    from fw_plugins.objective.causal_lm import CausalLMConfig, CausalLMObjective

    config = AutoConfig.for_model(
        "olmoe", **FAMILIES["olmoe"], output_router_logits=True, router_aux_loss_coef=5.0, bos_token_id=1, eos_token_id=1
    )
    theirs = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    theirs.save_pretrained(tmp_path)
    ours = fw.load_model(tmp_path, model="hf")
    objective = CausalLMObjective(CausalLMConfig())
    batch = {"input_ids": IDS, "labels": torch.cat([IDS[:, 1:], torch.full((2, 1), -100)], dim=1)}
    count = objective.count(batch)
    with_balance = float(objective.loss_sum(ours.train(), batch).detach()) / count
    without = float(objective.loss_sum(ours.eval(), batch).detach()) / count
    assert with_balance == pytest.approx(float(theirs.train()(IDS, labels=IDS).loss), rel=1e-5)
    assert without == pytest.approx(float(theirs.eval()(IDS, labels=IDS, output_router_logits=False).loss), rel=1e-5)
    assert with_balance > without + 1


@pytest.mark.parametrize(
    "how", [{"full": {}}, {"sqrt": {}}, {"selective": {}}, {"auto": {"budget": "100KiB"}}], ids=lambda how: next(iter(how))
)
def test_recomputation_changes_no_gradient(family, how):
    """transformers walks the blocks itself, with keywords of its own."""
    _, directory, _ = family
    found = []
    for name, options in ({"none": {}} | how).items():
        model = fw.load_model(directory, attention="eager", model="hf").train()
        made = activation(name, **options)
        made.check(model, {}, SPEC, IDS.shape[1])
        made.apply(model, SPEC, IDS.shape[1])
        for _ in range(3):
            model.zero_grad()
            torch.manual_seed(0)
            loss = model(IDS, readout=lambda x, head, extra: head(x).float().logsumexp(-1).sum() + (0 if extra is None else extra))
            loss.backward()
        found.append({"loss": loss.detach(), **{n: p.grad for n, p in model.named_parameters() if p.grad is not None}})
    plain, again = found
    assert plain.keys() == again.keys() and all(torch.equal(plain[key], again[key]) for key in plain)


@pytest.mark.parametrize("more", [["peft=lora"], ["peft=ia3", "quantization={name: w8a16, group_size: 16}"]], ids=["adapters", "codes"])
def test_what_begins_from_files_is_adapted_as_fws_own_is(workspace, more):
    serving.make_model(workspace / "base", hidden_size=32, intermediate_size=64)
    data = "data={name: text, files: [corpus.txt], tokenizer: base}"
    for name in ("hf", "auto"):
        model = f"model={{name: {name}, path: base}}"
        run_fw("train", "tiny.yaml", model, data, *more, "train.max_steps=3", "optimizer.lr=0.001", f"train.run_dir={name}").ok()
    found, expected = column("hf", "loss"), column("auto", "loss")
    assert found[0] == pytest.approx(expected[0], rel=1e-5), "before anything is learnt"
    assert len(found) == 3 and found == pytest.approx(expected, rel=1e-3), "adapters begin with other numbers, by their names"
