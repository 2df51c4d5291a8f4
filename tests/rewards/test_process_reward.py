"""Process reward models: which tokens are labelled, the loss of transformers on them, and rewards of steps."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForTokenClassification, AutoTokenizer
from transformers.loss.loss_utils import ForTokenClassification

from trl_ext.trainers.reward.process import ProcessReward, encode_steps, process_row

PROMPT = [{"role": "user", "content": "1 + 1?"}]
STEPS = ["One and one", "is two", "so 3"]


@pytest.fixture(scope="module")
def classifier(tiny_model_path, tmp_path_factory):
    path = tmp_path_factory.mktemp("prm")
    torch.manual_seed(0)
    model = AutoModelForTokenClassification.from_pretrained(tiny_model_path, num_labels=2, dtype=torch.float32)
    torch.nn.init.normal_(model.score.weight, std=0.1)
    model.save_pretrained(path)
    AutoTokenizer.from_pretrained(tiny_model_path).save_pretrained(path)
    return path


def test_the_loss_worked_by_hand():
    """Log-sum-exp less the logit of the label: 0.371101, 1.171101 and 1.620417; their mean is 1.054206."""
    logits = torch.tensor([[[9.0, -9.0], [0.2, 1.0], [0.5, -0.3], [5.0, 1.0], [-1.0, 0.4]]], requires_grad=True)
    loss = ForTokenClassification(logits, torch.tensor([[-100, 1, 1, -100, 0]]), SimpleNamespace(num_labels=2))
    assert loss.item() == pytest.approx(1.054206, abs=1e-6)
    (3 * loss).backward()
    assert logits.grad[0, 1].tolist() == pytest.approx([0.310026, -0.310026], abs=1e-6)
    assert not logits.grad[0, [0, 3]].any()


def test_labels_are_at_the_last_token_of_each_step(classifier):
    tokenizer = AutoTokenizer.from_pretrained(classifier)
    row = process_row(tokenizer, PROMPT, STEPS, [True, True, False])
    rendered = tokenizer.apply_chat_template(PROMPT, add_generation_prompt=True, tokenize=False)
    assert tokenizer.decode(row["input_ids"]) == rendered + "One and one\nis two\nso 3\n"
    ends = {place: label for place, label in enumerate(row["labels"]) if label != -100}
    assert list(ends.values()) == [1, 1, 0]
    assert all(tokenizer.decode(row["input_ids"][place]) == "\n" for place in ends)
    assert encode_steps(tokenizer, "a", ["b"], "->")[1] == [3]
    with pytest.raises(ValueError, match="shorter"):
        process_row(tokenizer, PROMPT, STEPS, [True])


def test_rewards_are_probabilities_without_padding(classifier):
    """Each response by itself, and the same in batches of two."""
    reward = ProcessReward(classifier, batch_size=2)
    responses = [STEPS, ["a"], ["one two three four", "b"]]
    found = reward(prompts=[PROMPT, "x", PROMPT], steps=responses, finished=[True] * 3)
    model = AutoModelForTokenClassification.from_pretrained(classifier)
    for prompt, steps, own in zip([PROMPT, "x", PROMPT], responses, found, strict=True):
        ids, places = encode_steps(reward.tokenizer, prompt, steps)
        with torch.no_grad():
            wrong, right = model(torch.tensor([ids])).logits[0, places].T
        assert own == pytest.approx(torch.sigmoid(right - wrong).tolist(), abs=1e-5)
    assert len({value for own in found for value in own}) == 6
