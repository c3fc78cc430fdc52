"""Several adapters in one batch, against peft's own model of each."""

from __future__ import annotations

import json

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

import fw
import tokens
from conftest import fw as run_fw
from fw.errors import UserError
from models.architectures import VOCABULARY

NEW = 10
CONFIGS = {
    "narrow": LoraConfig(r=2, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False),
    "wide": LoraConfig(
        r=5, lora_alpha=7, use_rslora=True, target_modules="all-linear", init_lora_weights=False, rank_pattern={"k_proj": 3}
    ),
    "second block": LoraConfig(r=4, target_modules=["up_proj", "v_proj"], layers_to_transform=[1], init_lora_weights=False),
}


@pytest.fixture(scope="module")
def adapters(directory, tmp_path_factory):
    """Directories by name."""
    made = {}
    for number, (name, config) in enumerate(CONFIGS.items()):
        torch.manual_seed(number)
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(directory), config)
        made[name] = tmp_path_factory.mktemp(name)
        with torch.no_grad():
            for key, weight in model.named_parameters():
                if "lora_" in key:
                    weight.mul_(2)  # seen in every token; with 3, roundings grow to 1e-4 in the log-probabilities
        model.save_pretrained(made[name])
    return made


@pytest.fixture(scope="module")
def prompts():
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(tokens.FIRST, VOCABULARY, (length,), generator=generator).tolist() for length in (21, 4, 33, 1)]


@pytest.fixture(scope="module")
def expected(directory, adapters, prompts):
    """Ids and log-probabilities of each prompt, by adapter."""
    found = {}
    for name in (None, *adapters):
        model = AutoModelForCausalLM.from_pretrained(directory)
        if name is not None:
            model = PeftModel.from_pretrained(model, adapters[name])
        found[name] = []
        for prompt in prompts:
            settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "output_logits": True, "return_dict_in_generate": True}
            out = model.generate(input_ids=torch.tensor([prompt]), max_new_tokens=NEW, **settings)
            ids = out.sequences[0, len(prompt) :].tolist()
            found[name].append((ids, [float(row[0].log_softmax(-1)[token]) for row, token in zip(out.logits, ids, strict=True)]))
    return found


@pytest.mark.parametrize("options", [{}, {"step_tokens": 10, "max_sequences": 5}, {"max_sequences": 1}, {"kv_cache": "contiguous"}])
def test_each_request_has_its_own(directory, adapters, prompts, expected, options):
    llm = fw.LLM(directory, dtype="fp32", **options)
    for name, place in adapters.items():
        llm.load_adapter(name, place)
    names = [None, *adapters]
    asked = [(name, number) for number in range(len(prompts)) for name in names]
    for _ in range(2):  # the second time, beginnings of the same adapter are known, and no others
        results = llm.generate(
            [prompts[number] for _, number in asked], adapter=[name for name, _ in asked], max_tokens=NEW, temperature=0, ignore_eos=True
        )
        for (name, number), result in zip(asked, results, strict=True):
            ids, logprobs = expected[name][number]
            assert result.token_ids == ids, (name, number)
            assert result.logprobs == pytest.approx(logprobs, abs=1e-4)
    assert len({tuple(expected[name][0][0]) for name in names}) == 4, "adapters that change nothing would show nothing"


@pytest.mark.parametrize("options", [{"dtype": "fp32"}, {"dtype": "bf16"}, {"dtype": "fp32", "batch_invariant": True}])
def test_of_the_head(directory, prompts, tmp_path, options):
    """Which sees the rows alone whose logits are wanted: as the one adapter of a model does."""
    torch.manual_seed(0)
    config = LoraConfig(r=3, lora_alpha=12, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(directory), config)
    model.save_pretrained(tmp_path)
    beside = fw.LLM(directory, **options)
    beside.load_adapter("it", tmp_path)
    settings = {"max_tokens": NEW, "temperature": 0, "ignore_eos": True, "prompt_logprobs": 0}
    names = [name for _ in prompts for name in (None, "it")]
    found = beside.generate([prompt for prompt in prompts for _ in range(2)], adapter=names, **settings)
    close = 1e-4 if options["dtype"] == "fp32" else 0.1
    for llm, mine in ((fw.LLM(directory, **options), found[::2]), (fw.LLM(directory, adapter=tmp_path, **options), found[1::2])):
        for result, expected in zip(mine, llm.generate(prompts, **settings), strict=True):
            assert options["dtype"] == "bf16" or result.token_ids == expected.token_ids
            assert result.logprobs[:1] == pytest.approx(expected.logprobs[:1], abs=close)
            assert result.prompt_logprobs == pytest.approx(expected.prompt_logprobs, abs=close)
    logits = model(torch.tensor([prompts[0]])).logits[0].detach().log_softmax(-1)
    theirs = [float(logits[at, token]) for at, token in enumerate(prompts[0][1:])]
    assert found[1].prompt_logprobs == pytest.approx(theirs, abs=close)
    assert found[0].prompt_logprobs != pytest.approx(theirs, abs=0.2), "an adapter that changes nothing would show nothing"


@pytest.mark.parametrize("name", ["narrow", "wide"])
@pytest.mark.parametrize("weights", ["auto", "int8_weight_only", "w8a8"])
def test_the_one_of_a_model_is_computed_as_one_beside_it(directory, adapters, prompts, name, weights):
    """By the same kernels, to the last bit: alone, and in any company."""
    own, beside = fw.LLM(directory, dtype="bf16", weights=weights, adapter=adapters[name]), fw.LLM(directory, dtype="bf16", weights=weights)
    assert not any(isinstance(module, torch.nn.Linear) for module in own.model.modules())
    beside.load_adapter("it", adapters[name])
    settings = {"max_tokens": NEW, "temperature": 0, "ignore_eos": True, "prompt_logprobs": 0}

    def found(results):
        return [(result.token_ids, result.logprobs, result.prompt_logprobs) for result in results]

    together = found(own.generate(prompts, **settings))
    assert own.engine.runner.steady.repeated > 0, "steps are recorded, as those of a model without adapter"
    assert together == found(beside.generate(prompts, adapter="it", **settings))
    assert together == found(own.generate(prompt, **settings)[0] for prompt in prompts)
    assert together != found(beside.generate(prompts, **settings)), "an adapter that changes nothing would show nothing"


def test_two_at_once(directory, adapters, prompts):
    """The model's own, and another one beside it: what each adds is added."""
    found = {}
    for weights in ("bf16", "fp32"):
        llm = fw.LLM(directory, dtype=weights, adapter=adapters["wide"])
        llm.load_adapter("it", adapters["narrow"])
        result = llm.generate(prompts[0], adapter="it", max_tokens=0, prompt_logprobs=0)[0]
        found[weights] = result.prompt_logprobs
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(directory), adapters["wide"]).merge_and_unload()
    model = PeftModel.from_pretrained(model, adapters["narrow"])
    logits = model(torch.tensor([prompts[0]])).logits[0].detach().log_softmax(-1)
    theirs = [float(logits[at, token]) for at, token in enumerate(prompts[0][1:])]
    assert found["fp32"] == pytest.approx(theirs, abs=1e-4)
    assert sum(abs(a - b) for a, b in zip(found["bf16"], theirs, strict=True)) / len(theirs) < 0.1


def test_codes_are_of_layers_as_they_are(directory, tmp_path):
    config = LoraConfig(r=4, use_dora=True, target_modules="all-linear")
    get_peft_model(AutoModelForCausalLM.from_pretrained(directory), config).save_pretrained(tmp_path)
    why = (
        "inference.weights: w8a8 is of layers as they are, and an adapter changes 21 of them by more than low rank; merge it: fw checkpoint"
    )
    with pytest.raises(UserError, match=why):
        fw.LLM(directory, dtype="bf16", weights="w8a8", adapter=tmp_path)


def test_company_changes_nothing(directory, adapters, prompts):
    """In bfloat16, to the last bit where the kernels are."""
    llm = fw.LLM(directory, dtype="bf16")
    for name, place in adapters.items():
        llm.load_adapter(name, place)
    asked = [(name, prompt) for prompt in prompts for name in (None, *adapters)]
    settings = {"max_tokens": NEW, "temperature": 0, "ignore_eos": True}
    together = llm.generate([prompt for _, prompt in asked], adapter=[name for name, _ in asked], **settings)
    for (name, prompt), result in zip(asked, together, strict=True):
        alone = llm.generate([prompt], adapter=name, **settings)[0]
        assert result.token_ids == alone.token_ids
        assert result.logprobs == pytest.approx(alone.logprobs, abs=1e-6)


def test_loaded_and_dropped_while_running(directory, adapters, prompts, expected):
    llm = fw.LLM(directory, dtype="fp32", max_sequences=3)
    sampling = llm.sampling(max_tokens=NEW, temperature=0, ignore_eos=True)
    llm.load_adapter("it", adapters["narrow"])
    llm.engine.add("old", prompts[0], sampling, adapter="it")
    llm.engine.step()
    llm.engine.step()
    with pytest.raises(UserError, match="an adapter 'it' is loaded already; drop it first, or give another name"):
        llm.load_adapter("it", adapters["wide"])
    llm.drop_adapter("it")
    with pytest.raises(UserError, match=r"there is no adapter 'it' \(none is loaded\)"):
        llm.engine.add("none", prompts[0], sampling, adapter="it")
    llm.load_adapter("it", adapters["wide"])
    llm.engine.add("new", prompts[0], sampling, adapter="it")
    llm.engine.add("plain", prompts[0], sampling)
    results = {}
    while len(llm.engine):
        results |= {result.key: result.token_ids for result in llm.engine.step()[1]}
    assert results == {key: expected[name][0][0] for key, name in (("old", "narrow"), ("new", "wide"), ("plain", None))}
    with pytest.raises(UserError, match=r"there is no adapter 'its', did you mean 'it'\?|there is no adapter 'its'.*\(loaded are: it\)"):
        llm.generate([prompts[0]], adapter="its")
    with pytest.raises(UserError, match="adapter: 1 names for 2 prompts; give one for each, or one"):
        llm.generate(prompts[:2], adapter=["it"])


@pytest.mark.parametrize(
    "config",
    [
        LoraConfig(r=2, target_modules=["q_proj"], use_dora=True),
        LoraConfig(r=2, target_modules=["q_proj"], use_dora=True, layers_to_transform=[1]),
        LoraConfig(r=2, target_modules=["q_proj"], lora_bias=True),
        LoraConfig(r=2, target_modules=["embed_tokens"]),
        LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"]),
        IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    ],
)
def test_what_is_more_than_low_rank(directory, tmp_path, config):
    get_peft_model(AutoModelForCausalLM.from_pretrained(directory), config).save_pretrained(tmp_path)
    llm = fw.LLM(directory)
    with pytest.raises(UserError, match="changes more than linear layers by low rank, which several adapters at once cannot"):
        llm.load_adapter("it", tmp_path)
    with pytest.raises(UserError, match="elsewhere"):
        llm.load_adapter("it", tmp_path / "elsewhere")


def test_files_of_prompts(directory, adapters, prompts, expected, tmp_path):
    """Lines name adapters; in OpenAI's format the model is one."""
    settings = {"max_tokens": NEW, "temperature": 0, "ignore_eos": True}
    lines = [
        {"prompt": prompts[0], **settings},
        {"prompt": prompts[0], "adapter": "w", **settings},
        {"custom_id": "x", "url": "/v1/completions", "body": {"model": "n", "prompt": prompts[0], **settings}},
        {"prompt": prompts[0], "adapter": "other"},
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    named = [f"--adapters=n={adapters['narrow']}", f"--adapters=w={adapters['wide']}"]
    files = ["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")]
    found = run_fw("generate", str(directory), *files, *named, "inference.dtype=fp32").ok()
    assert "1 lines could not be answered" in found.err
    told = {line["line"]: line for line in map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())}
    assert told[1]["token_ids"] == expected[None][0][0] and told[2]["token_ids"] == expected["wide"][0][0]
    assert told[3]["response"]["body"]["model"] == "n"
    ids = [token for token in expected["narrow"][0][0] if token >= tokens.FIRST]
    assert told[3]["response"]["body"]["choices"][0]["text"] == fw.load_tokenizer(directory).decode(ids)
    assert "there is no adapter 'other'" in told[4]["error"]
    refused = run_fw("generate", str(directory), *files, "--adapters", "n")
    assert refused.code == 2 and "--adapters n: give NAME=DIR" in refused.err
