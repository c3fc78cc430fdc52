"""`fw prune`: what is left is what transformers computes without the rest; perplexities against transformers' own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from conftest import column, fw as run_fw
from fw.pretrained.calibration import calibration_text
from fw.pretrained.sparse import Sparsity
from perplexity import HELD_OUT, LENGTH, perplexity

transformers = pytest.importorskip("transformers")

TEXT = ["--text", "python-docs"]
FEW = ["--samples", "16", "--held-out", str(HELD_OUT), "--length", str(LENGTH)]
IDS = torch.randint(0, 40, (2, 12), generator=torch.Generator().manual_seed(1))


def pruned(model: Path, to: Path, *words: str) -> dict:
    return json.loads(run_fw("prune", str(model), "--to", str(to), *FEW, *TEXT, "--json", *words).ok().out)


def theirs(directory: Path):
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def linears(model) -> dict[str, nn.Linear]:
    return {name: module for name, module in model.model.named_modules() if isinstance(module, nn.Linear)}


@pytest.fixture
def plain(trained: Path, tmp_path: Path) -> Path:
    run_fw("checkpoint", "export", str(trained), "--to", str(tmp_path / "plain")).ok()
    return tmp_path / "plain"


@pytest.mark.parametrize("method", ["wanda", "magnitude"])
def test_two_of_four_stay_in_every_layer(plain: Path, tmp_path: Path, method: str) -> None:
    found = pruned(plain, tmp_path / "sparse", "--sparsity", "2:4", "--method", method)
    before, after = linears(theirs(plain)), linears(theirs(tmp_path / "sparse"))
    assert len(after) == found["layers"] == 21
    whole = theirs(plain)
    assert torch.equal(theirs(tmp_path / "sparse").lm_head.weight, whole.lm_head.weight)
    for name, module in after.items():
        four = module.weight.unflatten(1, (-1, 4))
        assert ((four != 0).sum(-1) == 2).all(), name
        kept = module.weight != 0
        assert torch.equal(module.weight[kept], before[name].weight[kept])
        if method == "magnitude":
            best = before[name].weight.abs().unflatten(1, (-1, 4)).topk(2).indices.sort().values
            assert torch.equal(best, four.abs().topk(2).indices.sort().values), name
    assert perplexity(plain) == pytest.approx(found["perplexity_before"], rel=1e-4)
    assert perplexity(tmp_path / "sparse") == pytest.approx(found["perplexity_after"], rel=1e-4)
    assert found["perplexity_after"] > found["perplexity_before"] and found["peak_bytes"] <= found["estimated_bytes"]
    if method == "magnitude":
        fitted = pruned(plain, tmp_path / "fitted", "--sparsity", "2:4")
        assert fitted["perplexity_after"] < found["perplexity_after"], "wanda knows what layers see"


def test_wanda_multiplies_by_the_norm_of_what_is_seen(plain: Path, tmp_path: Path) -> None:
    """In the first block's projections of queries, before which nothing is pruned."""
    pruned(plain, tmp_path / "sparse", "--sparsity", "0.5")
    name = "model.layers.0.self_attn.q_proj"
    model, seen = theirs(plain), []
    handle = model.get_submodule(name).register_forward_pre_hook(lambda module, args: seen.append(args[0].flatten(0, 1)))
    text = calibration_text(["python-docs"], plain, 16, 1, LENGTH, lambda said: None)
    with torch.no_grad():
        model(text.ids_NL)
    handle.remove()
    weight = model.get_submodule(name).weight
    score = weight.abs() * seen[0].norm(dim=0)
    half = score.shape[1] // 2
    expected = torch.zeros_like(score).scatter_(1, score.topk(half).indices, 1.0)
    found = load_file(tmp_path / "sparse" / "model.safetensors")[f"{name}.weight"]
    assert torch.equal((found != 0).float(), expected)


@pytest.mark.parametrize("name", ["mixtral", "gpt2"])
def test_what_stays_whole_does_and_is_said(name: str, trained: Path, tmp_path: Path) -> None:
    """Of a mixture, experts and routers; a GPT-2's files hold layers transposed, and groups are of inputs all the same."""
    configs = {
        "mixtral": transformers.MixtralConfig(**LLAMA, intermediate_size=48, num_local_experts=4, num_experts_per_tok=2),
        "gpt2": transformers.GPT2Config(n_embd=32, n_layer=3, n_head=4, n_positions=LENGTH),
    }
    source = saved(name, tmp_path, trained, configs[name])
    said = run_fw("prune", str(source), "--to", str(tmp_path / "sparse"), *FEW, *TEXT, "--sparsity", "2:4").ok().err
    before, after = theirs(source).state_dict(), theirs(tmp_path / "sparse").state_dict()
    projections = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight", "c_attn.weight", "c_proj.weight", "c_fc.weight")
    seen = 0
    for key, weight in after.items():
        if key.endswith(projections):
            weight_OI = weight.t() if name == "gpt2" else weight
            assert ((weight_OI.unflatten(1, (-1, 4)) != 0).sum(-1) == 2).all(), key
            seen += weight.numel()
        else:
            assert torch.equal(weight, before[key]), key
    total = theirs(source).num_parameters()
    whole = "stacked experts and their routers, embedding and head" if name == "mixtral" else "embedding and head"
    assert f"zeros among {seen:,} of {total:,} parameters; {whole} stay whole" in said


def test_equal_scores_are_kept_in_order() -> None:
    assert Sparsity.of("2:4").mask(torch.ones(1, 8)).tolist() == [[True, True, False, False] * 2]
    assert Sparsity.of("0.75").mask(torch.tensor([[1.0, 3.0, 2.0, 3.0]])).tolist() == [[False, True, False, False]]


def test_blocks_that_change_least_go_and_training_heals(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = pruned(plain, tmp_path / "shallow", "--layers", "2")
    model = theirs(plain)
    text = calibration_text(["python-docs"], plain, 16, 1, LENGTH, lambda said: None)
    states: list[Tensor] = []
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda module, args, kwargs: states.append((args or tuple(kwargs.values()))[0]), with_kwargs=True)
    model.model.layers[-1].register_forward_hook(lambda module, args, output: states.append(output))
    with torch.no_grad():
        model(text.ids_NL)
    influence = [1 - torch.cosine_similarity(a, b, dim=-1).mean() for a, b in zip(states, states[1:], strict=False)]
    least = int(torch.tensor(influence).argmin())
    model = theirs(plain)
    del model.model.layers[least]
    for number, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = number
    small = theirs(tmp_path / "shallow")
    assert small.config.num_hidden_layers == 2
    with torch.no_grad():
        assert torch.equal(small(text.ids_NL).logits, model(text.ids_NL).logits)
    assert perplexity(tmp_path / "shallow") == pytest.approx(found["perplexity_after"], rel=1e-4)

    monkeypatch.chdir(tmp_path)
    half = found["perplexity_after"] - (found["perplexity_after"] - found["perplexity_before"]) / 2
    (tmp_path / "heal.yaml").write_text(
        "model: {name: auto, path: shallow}\ndata: {name: text, source: python-docs, tokenizer: shallow}\n"
        "optimizer: {name: adamw, lr: 2e-3}\nprecision: fp32\n"
        "train: {max_steps: 40, global_batch_size: 16, sequence_length: 128, val_every: 0, save_every: 40, seed: 1}\n"
    )
    run_fw("train", "heal.yaml").ok()
    assert column("runs/heal", "loss")[-1] < column("runs/heal", "loss")[0]
    healed = perplexity(tmp_path / "runs/heal/checkpoints/latest")
    assert healed < half
    # By the whole model's distributions and hidden states alone: with weight 1 the text's own next tokens are not in the loss.
    teacher = "objective={name: distill, teacher: plain, weight: 1.0, hidden_weight: 1.0}"
    run_fw("train", "heal.yaml", teacher, "train.run_dir=runs/taught").ok()
    taught = perplexity(tmp_path / "runs/taught/checkpoints/latest")
    assert taught < half


LLAMA = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
ARCHITECTURES = {
    "llama": transformers.LlamaConfig(**LLAMA, intermediate_size=48, attention_bias=True, mlp_bias=True),
    "qwen3": transformers.Qwen3Config(**LLAMA, intermediate_size=48, head_dim=16, tie_word_embeddings=True),
    "gemma3": transformers.Gemma3TextConfig(**LLAMA, intermediate_size=48, head_dim=8, sliding_window=4, pad_token_id=0),
}


def saved(name: str, tmp_path: Path, trained: Path, config=None) -> Path:
    """With random weights, biases too, and a tokenizer whose ids it knows."""
    torch.manual_seed(0)
    config = config or ARCHITECTURES[name]
    config.vocab_size = 512
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(tmp_path / name)
    for file in (trained / "checkpoints" / "latest").glob("tokenizer*"):
        (tmp_path / name / file.name).write_bytes(file.read_bytes())
    return tmp_path / name


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_what_is_left_out_added_nothing_any_more(name: str, trained: Path, tmp_path: Path) -> None:
    """The same logits as the whole model with zeros for the columns of what was left out."""
    source = saved(name, tmp_path, trained)
    pruned(source, tmp_path / "narrow", "--features", "20", "--heads", "1")
    model, small = theirs(source), theirs(tmp_path / "narrow")
    assert small.config.intermediate_size == 20 and small.config.num_attention_heads == 2 and small.config.num_key_value_heads == 1
    for layer, cut in zip(model.model.layers, small.model.layers, strict=True):
        for whole, part in ((layer.mlp.down_proj, cut.mlp.down_proj), (layer.self_attn.o_proj, cut.self_attn.o_proj)):
            kept = [column for column in range(whole.in_features) if (whole.weight[:, column, None] == part.weight).all(0).any()]
            assert len(kept) == part.in_features
            gone = sorted(set(range(whole.in_features)) - set(kept))
            whole.weight.data[:, gone] = 0
    with torch.no_grad():
        assert torch.allclose(small(IDS).logits, model(IDS).logits, atol=1e-5)


def test_windows_stay_with_their_blocks(trained: Path, tmp_path: Path) -> None:
    config = transformers.Gemma2Config(
        vocab_size=512,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=4,
        pad_token_id=0,
    )
    source = saved("gemma2", tmp_path, trained, config)
    pruned(source, tmp_path / "shallow", "--layers", "2")
    model, small = theirs(source), theirs(tmp_path / "shallow")
    kinds = dict(enumerate(model.model.layers))
    for number, layer in enumerate(small.model.layers):
        (at,) = [n for n, whole in kinds.items() if torch.equal(whole.mlp.up_proj.weight, layer.mlp.up_proj.weight)]
        assert small.config.layer_types[number] == model.config.layer_types[at]


def test_bad_input_is_one_sentence_and_leaves_nothing(trained: Path, tmp_path: Path) -> None:
    def refused(*words: str) -> str:
        found = run_fw("prune", str(trained), "--to", str(tmp_path / "no"), *words)
        assert found.code == 2 and not (tmp_path / "no").exists() and not list(tmp_path.glob(".no*"))
        return found.err.splitlines()[-1]

    assert "give --layers, --heads or --features" in refused()
    assert "give --layers, --heads or --features" in refused("--layers", "2", "--sparsity", "0.5")
    assert "--layers: 4 of 3 cannot stay; from 1 to 3 can" in refused("--layers", "4")
    assert "--sparsity 4:2: a part between 0 and 1" in refused("--sparsity", "4:2")
    assert "--sparsity: rows of 64 weights do not divide into groups of 7" in refused("--sparsity", "2:7")
    assert "--method sparse is unknown (there are: wanda, magnitude)" in refused("--sparsity", "0.5", "--method", "sparse")
    assert "--memory: 1 MiB is less than" in refused("--layers", "2", "--memory", "1MiB")
