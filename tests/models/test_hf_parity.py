"""Every architecture against transformers' own: logits, loss, gradients, padding, packing, positions, generation, files."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import fw
from fw.kinds.checkpoint import parts
from models.architectures import CASES, VOCABULARY, make, save

LENGTH = 40


@pytest.fixture(scope="module", params=list(CASES))
def pair(request, tmp_path_factory):
    """A case's name, its directory, transformers' model and ours."""
    directory = tmp_path_factory.mktemp(request.param)
    theirs = save(request.param, directory)
    return request.param, directory, theirs, fw.load_model(directory)


def ids(rows: int = 2, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(rows + length))


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert theirs.std() > 0.05, "logits so flat prove nothing"
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def test_logits_loss_and_gradients(pair):
    case, _, theirs, ours = pair
    if case == "llama-dynamic":
        theirs = make(case)  # transformers' keeps the longest length it has seen
    batch = ids()
    close(ours(batch), theirs(batch).logits)

    def readout(x_BLD, head, auxiliary):
        loss = F.cross_entropy(head(x_BLD)[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
        assert (auxiliary is not None) == ("moe" in case or "mixtral" in case)
        return loss if auxiliary is None else loss + auxiliary

    loss = ours.train()(batch, readout=readout)
    their_loss = theirs.train()(batch, labels=batch).loss
    torch.testing.assert_close(loss, their_loss, atol=1e-6, rtol=0)
    loss.backward()
    their_loss.backward()
    expected = gradients_in_files(theirs)
    found = parts(ours, {name: parameter.grad for name, parameter in ours.named_parameters()})
    assert set(found) == set(expected)
    for name, part in found.items():
        gradient = part.whole(part.tensor)
        assert (gradient - expected[name]).norm() <= 1e-4 * expected[name].norm(), name
    ours.zero_grad(), theirs.zero_grad()
    ours.eval(), theirs.eval()


def gradients_in_files(theirs) -> dict[str, torch.Tensor]:
    """transformers' gradients by the names that its files have, by writing them as if they were weights."""
    import tempfile

    twin = AutoModelForCausalLM.from_config(theirs.config)
    with torch.no_grad():
        for mine, other in zip(twin.parameters(), theirs.parameters(), strict=True):
            mine.copy_(other.grad)
    with tempfile.TemporaryDirectory() as directory:
        twin.save_pretrained(directory)
        return load_file(f"{directory}/model.safetensors")


def test_left_padding(pair):
    case, _, theirs, ours = pair
    theirs = make(case) if case == "llama-dynamic" else theirs
    batch = ids(3)
    real = torch.ones_like(batch)
    real[0, :13] = real[1, :5] = 0
    positions = (real.cumsum(1) - 1).clamp(min=0)
    expected = theirs(batch, attention_mask=real, position_ids=positions).logits
    found = ours(batch, segments_BL=real)
    close(found[real.bool()], expected[real.bool()])
    assert found.isfinite().all()
    for row, padding in ((0, 13), (1, 5)):  # and the text alone says the same
        alone = (make(case) if case == "llama-dynamic" else theirs)(batch[row : row + 1, padding:]).logits[0]
        if case != "llama-dynamic":  # whose base depends on the longest row
            close(found[row, padding:], alone)


def test_packed_documents_do_not_see_each_other(pair):
    case, _, theirs, ours = pair
    lengths = [11, 17, 9]
    batch = ids(1, sum(lengths) + 3)
    segments = torch.tensor([[n for n, length in enumerate(lengths, 1) for _ in range(length)] + [0] * 3])
    packed = ours(batch, segments_BL=segments)
    start = 0
    for length in lengths:
        document = batch[:, start : start + length]
        if case == "llama-dynamic":
            theirs = make(case)
            if length < 17:  # transformers alone has a smaller base for a shorter document
                start += length
                continue
        close(packed[:, start : start + length], theirs(document).logits)
        start += length


def test_positions(pair):
    case, _, theirs, ours = pair
    theirs = make(case) if case == "llama-dynamic" else theirs
    batch = ids(2)
    positions = torch.stack([torch.arange(LENGTH) * 2, torch.arange(LENGTH) + 30])
    everything = torch.ones_like(batch)  # given, so that transformers does not take a jump for a new document
    expected = theirs(batch, position_ids=positions, attention_mask=everything).logits
    close(ours(batch, positions_BL=positions), expected)
    assert (expected - theirs(batch).logits).abs().max() > 1e-3


def test_greedy_generation(pair):
    case, _, theirs, ours = pair
    theirs.generation_config.eos_token_id = None
    cached = case != "llama-dynamic"  # transformers keeps keys that were turned by the smaller base
    expected = theirs.generate(ids(1, 8), max_new_tokens=64, do_sample=False, use_cache=cached, pad_token_id=0)
    found = ids(1, 8)
    with torch.no_grad():
        for _ in range(64):
            found = torch.cat((found, ours(found)[:, -1].argmax(-1, keepdim=True)), dim=1)
    assert found.tolist() == expected.tolist()
    assert theirs.config.tie_word_embeddings or len(set(found[0, 8:].tolist())) > 2  # a tied random model repeats itself


def test_files_come_back_bit_identical(pair, tmp_path):
    _, directory, theirs, ours = pair
    fw.save_model(ours, tmp_path / "ours")
    before, after = load_file(directory / "model.safetensors"), load_file(tmp_path / "ours/model.safetensors")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager")
    for (name, one), (other, two) in zip(theirs.state_dict().items(), back.state_dict().items(), strict=True):
        assert name == other and torch.equal(one, two), name
    torch.testing.assert_close(back(ids()).logits, make(pair[0])(ids()).logits, atol=1e-6, rtol=0)
    assert back.config.to_dict().keys() >= json.loads((directory / "config.json").read_text()).keys() - {"rope_parameters"}
